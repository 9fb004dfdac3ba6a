"""Step telemetry: all measurements of a training step, in one object around it.

`StepTelemetry` owns the readback of device values, the step clock, exposed waits, the recompute timer, the profiler
schedule, the memory meter and the throughput. `NullTelemetry` has the same interface and measures nothing.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armillary.parallel.apply import Sharded
from armillary.parallel.timers import ExposedWaits
from armillary.spec.plan import Plan
from armillary.store.home import Home
from armillary.training.resilience.rank_progress import BETWEEN, Progress
from armillary.training.step.numerics import HALF
from armillary.training.step.optimizer_offload import Offloaded
from armillary.training.step_batches import StepBatch
from armillary.training.telemetry.async_readback import AsyncReadback, StepValues
from armillary.training.telemetry.memory_gauges import NullMeter, make_meter
from armillary.training.telemetry.process_stats import PROFILER, Throughput, memory_gauges
from armillary.training.telemetry.profiled_step import (
    ProfileSchedule,
    device_roofline,
    without_core_contention,
    without_rank_waits,
)
from armillary.training.telemetry.step_clock import RecomputeTimer, StepClock, queued_s, rank_spread


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step measured; the keys of `gauges` are gauge names."""

    step: int
    gauges: dict[str, float]
    sources: dict[str, str] = field(default_factory=dict)
    """how gauges were measured that are not measured in the usual way"""
    save: bool = False
    """whether the ranks agreed on a checkpoint after it"""
    copy: bool = False
    """whether they agreed on a copy in memory"""


MEASURED_STEP = 1
"""the step of this process whose memory is measured by category: the first that starts with optimizer states"""


class NullTelemetry:
    """Measures nothing: a report has the values that the step reads back and the trainer's counters."""

    def __init__(
        self,
        plan: Plan,
        sharded: Sharded,
        optimizer: torch.optim.Optimizer,
        offloaded: Offloaded,
        home: Home | None = None,
    ) -> None:
        self.device = sharded.mesh.world.device
        self.readback = AsyncReadback(self.device)
        self.waits = ExposedWaits(self.device)
        self.progress = Progress()
        self.work_s = 0.0
        """the last step's time without waits for other ranks; 0: not known"""

    def start_step(self) -> None:
        """Called before the batch is fetched."""
        self.progress.start_step()

    def exclude(self, seconds: float) -> None:
        """Leave out time between two steps that has its own gauge: validation, checkpoints."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Around the forward pass, the loss, the backward pass or the optimizer."""
        self.progress.mark(name)
        return nullcontext()

    def mark_hidden(self, hidden: Tensor) -> None:
        """Memory that the backward pass allocates before it has the gradient of `hidden` counts as the loss's."""

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepValues]:
        """Around forward pass, backward pass and optimizer; waits for the values that were read back."""
        self.progress.step = batch.step
        values = StepValues(self.readback)
        yield values
        values.wait()
        self.waits.forget()

    def report(self, batch: StepBatch, values: Mapping[str, float], counters: Mapping[str, float]) -> StepReport:
        self.progress.mark(BETWEEN)
        gauges = {**values, **counters, "batch_checksum": batch.checksum}
        return StepReport(step=batch.step, gauges=gauges, save=batch.save, copy=batch.copy)


class StepTelemetry(NullTelemetry):
    """`start_step()`, `with step(batch) as values`, then `report(…)`."""

    def __init__(
        self,
        plan: Plan,
        sharded: Sharded,
        optimizer: torch.optim.Optimizer,
        offloaded: Offloaded,
        home: Home | None = None,
    ) -> None:
        super().__init__(plan, sharded, optimizer, offloaded, home)
        job, world = plan.train, sharded.mesh.world
        assert job is not None
        self._plan, self._sharded, self._optimizer, self._offloaded = plan, sharded, optimizer, offloaded
        self.clock = StepClock()
        self.throughput = Throughput(plan)
        self.recompute = RecomputeTimer(sharded.model, self.device, enabled=not job.compiled)
        self.profile = ProfileSchedule(job.profile_every if world.is_main else 0, device_roofline(self.device, home))
        self.memory = NullMeter()
        self.num_steps = 0
        """steps that this process has taken"""
        self._optimizer_s = self._fetch_s = self._seconds = 0.0
        self._profiled = False
        self._parts: dict[str, float] = {}
        if world.size > 1:
            self.waits.watch(sharded.model)
            sharded.add_timer(self.waits)

    def start_step(self) -> None:
        super().start_step()
        self.readback.start()
        self.clock.start()

    def exclude(self, seconds: float) -> None:
        self.clock.exclude(seconds)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        self.progress.mark(name)
        return self._timed_optimizer() if name == "optimizer" else self.memory.phase(name)

    def mark_hidden(self, hidden: Tensor) -> None:
        self.memory.mark_hidden(hidden)

    @contextmanager
    def _timed_optimizer(self) -> Iterator[None]:
        begin = time.perf_counter()
        with self.memory.phase("optimizer"):
            yield
        self._optimizer_s = time.perf_counter() - begin

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[StepValues]:
        self.progress.step = batch.step
        self._fetch_s = self.clock.since_start()
        self._profiled = self.num_steps != MEASURED_STEP and self.profile.is_due(batch.step, self.num_steps)
        self.memory = self._meter()
        values = StepValues(self.readback)
        recording = self.profile.record(self.clock.unprofiled_s) if self._profiled else self.recompute.timed()
        with self.memory.step(), recording as self._parts:
            begin, cpu_s, waiting_s = time.perf_counter(), time.thread_time(), queued_s()
            yield values
            values.wait()
            on_gpu = self.device.type == "cuda"
            values["optimizer_s"] = self.readback.after_norm_s if on_gpu else self._optimizer_s
            values["host_cpu_s"], values["host_queue_s"] = time.thread_time() - cpu_s, queued_s() - waiting_s
            self._seconds = time.perf_counter() - begin + self.readback.overrun_s

    def report(self, batch: StepBatch, values: Mapping[str, float], counters: Mapping[str, float]) -> StepReport:
        """All gauges of the step; called once, when the device has run it."""
        self.num_steps += 1
        self.progress.mark(BETWEEN)
        self.waits.add(batch.consensus_s)
        waited, idle, recompute = self.waits.take(), self._idle(), self.recompute.take()
        bubble_s, memory = idle.get("bubble_s", 0.0), self.memory.sizes()
        parts = without_rank_waits(self._parts, bubble_s, waited)
        parts = without_core_contention(parts, self._seconds, values["host_cpu_s"], values["host_queue_s"])
        step_s = self._fetch_s + self._seconds
        gauges = {**values, **counters, "comm_exposed_s": waited, "batch_checksum": batch.checksum}
        gauges |= self._process_memory() | memory | idle | recompute
        gauges |= (
            self.throughput.gauges(step_s, batch.wait_s)
            | self._offloaded.gauges()
            | rank_spread(batch.work_s, batch.data_s)
        )
        gauges |= self.clock.gauges(self.readback.overrun_s)
        sources = dict.fromkeys(memory, self.memory.source) | dict.fromkeys(parts, PROFILER)
        sources |= dict.fromkeys([*idle, *recompute, *([] if parts else ["comm_exposed_s"])], self.waits.source)
        undisturbed = not self._profiled and self.memory.source == NullMeter.source
        self.work_s = step_s - waited - bubble_s if undisturbed else 0.0
        self.clock.stop(self._seconds, undisturbed=undisturbed)
        self.memory = NullMeter()
        return StepReport(step=batch.step, gauges=gauges | parts, sources=sources, save=batch.save, copy=batch.copy)

    def _meter(self) -> NullMeter:
        """The memory of one step is measured by category; the other steps are left alone."""
        if self.num_steps != MEASURED_STEP or self._plan.train is None:
            return NullMeter()
        return make_meter(
            self._sharded.model,
            self._optimizer,
            half=self._plan.layout.precision in HALF,
            device=self.device,
            compiled=self._plan.train.compiled,
            elsewhere=self._offloaded.holds,
        )

    def _process_memory(self) -> dict[str, float]:
        gauges = memory_gauges(self.device)
        gauges["memory_peak_bytes"] = max(gauges["memory_peak_bytes"], self.memory.peak)
        return gauges

    def _idle(self) -> dict[str, float]:
        """Time in which this rank's pipeline stage was idle. The main rank has the first stage, whose span is the
        step's: from its first forward to its last backward pass."""
        if self._sharded.pipeline is None:
            return {}
        computing, total = self._sharded.pipeline.timer.take()
        return {"bubble_s": max(0.0, total - computing)}
