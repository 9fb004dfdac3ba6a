"""A serving run played again with other settings: its own requests, the real scheduler, its own steps' times.

Both sides of a speed-up are simulated, so that what the simulation leaves out is left out of both; how far the
simulation of the run as it was lies from what was measured is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from armillary.diagnosis.evidence.serving_run import Service
from armillary.engine.cache.kv_capacity import KVPlan, plan_kv
from armillary.engine.scheduler.settings import settings_for
from armillary.planning.simulation.fitted_step_time import StepCost
from armillary.planning.simulation.replayed_requests import Arrival, recorded
from armillary.planning.simulation.simulate import Simulated, System, simulate
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve

MOST_REQUESTS, MOST_TOKENS = 1000, 150_000
"""that are played again, the latest: a simulation takes a second or two"""


class Replay:
    """One run, to be tried with other settings."""

    def __init__(self, service: Service, config: ModelConfig, cost: StepCost) -> None:
        self.service, self.config, self.cost = service, config, cost
        self._done: dict[str, Simulated] = {}

    @cached_property
    def arrivals(self) -> tuple[Arrival, ...]:
        """The latest requests, the first of them at 0."""
        found, tokens = recorded(self.service.reading.requests)[-MOST_REQUESTS:], 0
        for index in range(len(found) - 1, -1, -1):
            tokens += found[index].tokens_out * found[index].answers
            if tokens > MOST_TOKENS:
                found = found[index + 1 :]
                break
        begin = found[0].at_s if found else 0.0
        return tuple(replace(one, at_s=one.at_s - begin) for one in found)

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
            settings=settings_for(self.config, serve),
            num_blocks=blocks,
            block_tokens=kv.block_tokens,
            groups=kv.groups,
            prefix=serve.prefix_cache,
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
