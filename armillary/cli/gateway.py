"""`armillary gateway`: keys, limits and routing in front of any OpenAI-compatible servers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.output import Output
from armillary.cli.verb_decorator import VerbGroup, moved
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.fleet.gateway.gateway_config import GatewayConfig
    from armillary.fleet.gateway.keys import ApiKey, KeyStore, Limits


class GatewayGroup(VerbGroup):
    """`gateway --config …` is short for `gateway run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help") and not ctx.resilient_parsing:
            args = ["run", *args]
        return super().parse_args(ctx, args)


gateway = GatewayGroup(
    "gateway",
    help="Keys, limits and routing in front of any OpenAI-compatible servers.\n\n"
    "`armillary gateway --upstream NAME=http://127.0.0.1:8001` runs one, and `armillary gateway run --help` has its "
    "options; `armillary gateway keys` manages its keys.",
)
keys = VerbGroup("keys", help="API keys: add, list, rotate and revoke; a running gateway notices within a second.")
gateway.add_command(keys)
keys_option = click.option(
    "--keys", "place", default="", metavar="FILE", help="File or redis://… of keys.  [gateway/keys.json in the home]"
)
_DAY_S = 86_400.0


@gateway.verb
@click.option("--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="TOML with [[models]].")
@click.option(
    "--upstream", "upstreams", multiple=True, metavar="NAME=URL", help="A server of a model; may be repeated."
)
@click.option("--policy", type=click.Choice(["prefix", "least-load", "power-of-two", "round-robin"]), default="prefix")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=9000, show_default=True, type=click.IntRange(0, 65_535), help="0 takes a free one.")
@click.option("--redis", default="", help="redis://… for limits that several gateways share.")
@click.option("--nginx-config", "nginx", type=click.Path(path_type=Path), help="Write nginx's configuration, and end.")
@keys_option
def run(
    out: Output,
    home: Home,
    file: Path | None,
    upstreams: Sequence[str],
    policy: str,
    host: str,
    port: int,
    redis: str,
    nginx: Path | None,
    place: str,
) -> None:
    """Run a gateway until SIGTERM. Models come from --config, or from --upstream, one per replica."""
    if nginx is not None:
        return _write_nginx(out, nginx, host, port, file)
    from armillary.serving.http.server import ListenOptions, require_http

    require_http()
    config = _config(file, upstreams, policy, redis)
    from armillary.fleet.gateway.run_gateway import run_gateway

    say = partial(click.echo, err=out.mode != "human")
    run_gateway(config, ListenOptions(host=host, port=port), keys=_keys(home, place), folder=_folder(home), say=say)


def _write_nginx(out: Output, target: Path, host: str, port: int, file: Path | None) -> None:
    """Write the configuration of an nginx in front of a gateway on this address."""
    from armillary.fleet.gateway.gateway_config import GatewaySettings, load_config
    from armillary.fleet.gateway.nginx_config import config_before
    from armillary.store.atomic import write_text

    settings = load_config(file).gateway if file is not None else GatewaySettings()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    write_text(target, config_before(settings, host, port))
    out.say(f"wrote {target}: put it into /etc/nginx/conf.d, add further gateways under upstream, and run nginx -t")
    out.result({"file": str(target), "gateway": address}, quiet=str(target))


def _config(file: Path | None, upstreams: Sequence[str], policy: str, redis: str) -> GatewayConfig:
    from dataclasses import replace

    from armillary.fleet.gateway.gateway_config import GatewayConfig, load_config
    from armillary.spec.toml.fields import build

    if (file is None) == (not upstreams):
        raise BadInput("give either --config FILE or --upstream NAME=URL, once per server")
    if file is not None:
        config = load_config(file)
    else:
        urls: dict[str, list[dict[str, str]]] = {}
        for text in upstreams:
            name, _, url = text.partition("=")
            if not url:
                raise BadInput(f"--upstream {text} lacks its address; write it like bot=http://127.0.0.1:8001")
            urls.setdefault(name, []).append({"url": url})
        models = [{"name": name, "policy": policy, "replicas": replicas} for name, replicas in urls.items()]
        config = build(GatewayConfig, {"models": models}, "--upstream")
    return replace(config, gateway=replace(config.gateway, redis=redis)) if redis else config


@keys.verb
@click.argument("name")
@click.option("--model", "models", multiple=True, help="A model it may use; repeat.  [default: all]")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="[MODEL:]requests=60,tokens=20000,window=60",
    help="In any window of 60 s, of each model; or of one, instead: repeat.",
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Valid for so many days.")
@click.option("--budget", metavar="20usd/month", help="Of dollars or tokens (5000000tokens/day), per day or month.")
@click.option("--priority", default=0, help="While requests wait, lower is served earlier.  [0]")
@click.option("--weight", default=1.0, type=click.FloatRange(min=0, min_open=True), help="Of its fair share.  [1]")
@click.option("--scope", "scopes", multiple=True, type=click.Choice(["inference", "metrics"]), default=["inference"])
@keys_option
@moved("--requests", "try --limit requests=60")
@moved("--tokens", "try --limit tokens=20000")
@moved("--window", "try --limit requests=60,window=10")
def add(
    out: Output,
    home: Home,
    name: str,
    models: Sequence[str],
    limits: Sequence[str],
    days: float | None,
    budget: str | None,
    priority: int,
    weight: float,
    scopes: Sequence[str],
    place: str,
) -> None:
    """Make a key for NAME, a client. It is shown this once; only its hash is stored."""
    key, secret = _keys(home, place).add(
        name,
        models=list(models),
        scopes=list(scopes),
        **_all_limits(limits),
        expires=time.time() + days * _DAY_S if days else None,
        budget=_budget(budget) if budget else {},
        priority=priority,
        weight=weight,
    )
    out.say(f"key {key.id} of {name}: {secret}")
    out.say("clients send it as Authorization: Bearer KEY; it cannot be shown again")
    out.result({"id": key.id, "name": name, "key": secret}, quiet=secret)


def _all_limits(texts: Sequence[str]) -> dict[str, Any]:
    """The limits of every model, and those of single models."""
    by_model: dict[str, dict[str, Any]] = {}
    for text in texts:
        model = text.partition("=")[0].rpartition(":")[0]  # its name may have a colon
        if model in by_model:
            raise BadInput(f"--limit {text} is the second for {model or 'all models'}; write them as one")
        by_model[model] = _limits(text[len(model) + 1 :] if model else text)
    return {"limits": by_model.pop("", {}), "model_limits": by_model}


def _limits(text: str) -> dict[str, Any]:
    """The fields of limits like requests=60,tokens=20000,window=10 (seconds)."""
    limits: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        is_count = name in ("requests", "tokens") and value.isdecimal() and int(value) > 0
        seconds = name == "window" and re.fullmatch(r"[0-9]+\.?[0-9]*", value) is not None and float(value) > 0
        if not (is_count or seconds):
            raise BadInput(f"--limit {text} is not understood; write it like requests=60,tokens=20000,window=60")
        limits["window_s" if seconds else name] = float(value) if seconds else int(value)
    if not limits.keys() & {"requests", "tokens"}:
        raise BadInput(f"--limit {text} limits nothing; add requests=60 or tokens=20000")
    return limits


def _budget(text: str) -> dict[str, Any]:
    """The fields of a budget like 20usd/month or 5000000tokens/day."""
    match = re.fullmatch(r"([0-9][0-9_,]*\.?[0-9]*)\s*(usd|tokens)/(day|month)", text.strip().lower())
    if match is None:
        raise BadInput(f"--budget {text} is not understood; write it like 20usd/month or 5000000tokens/day")
    amount, unit, period = match.groups()
    number = float(amount.replace(",", "").replace("_", ""))
    return {unit: number if unit == "usd" else int(number), "period": period}


@keys.verb
@keys_option
def ls(out: Output, home: Home, place: str) -> None:
    """List the keys."""
    rows = [_row(key) for key in _keys(home, place).read().values()]
    if rows:
        out.table("keys", list(rows[0]), [list(row.values()) for row in rows])
    else:
        out.say("no keys yet, so the gateway serves everybody; armillary gateway keys add NAME makes one")
    out.result(rows, quiet=[str(row["id"]) for row in rows])


def _row(key: ApiKey) -> dict[str, Any]:
    now = time.time()
    named_limits = [("", key.limits), *((f"{model}:", limits) for model, limits in key.model_limits.items())]
    texts = [f"{model}{_limit_text(limits)}" for model, limits in named_limits if limits.is_set]
    return {
        "id": key.id,
        "client": key.name,
        "models": ", ".join(key.models) or "all",
        "scopes": ", ".join(key.scopes),
        "limits": "; ".join(texts) or None,
        "budget": _budget_text(key),
        "age": seconds_text(max(0.0, now - key.created)),
        "state": "valid" if key.is_valid(now) else "expired",
        "ends in": seconds_text(key.expires - now) if key.expires is not None and key.is_valid(now) else None,
    }


def _limit_text(limits: Limits) -> str:
    """As --limit takes it."""
    fields = {"requests": limits.requests, "tokens": limits.tokens, "window": limits.window_s}
    return ",".join(f"{name}={value:.10g}" for name, value in fields.items() if value is not None)


def _budget_text(key: ApiKey) -> str | None:
    budget = key.budget
    parts = [f"${budget.usd:g}"] if budget.usd is not None else []
    parts += [f"{budget.tokens:,} tokens"] if budget.tokens is not None else []
    return f"{', '.join(parts)} per {budget.period}" if parts else None


@keys.verb
@click.argument("key")
@keys_option
def revoke(out: Output, home: Home, key: str, place: str) -> None:
    """Remove KEY, the id or name of one."""
    gone = _keys(home, place).revoke(key)
    out.say(f"key {gone.id} of {gone.name} works no more")
    out.result({"id": gone.id, "name": gone.name}, quiet=gone.id)


@keys.verb
@click.argument("key")
@click.option("--overlap", "overlap_s", default=3600.0, show_default=True, help="Seconds that the old secret works on.")
@keys_option
def rotate(out: Output, home: Home, key: str, overlap_s: float, place: str) -> None:
    """Give KEY, the id or name of one, a new secret; limits and id stay."""
    rotated, secret = _keys(home, place).rotate(key, overlap_s)
    out.say(f"key {rotated.id} of {rotated.name}: {secret}")
    out.say(f"the old one works for another {seconds_text(overlap_s)}" if overlap_s else "the old one works no more")
    out.result({"id": rotated.id, "name": rotated.name, "key": secret}, quiet=secret)


@gateway.verb
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="Of the last so many days.  [default: all]")
@click.option("--audit", type=click.Path(path_type=Path), help="[default: gateway/audit.jsonl in the home]")
def usage(out: Output, home: Home, days: float | None, audit: Path | None) -> None:
    """Requests, tokens and dollars per client and model, from the audit log."""
    from armillary.fleet.gateway.audit import usage_by_client

    since = time.time() - days * _DAY_S if days else 0.0
    totals = usage_by_client(audit or _folder(home) / "audit.jsonl", since)
    rows = [{"client": client, "model": model, **total} for (client, model), total in sorted(totals.items())]
    if rows:
        out.table("usage", list(rows[0]), [list(row.values()) for row in rows])
    else:
        out.say("no requests in the audit log")
    out.result(rows, quiet=[f"{row['client']} {row['model']} {row['usd']}" for row in rows])


@gateway.verb
@click.argument("call", metavar="METHOD", type=click.Choice(["GET", "POST", "DELETE"]))
@click.argument("path")
@click.option("--sign", "key", required=True, type=click.Path(path_type=Path), help="Ed25519 private key (ssh-keygen).")
@click.option("--url", default="http://127.0.0.1:9000", show_default=True, help="Of the gateway.")
@click.option("--data", default="", help="JSON to send.")
def admin(out: Output, home: Home, call: str, path: str, key: Path, url: str, data: str) -> None:
    """Call a running gateway's admin API, like GET /admin/keys. Its public keys are in gateway.admin_keys."""
    from armillary.fleet.gateway.admin_signature import call_admin

    answer = call_admin(url, call, path, data.encode(), key)
    out.say(json.dumps(answer, indent=1))
    out.result(answer, quiet=json.dumps(answer))


def _keys(home: Home, place: str) -> KeyStore:
    from armillary.fleet.gateway.keys import KeyFile
    from armillary.fleet.gateway.redis.keys import RedisKeys

    if place.startswith(("redis://", "rediss://", "unix://")):
        return RedisKeys(place)
    return KeyFile(Path(place).expanduser() if place else _folder(home) / "keys.json")


def _folder(home: Home) -> Path:
    return home.work / "gateway"
