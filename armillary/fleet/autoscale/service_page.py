"""The live page of a service at `/`, and its data at /service.json."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

from armillary.fleet.gateway.gateway_app import Arrival, Gateway
from armillary.fleet.gateway.gateway_metrics import GatewayMetrics

_HTML = (b"content-type", b"text/html; charset=utf-8")
_SAFE = (b"content-security-policy", b"default-src 'self' 'unsafe-inline'; frame-ancestors 'none'")


def add_service_page(gateway: Gateway, state: Callable[[], dict[str, Any]]) -> None:
    """Serve the page and its data. Where keys are needed, the data needs one with the scope metrics."""
    html = (files("armillary") / "fleet/autoscale/service.html").read_bytes()

    async def page(arrival: Arrival) -> None:
        await arrival.connection.respond(200, html, _HTML, [_SAFE])

    async def data(arrival: Arrival) -> None:
        gateway.check_reader(arrival)
        await arrival.connection.json(200, {**state(), "usage": usage(gateway.metrics)})

    gateway.add_page("/", page)
    gateway.add_page("/service.json", data)


def usage(metrics: GatewayMetrics) -> list[dict[str, Any]]:
    """Tokens and dollars per client and model since the start."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (client, model, kind), count in metrics.tokens.items():
        rows.setdefault((client, model), {})[f"{kind}_tokens"] = count
    for pair, usd in metrics.usd.items():
        rows.setdefault(pair, {})["usd"] = usd
    return [{"client": client or "–", "model": model, **row} for (client, model), row in sorted(rows.items())]
