"""A server's latencies before it has served anyone: its [traffic] played through the real scheduler, steps as planned.

The formulas of `load.py` want room for every request; a server whose rows or blocks are few makes requests wait, which
only the scheduler itself can say.
"""

from __future__ import annotations

from armillary.engine.cache.kv_capacity import plan_kv
from armillary.engine.scheduler.settings import settings_for
from armillary.planning.serving.queueing import Server
from armillary.planning.simulation.fitted_step_time import planned_step_cost
from armillary.planning.simulation.replayed_requests import Arrival, drawn
from armillary.planning.simulation.simulate import System, simulate
from armillary.spec.tables.serve import Traffic

MOST_REQUESTS, MOST_TOKENS = 400, 60_000
"""that are played: well below a second"""
_PARTS = ("ttft", "itl", "tpot", "e2e", "queue")


def planned_service(server: Server, kv_tokens: float) -> dict[str, float]:
    """Percentiles and rates of one server under its traffic; `kv_tokens` is what its cache holds."""
    traffic, config = server.traffic, server.replica.config
    context = max(1, traffic.tokens_in + traffic.tokens_out // 2)
    cost = planned_step_cost(server.replica, context=context, prompt=traffic.tokens_in)
    sizes = plan_kv(config, server.serve, 1 << 62, dtype="bf16")
    ahead = server.serve.decides_ahead(server.replica.cluster.chip.kind)
    system = System(
        settings=settings_for(config, server.serve),
        block_tokens=sizes.block_tokens,
        groups=sizes.groups,
        num_blocks=max(1, int(kv_tokens) // sizes.block_tokens * len(sizes.groups)),
        prefix=server.serve.prefix_cache,
        overlap=ahead,
        streamed=True,
    )
    found = simulate(_requests(traffic), system, cost).gauges
    wanted = [f"{part}_p{percent}_s" for part in _PARTS for percent in (50, 99)]
    return {name: found[name] for name in (*wanted, "tokens_out_per_s", "requests_per_s") if name in found}


def _requests(traffic: Traffic) -> tuple[Arrival, ...]:
    """As many as a load test of the traffic sends, within reason."""
    most = min(MOST_REQUESTS, max(1, MOST_TOKENS // traffic.tokens_out))
    return drawn(traffic, min(most, max(1, round(traffic.requests_per_s * traffic.duration_s))))
