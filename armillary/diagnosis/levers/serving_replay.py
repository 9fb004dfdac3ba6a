"""A serving run replayed with other settings: its own requests, the real scheduler, its own fitted step times.

Both sides of a speed-up are simulated, so that what the simulation leaves out is left out of both; the error of the
simulation on the unchanged run is reported beside it. Side effects of a change are read off the same replay.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from armillary.diagnosis.evidence.serving_run import OBJECTIVES, ServingRun
from armillary.diagnosis.evidence.thresholds import (
    MAX_E2E_LOSS,
    MAX_THROUGHPUT_LOSS,
    MAX_TTFT_LOSS,
    SPARED_QUEUE_SHARE,
    UNNOTICED_TTFT_S,
)
from armillary.engine.cache.kv_capacity import KVPlan, plan_kv
from armillary.engine.scheduler.settings import settings_for
from armillary.planning.simulation.replayed_requests import Arrival, recorded
from armillary.planning.simulation.simulated_engine import Simulated, System, pooled, simulate
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.units import bytes_text, seconds_text

MAX_REQUESTS, MAX_TOKENS = 1000, 150_000
"""the latest ones are replayed: a simulation takes a second or two"""


class Replay:
    """One run, to be tried with other settings."""

    def __init__(self, service: ServingRun, config: ModelConfig, cost: StepCost) -> None:
        self.service, self.config, self.cost = service, config, cost
        self._done: dict[str, Simulated] = {}

    @cached_property
    def arrivals(self) -> tuple[Arrival, ...]:
        """The latest requests, the first of them at 0."""
        arrivals, tokens = recorded(self.service.reading.requests)[-MAX_REQUESTS:], 0
        for index in range(len(arrivals) - 1, -1, -1):
            tokens += arrivals[index].tokens_out * arrivals[index].answers
            if tokens > MAX_TOKENS:
                arrivals = arrivals[index + 1 :]
                break
        begin = arrivals[0].at_s if arrivals else 0.0
        return tuple(replace(arrival, at_s=arrival.at_s - begin) for arrival in arrivals)

    @property
    def kv(self) -> KVPlan:
        """Sizes of blocks, as the engine has them."""
        plan = self.service.plan
        precision = plan.layout.precision if plan is not None else "bf16"
        dtype = precision if precision in ("fp32", "fp16") else "bf16"
        return plan_kv(self.config, self.service.serve, 1 << 62, dtype=dtype)

    @cached_property
    def kv_bytes(self) -> int:
        """Size of the KV cache now: as set, or as measured in tokens."""
        tokens = self.service.reading.get("kv_capacity_tokens") or 0.0
        blocks = int(tokens) // self.kv.block_tokens * len(self.kv.groups) + 1
        return self.service.serve.kv_bytes or blocks * self.kv.block_bytes

    def simulated(self, change: Mapping[str, Any] | None = None, cost: StepCost | None = None) -> Simulated:
        """The run with keys of the recipe changed: of [serve], and layout.dp for replicas."""
        change = dict(change or {})
        key = f"{sorted(change.items())} {cost}"
        if key not in self._done:
            replicas = int(change.pop("layout.dp", 1))
            changed = {name.removeprefix("serve."): value for name, value in change.items()}
            serve = replace(self.service.serve, **changed)
            self._done[key] = simulate(self.arrivals, self._system(serve), cost or self.cost, replicas=replicas)
        return self._done[key]

    def _system(self, serve: Serve) -> System:
        kv, tokens = self.kv, self.service.reading.get("kv_capacity_tokens") or 0.0
        blocks = int(tokens) // kv.block_tokens * len(kv.groups)
        if serve.kv_bytes is not None and serve.kv_bytes != self.service.serve.kv_bytes:
            blocks = max(1, round(blocks * serve.kv_bytes / self.kv_bytes))
        plan = self.service.plan
        ahead = serve.decides_ahead("gpu" if plan is None else plan.cluster.chip.kind)
        return System(
            settings=settings_for(self.config, pooled(serve)),
            num_blocks=blocks,
            block_tokens=kv.block_tokens,
            groups=kv.groups,
            prefix=serve.prefix_cache,
            host_blocks=serve.kv_host_bytes // kv.block_bytes,
            overlap=ahead,
        )

    def speedup(self, gauge: str, change: Mapping[str, Any], cost: StepCost | None = None) -> float | None:
        """Of a gauge, now over then (then over now for rates); None where it cannot be said."""
        now, then = self.simulated().gauges.get(gauge), self.simulated(change, cost).gauges.get(gauge)
        if not now or not then:
            return None
        return then / now if gauge.endswith("_per_s") else now / then

    def off_by(self, gauge: str) -> float | None:
        """How far the simulated run lies from the measured one."""
        now, measured = self.simulated().gauges.get(gauge), self.service.reading.get(gauge)
        return abs(now - measured) / measured if now is not None and measured else None


Change = dict[str, Any]
"""key of the recipe -> value"""


def waits(replay: Replay, change: Change) -> bool:
    """Whether requests still wait for a large part of their time, or an objective is still missed."""
    gauges, objective = replay.simulated(change).gauges, replay.service.objective
    missed = any(gauges.get(name, 0.0) > getattr(objective, name) for name in replay.service.missed)
    return missed or gauges.get("queue_p50_s", 0.0) > SPARED_QUEUE_SHARE * gauges.get("e2e_p50_s", 0.0)


def harms(replay: Replay, change: Change) -> bool:
    """Whether a change of inter-token latency costs too much elsewhere. Where an ITL objective is missed, other
    latencies without an objective may pay for it: only throughput and the objectives that are met so far count."""
    service, then = replay.service, replay.simulated(change).gauges
    limits = {name: getattr(service.objective, name) for name in OBJECTIVES if name not in service.missed}
    if any(limit is not None and then.get(name, 0.0) > limit for name, limit in limits.items()):
        return True
    rate, shorter = (replay.speedup(gauge, change) or 1.0 for gauge in ("tokens_out_per_s", "itl_p99_s"))
    if rate * MAX_THROUGHPUT_LOSS < 1 or "itl_p99_s" in service.missed:
        return rate * MAX_THROUGHPUT_LOSS < 1
    first, limit = replay.speedup("ttft_p50_s", change) or 1.0, max(MAX_TTFT_LOSS, shorter)
    slower_ttft = then.get("ttft_p50_s", 0.0) > UNNOTICED_TTFT_S and first * limit < 1
    return slower_ttft or _mean_e2e(replay, change) > MAX_E2E_LOSS * _mean_e2e(replay)


def _mean_e2e(replay: Replay, change: Change | None = None) -> float:
    times = [float(request["e2e_s"]) for request in replay.simulated(change).requests if "e2e_s" in request]
    return sum(times) / len(times) if times else 0.0


def risk_of(replay: Replay, change: Change) -> str:
    """What the change costs: memory, and latencies that get longer."""
    said = []
    if "serve.kv_bytes" in change:
        said.append(f"+ {bytes_text(change['serve.kv_bytes'] - replay.kv_bytes)} of memory")
    now, then = replay.simulated().gauges, replay.simulated(change).gauges
    for name, what in (("ttft_p99_s", "TTFT p99"), ("itl_p99_s", "ITL p99")):
        before, after = now.get(name), then.get(name)
        if before and after and after > 1.05 * before:
            said.append(f"{what} {seconds_text(before)} → {seconds_text(after)}")
    return ", ".join(said) or "none"
