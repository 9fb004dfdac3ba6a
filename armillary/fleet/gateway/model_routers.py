"""The models of a gateway: their settings, routers, and connections to replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import NotFound
from armillary.fleet.gateway.fair_queue import FairQueue
from armillary.fleet.gateway.gateway_config import GatewayConfig, ModelSettings, ReplicaSettings
from armillary.fleet.gateway.model_guards import ModelGuards
from armillary.fleet.gateway.routing import Replica, Router
from armillary.fleet.gateway.upstream import ReplicaPool
from armillary.serving.http.problem import Problem


@dataclass(eq=False, slots=True)
class Link:
    """How a replica is reached."""

    settings: ReplicaSettings
    pool: ReplicaPool
    api_key: str  # empty: none

    def head(self, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The head of a request, which ends with an empty line."""
        lines = [
            f"{method} {self.pool.base_path}{path} HTTP/1.1".encode(),
            b"host: " + self.pool.authority,
            *(name + b": " + value for name, value in headers),
        ]
        if self.api_key:
            lines.append(b"authorization: Bearer " + self.api_key.encode())
        return b"\r\n".join(lines) + b"\r\n\r\n"


class Models:
    """Name -> settings and router."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._models = {model.name: (model, _router(model, config)) for model in config.models}
        self._guards = {model.name: ModelGuards(model.guards) for model in config.models if model.guards}
        self._queues = {model.name: _queue(model, config) for model in config.models if model.max_in_flight}

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def find(self, name: str) -> tuple[ModelSettings, Router]:
        """Problem 404 for an unknown model."""
        if name not in self._models:
            text = f"no model '{name[:100]}' here; GET /v1/models lists them"
            raise Problem(404, text, param="model", code="model_not_found")
        return self._models[name]

    def with_fallbacks(self, name: str) -> list[ModelSettings]:
        """A model and those that may answer for it."""
        chain = [self.find(name)[0]]
        while chain[-1].fallback and chain[-1].fallback not in [model.name for model in chain]:
            chain.append(self.find(chain[-1].fallback)[0])
        return chain

    def guards(self, name: str) -> ModelGuards | None:
        """The checks of a model; none: it has none."""
        return self._guards.get(name)

    def all_guards(self) -> Mapping[str, ModelGuards]:
        return self._guards

    def queue(self, name: str) -> FairQueue | None:
        """Where requests of a model wait; none: they do not."""
        return self._queues.get(name)

    def queues(self) -> Mapping[str, FairQueue]:
        return self._queues

    def add_replica(self, model: str, name: str, settings: ReplicaSettings) -> Replica:
        """A replica that has just become ready: it gets requests from now on."""
        replica = Replica(name=name, canary=settings.canary, shadow=settings.shadow, link=_link(settings, self._config))
        self.find(model)[1].add(replica)
        return replica

    def remove_replica(self, model: str, replica: Replica) -> None:
        """A replica that is no more; its connections are closed."""
        self.find(model)[1].remove(replica)
        replica.link.pool.close()

    def replicas(self) -> list[tuple[ModelSettings, Replica]]:
        return [(model, replica) for model, router in self._models.values() for replica in router.replicas]


def _queue(model: ModelSettings, config: GatewayConfig) -> FairQueue:
    assert model.max_in_flight is not None
    settings = config.gateway
    return FairQueue(model.max_in_flight, max_waiting=settings.max_waiting, max_wait_s=settings.max_wait_s)


def _router(model: ModelSettings, config: GatewayConfig) -> Router:
    replicas = [
        Replica(name=f"{model.name}/{number}", canary=each.canary, shadow=each.shadow, link=_link(each, config))
        for number, each in enumerate(model.replicas)
    ]
    return Router(replicas, model.policy, canary_fraction=model.canary_fraction, shadow_fraction=model.shadow_fraction)


def _link(settings: ReplicaSettings, config: GatewayConfig) -> Link:
    pool = ReplicaPool(settings.url, connect_timeout_s=config.gateway.connect_timeout_s)
    return Link(settings, pool, _first_line(settings.api_key_file))


def _first_line(name: str) -> str:
    if not name:
        return ""
    path = Path(name).expanduser()
    if not path.is_file():
        raise NotFound(f"no file {path}; write the replica's API key into it")
    return path.read_text(encoding="utf-8").split("\n", 1)[0].strip()
