"""Simulation of serving: the real engine (scheduler, KV cache, loop, records) on a virtual clock.

Requests are recorded or random; a step takes as long as a `StepCost` says. So any change of [serve], of the cache size
or of the number of replicas can be tried on the same requests, in the code that would serve them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.kv_capacity import plan_kv
from armillary.engine.cache.kv_offload import KVOffload
from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.engine import Engine
from armillary.engine.output.output_text import NoText, OutputProcessor
from armillary.engine.request.request import Request
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings, settings_for
from armillary.engine.scheduler.step_loop import Loop
from armillary.engine.telemetry.gauges import state_gauges
from armillary.errors import BadInput
from armillary.planning.serving.queueing import Server
from armillary.planning.simulation.replayed_requests import Arrival, Prompts, drawn
from armillary.planning.simulation.request_stats import served_gauges
from armillary.planning.simulation.simulated_device import STOP, SimulatedDevice
from armillary.planning.simulation.simulated_drafts import Drafting
from armillary.planning.simulation.step_cost import StepCost, host_block_s, planned_step_cost
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve

VOCAB = 1 << 31
_NAP_S = 0.001
"""the engine's sleep where no sequence can start yet"""


@dataclass(frozen=True, kw_only=True)
class System:
    """One engine: its scheduler settings and KV cache."""

    settings: Settings
    """scheduler limits; the vocabulary does not matter"""
    num_blocks: int
    block_tokens: int = 16
    groups: tuple[Group, ...] = FULL_ATTENTION
    prefix: bool = True
    host_blocks: int = 0
    """blocks of host memory that evicted ones move to (serve.kv_host_bytes)"""
    overlap: bool = True
    streamed: bool = False
    """outputs are streamed, as by a server, so that prefill is limited by default"""
    drafting: Drafting | None = None
    """speculative decoding"""

    def scheduler(self) -> Scheduler:
        """A new scheduler with an empty cache."""
        cache = KVCache(
            self.num_blocks + 1,
            self.block_tokens,
            groups=self.groups,
            prefix=self.prefix,
            step_tokens=self.settings.max_tokens_per_step,
        )
        if self.host_blocks and self.prefix:
            KVOffload(cache, self.host_blocks)
        scheduler = Scheduler(replace(self.settings, vocab=VOCAB, eos_ids=frozenset({STOP})), cache)
        if self.streamed:
            scheduler.stream()
        if self.drafting is not None:
            self.drafting.attach(scheduler)
        return scheduler


def pooled(serve: Serve, copies: int = 1) -> Serve:
    """Copies of attention (serve.dp_attention, or a replica's ep ranks) as one with the rows and tokens of all, as
    steps are recorded."""
    copies = max(copies, serve.dp_attention)
    return replace(
        serve,
        max_running=serve.max_running * copies,
        max_tokens_per_step=serve.max_tokens_per_step * copies,
        prefill_tokens=None if serve.prefill_tokens is None else serve.prefill_tokens * copies,
    )


def system_of(config: ModelConfig, serve: Serve, kv_tokens: float, chip: str, *, num_stages: int = 1) -> System:
    """A server's engine: a [serve] table, and a KV cache of so many tokens on a kind of chip."""
    sizes = plan_kv(config, serve, 1 << 62, dtype="bf16")
    return System(
        settings=replace(settings_for(config, serve), num_stages=max(serve.pp, num_stages)),
        block_tokens=sizes.block_tokens,
        groups=sizes.groups,
        num_blocks=max(1, int(kv_tokens) // sizes.block_tokens * len(sizes.groups)),
        prefix=serve.prefix_cache,
        host_blocks=sizes.host_blocks,
        overlap=serve.decides_ahead(chip),
        streamed=True,
    )


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Result of a simulation: gauges and records per step and per completion, as of a measured run."""

    gauges: Mapping[str, float]
    steps: Sequence[Mapping[str, Any]] = field(repr=False)
    requests: Sequence[Mapping[str, Any]] = field(repr=False)
    refused: int = 0
    """requests that were invalid or found the queue full"""


def simulate(arrivals: Sequence[Arrival], system: System, cost: StepCost, *, replicas: int = 1) -> Simulated:
    """Serve `arrivals`, round robin over `replicas` copies of `system`."""
    runs = [_Run(arrivals[i::replicas], system, cost) for i in range(min(replicas, max(1, len(arrivals))))]
    for run in runs:
        run.all()
    steps = [record for run in runs for record in run.steps]
    requests = [record for run in runs for record in run.requests]
    gauges = served_gauges(steps, requests)
    ends = [state_gauges(run.scheduler) for run in runs if run.steps]
    gauges |= {name: float(sum(end[name] for end in ends)) for name in gauges if name.endswith("_total")}
    return Simulated(gauges=gauges, steps=steps, requests=requests, refused=sum(run.refused for run in runs))


class _Run:
    """One replica's engine, and the requests that it gets."""

    def __init__(self, arrivals: Sequence[Arrival], system: System, cost: StepCost) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.requests: list[Mapping[str, float]] = []
        self.refused = 0
        self._left = deque(arrivals)
        self._prompts = Prompts(arrivals)
        self._device = SimulatedDevice(  # the same noise for every setting that is tried
            cost, overlap=system.overlap, drafting=system.drafting, num_stages=system.settings.num_stages
        )
        self.scheduler = system.scheduler()
        loop = Loop(self.scheduler, self._device, overlap=system.overlap, clock=self._device.clock)
        self._engine = Engine(loop, OutputProcessor(self.scheduler, NoText), record=self._record)

    def _record(self, gauges: Mapping[str, float], *, step: int | None = None, request: str | None = None) -> None:
        (self.requests if step is None else self.steps).append(gauges)

    def all(self) -> None:
        """Serve until every request is over."""
        engine, device = self._engine, self._device
        while self._left or engine.busy:
            while self._left and self._left[0].at_s <= device.now:
                self._submit(self._left.popleft())
            if engine.busy:
                pieces = engine.step()
                if not pieces and not self.scheduler.under_way and not self.scheduler.request_table.running:
                    self._nap()
            elif self._left:
                device.now = self._left[0].at_s

    def _submit(self, arrival: Arrival) -> None:
        request = Request(id=str(arrival.number), prompt=self._prompts.of(arrival), params=arrival.params)
        self._device.lengths[request.id] = arrival.tokens_out
        try:
            for seq in self.scheduler.submit(request, arrival.at_s):
                seq.number = arrival.number
        except BadInput:
            self.refused += 1

    def _nap(self) -> None:
        """No sequence can start now: wait until a window closes, a deadline passes or another request arrives."""
        device = self._device
        wake = self.scheduler.request_table.wake_at(device.now)
        times = [wake] if wake is not None and wake > device.now else []
        times += [self._left[0].at_s] if self._left else []
        device.now = max(device.now + _NAP_S * 1e-3, min(times, default=device.now + _NAP_S))


MOST_REQUESTS, MAX_TOKENS = 400, 60_000
"""limits of a simulation: well below a second"""
_PARTS = ("ttft", "itl", "tpot", "e2e", "queue")


def planned_service(server: Server, kv_tokens: float) -> dict[str, float]:
    """Percentiles and rates of one server under its traffic; its KV cache holds `kv_tokens`."""
    traffic, config = server.traffic, server.replica.config
    context = max(1, traffic.running_tokens_in + traffic.running_tokens_out // 2)
    cost = planned_step_cost(server.replica, context=context, prompt=round(traffic.tokens_per_request[0]))
    replica = server.replica
    serve, kind = pooled(server.serve, replica.split.ep), replica.cluster.chip.kind
    system = system_of(config, serve, kv_tokens, kind, num_stages=replica.split.pp)
    if server.serve.kv_host_bytes:
        sizes = plan_kv(config, server.serve, 1 << 62, tp=server.replica.split.tp)
        cost = replace(cost, host_block_s=host_block_s(server.replica.cluster, sizes.block_bytes))
    most = min(MOST_REQUESTS, max(1, MAX_TOKENS // round(traffic.tokens_per_request[1])))
    requests = min(most, max(1, round(traffic.total_per_s * traffic.duration_s)))  # as a load test sends
    gauges = simulate(drawn(traffic, requests), system, cost).gauges
    wanted = [f"{part}_p{percent}_s" for part in _PARTS for percent in (50, 99)]
    return {name: gauges[name] for name in (*wanted, "tokens_out_per_s", "requests_per_s") if name in gauges}
