"""The gateway's configuration: models, their replicas, routing, limits and timeouts, as a TOML file.

[gateway]
redis = "redis://127.0.0.1:6379/0"      # limits shared by several gateways; empty: in this process

[[models]]
name = "support-bot"
policy = "prefix"
replicas = [{ url = "http://127.0.0.1:8001" }, { url = "http://127.0.0.1:8002" }]
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from armillary.errors import BadRecipe, NotFound
from armillary.fleet.guards.guard_config import GuardSettings
from armillary.spec.toml.fields import build

Policy = Literal["round-robin", "least-load", "power-of-two", "prefix"]
Probe = Literal["auto", "ready", "models", "completion", "none"]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """One server of a model."""

    url: str
    """its address, like http://127.0.0.1:8001; the path before /v1, if any, included"""
    model: str = ""
    """the server's own name of the model; empty: the same"""
    api_key_file: str = ""
    """file whose first line is the key that this server wants"""
    vllm_fields: Literal["auto", "yes", "no"] = "auto"
    """whether it knows cache_salt and priority, which keep the prefix caches of keys apart and pass on their priority;
    auto: yes for servers without an api_key_file, as providers refuse unknown fields"""
    canary: bool = False
    """a canary: it gets the model's canary_fraction of requests, and nothing else while others work"""

    shadow: bool = False
    """a shadow: it gets copies of the model's shadow_fraction of requests, and its answers are thrown away"""

    @property
    def takes_vllm_fields(self) -> bool:
        return self.vllm_fields == "yes" or (self.vllm_fields == "auto" and not self.api_key_file)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BadRecipe(f"replica url '{self.url}' is not an address; write it like http://127.0.0.1:8001")
        if parts.username or parts.password:
            raise BadRecipe("a replica's url holds a password; put its key into api_key_file instead")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model that clients may ask for."""

    name: str
    replicas: tuple[ReplicaSettings, ...]
    managed: bool = False
    """its replicas are started and stopped by an autoscaler (armillary up), and a request waits for one where there is
    none"""
    max_park_s: float = 120.0
    """managed: time for which a request waits for the first replica"""
    policy: Policy = "prefix"
    """prefix: the replica that has seen the longest part of the prompt, unless it is busier than others"""
    canary_fraction: float = 0.05
    """share of requests for replicas marked as canaries"""
    shadow_fraction: float = 0.05
    """share of requests of which replicas marked as shadows get a copy"""
    fallback: str = ""
    """model that answers instead where no replica of this one works"""
    probe: Probe = "auto"
    """health check: ready: GET /ready; models: GET /v1/models; completion: one token; auto: ready where the server has
    it, else completion; none: only failed requests count"""
    bytes_per_token: float = 1.0
    """bytes of prompt text that count as a token when tokens are reserved; 1 is never too few, English has 3 to 4"""
    template_tokens: int = 64
    """tokens that its chat template adds to a prompt at most, such as a default system prompt"""
    stream_usage: bool = True
    """ask replicas for token counts at the end of streams, also where the client did not; it does not see them"""
    cache_s: float = 0.0
    """seconds for which a response is kept for equal requests of the same key, where chance plays no part (temperature
    0, embeddings); 0: never"""
    max_in_flight: int | None = None
    """requests at its replicas at once; more wait here, shared fairly between keys; none: all are passed on"""
    guards: tuple[GuardSettings, ...] = ()
    """checks of prompts and answers, in this order (fleet/guards/guard_config.py)"""
    default_max_tokens: int = 1024
    """max_tokens of requests that have none, where their key has a token limit"""
    input_usd_per_million: float = 0.0
    """price of a million prompt tokens, for accounting"""
    output_usd_per_million: float = 0.0
    """price of a million completion tokens"""

    def __post_init__(self) -> None:
        if not self.replicas and not self.managed:
            raise BadRecipe(f'model {self.name} has no replicas; add replicas = [{{ url = "http://…" }}]')
        if self.input_usd_per_million < 0 or self.output_usd_per_million < 0:
            raise BadRecipe(f"a price of {self.name} is negative; correct it")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise BadRecipe(f"max_in_flight of {self.name} is at least 1; leave it out for no limit")
        if self.cache_s < 0:
            raise BadRecipe(f"cache_s of {self.name} is negative; leave it out to keep no responses")
        if not 0 <= self.canary_fraction <= 1:
            raise BadRecipe(f"canary_fraction = {self.canary_fraction} of {self.name} is no share; try 0.05")
        if not 0 <= self.shadow_fraction <= 1:
            raise BadRecipe(f"shadow_fraction = {self.shadow_fraction} of {self.name} is no share; try 0.05")
        if self.bytes_per_token < 1 or self.default_max_tokens < 1 or self.template_tokens < 0:
            raise BadRecipe(
                f"bytes_per_token and default_max_tokens of {self.name} are at least 1, template_tokens at least 0; "
                "correct them"
            )

    def usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.input_usd_per_million + completion_tokens * self.output_usd_per_million) / 1e6


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Everything but the models."""

    redis: str = ""
    """redis://… for limits that several gateways share; empty: this process alone"""
    on_redis_failure: Literal["refuse", "allow"] = "refuse"
    """requests with limits while Redis does not answer: refused with 503, or served without counting"""
    retries: int = 2
    """further replicas tried before the first byte of a response"""
    connect_timeout_s: float = 2.0
    first_token_timeout_s: float = 120.0
    """until a response begins"""
    idle_timeout_s: float = 60.0
    """between two parts of a response"""
    max_body_bytes: int = 4_000_000
    health_interval_s: float = 1.0
    health_timeout_s: float = 1.25
    slow_factor: float = 8.0
    """a replica whose streams take so many times as long between chunks as those of its model's other replicas (without
    such: as its own did before) leaves the rotation while others work; 0: never"""
    slow_gap_s: float = 0.5
    """and at least so long between chunks, so that streams that anybody would call fast never count as slow"""
    slow_grace_s: float = 10.0
    """streams that are still so slow after this time end with an error, so that their clients can ask again"""
    max_in_flight: int = 4096
    """requests of all clients, those that wait included; more get 429"""
    max_waiting: int = 1024
    """requests per model that wait for one of its max_in_flight; more get 429, the busiest key's first"""
    max_wait_s: float = 30.0
    """time after which a request that waits gets 503"""
    cache: Literal["memory", "redis"] = "memory"
    """where responses are kept; redis: shared by several gateways"""
    cache_bytes: int = 64_000_000
    """memory for kept responses of all models"""
    max_blocked_fraction: float = 0.05
    """safety SLO: share of requests that guards block; above it diagnosis reports it"""
    max_refusal_fraction: float = 0.2
    """safety SLO: share of guarded answers in which the model refuses"""
    max_guard_s: float = 0.1
    """safety SLO: mean time of a check"""
    admin_keys: str = ""
    """file of Ed25519 public keys (ssh-keygen), one per line, that may call /admin; empty: nobody may"""
    audit: str = ""
    """file for one JSON line per request, without prompt text; empty: audit.jsonl beside the keys"""
    otlp: str = ""
    """address of an OpenTelemetry collector (http://…:4318/v1/traces) for a span per request; empty: none"""
    cors_origins: tuple[str, ...] = ()
    """origins of browser pages that may call the gateway; * for all"""
    tls_certificate: str = ""
    """PEM file of a certificate with its chain: serve HTTPS; empty: HTTP"""
    tls_key: str = ""
    """PEM file of the certificate's key"""
    root_path: str = ""
    """path before /v1, where a proxy adds one"""

    def __post_init__(self) -> None:
        names = (
            "connect_timeout_s",
            "first_token_timeout_s",
            "idle_timeout_s",
            "health_interval_s",
            "health_timeout_s",
            "slow_gap_s",
            "slow_grace_s",
            "max_wait_s",
        )
        for name in names:
            if getattr(self, name) <= 0:
                raise BadRecipe(f"gateway.{name} must be above 0; leave it out for its default")
        if self.slow_factor and self.slow_factor < 2:
            raise BadRecipe("gateway.slow_factor is at least 2; 0 turns it off")
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise BadRecipe("HTTPS needs both gateway.tls_certificate and gateway.tls_key; give both or neither")
        if self.retries < 0 or self.max_in_flight < 1 or self.max_body_bytes < 1 or self.max_waiting < 0:
            raise BadRecipe(
                "gateway.retries, max_waiting, max_in_flight, max_body_bytes cannot be negative; correct it"
            )
        if self.cache == "redis" and not self.redis:
            raise BadRecipe('gateway.cache = "redis" needs gateway.redis; give its address')


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """A gateway's configuration file."""

    gateway: GatewaySettings = GatewaySettings()
    models: tuple[ModelSettings, ...] = ()

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise BadRecipe(f"model {twice} is there twice; give it one table with all replicas")
        for model in self.models:
            if model.fallback and (model.fallback not in names or model.fallback == model.name):
                raise BadRecipe(f"fallback '{model.fallback}' of {model.name} is no other model; name one of {names}")


def load_config(path: Path) -> GatewayConfig:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"no file {path}; write [[models]] with name and replicas into it") from None
    except tomllib.TOMLDecodeError as error:
        raise BadRecipe(f"{path} is not TOML ({error}); correct it") from None
    return build(GatewayConfig, _as_tuples(table), str(path))


def _as_tuples(table: dict[str, Any]) -> dict[str, Any]:
    models = table.get("models", [])
    if not isinstance(models, list):
        raise BadRecipe("models is a list of tables; write [[models]] with two brackets")
    return table
