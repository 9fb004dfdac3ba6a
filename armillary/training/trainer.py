"""Trainer: model, optimiser and data of one rank, and the step that all ranks take together.

Weights stay in fp32 and are what is stepped; products run in the layout's precision. Gradients are those of the mean
loss over all targets of the step, however it is cut into ranks and micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.model.layers.attention_forms import Attend
from armillary.parallel.consensus import Agreement, attempt
from armillary.parallel.exposed_waits import Waits
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline.pipeline import Passing, Pipeline, Rows
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.store.home import Home
from armillary.training.data.loader import DeviceBatch, to_device
from armillary.training.setup.build_model import open_text, start_model
from armillary.training.step.loss_scaler import LossScaler
from armillary.training.step.nonfinite import Nonfinite
from armillary.training.step.numerics import HALF, autocast
from armillary.training.step.offload import Offloaded, optimizer_of
from armillary.training.step.optimizer import learning_rate, set_learning_rate, update
from armillary.training.step.router_balance import Routers
from armillary.training.step_batches import Feed, Fetched, Stop
from armillary.training.telemetry.async_readback import Mark, Read, Reading
from armillary.training.telemetry.call_cost import Samples
from armillary.training.telemetry.memory_gauges import NoMeter, make_meter
from armillary.training.telemetry.micro_batch_cost import JoinedRows, can_join
from armillary.training.telemetry.process_stats import WINDOW, Speed, memory_gauges
from armillary.training.telemetry.profiled_step import Looks, device_roofline, set_apart, undisturbed
from armillary.training.telemetry.recompute_timer import Again
from armillary.training.telemetry.step_clock import Pace, queued_s, spread
from armillary.training.telemetry.step_report import StepReport

Meanwhile = Callable[[], None]
MEASURED_STEP = 1
"""of those this process takes: the first whose optimiser states are there from its beginning"""


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


class Trainer:
    """`step(n)` does everything of step n; a context, because reading ahead has processes of its own."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        ranks: Agreement | None = None,
        *,
        kernels: Mapping[str, str] | None = None,
        home: Home | None = None,
        folder: Path | None = None,
    ) -> None:
        """`kernels` are those that were chosen when the run began; those chosen now are remembered in `home`. States of
        the optimiser may wait on the disk of `folder`."""
        assert plan.train is not None and plan.data is not None, "a plan for training"
        self.plan, self.job, self.layout = plan, plan.train, plan.layout
        self.world, self.device = world, world.device
        self.ranks = ranks or Agreement(rank=world.rank, size=world.size)
        self.mesh = self.ranks.together(lambda: make_mesh(plan.layout, world))
        self.text = self.ranks.together(lambda: open_text(plan))
        self.sharded, self.choices = start_model(plan, self.mesh, self.ranks, names=kernels, home=home)
        self.model = self.sharded.model
        self.num_parameters = self.sharded.num_parameters
        self.optimizer = self.ranks.together(
            lambda: optimizer_of(self.sharded, self.job, halves=self.choices.halves, folder=folder)
        )
        self.offloaded = Offloaded(self.sharded, self.optimizer)
        self.scaler = LossScaler(self.device, enabled=plan.layout.precision == "fp16", many=world.size > 1)
        self.routers = Routers(self.sharded, self.job)
        self.speed = Speed(plan)
        self.reading = Reading(self.device)
        self.waits = Waits(self.device)
        if world.size > 1:
            self.waits.watch(self.model)
            self.sharded.tell(self.waits)
        self.pace = Pace()
        self.again = Again(self.model, self.device, seen=not self.job.compiled)
        self.looks = Looks(self.job.profile_every if world.is_main else 0, device_roofline(self.device, home))
        self.samples = self._samples()
        self.val_loss: float | None = None
        self.validation_s = 0.0
        self.tokens = self.taken = 0
        self.nonfinite = Nonfinite(self.job, self.ranks, self.optimizer, self.num_parameters)
        self._own_loss = torch.zeros(())
        self.feed = Feed(self.text.train, plan, self.mesh, self.ranks, self.waits)
        self._meter = NoMeter()

    # --- one step

    def step(self, step: int, *, stop: Stop = _never, meanwhile: Meanwhile = _nothing) -> StepReport | None:
        """Everything of one step; None where the ranks agreed to stop before it, because `stop()` was true on one.
        `meanwhile()` is called while the device works."""
        begin = time.perf_counter()
        self.reading.come()
        self.pace.come()
        now = self.feed.at(step, stop)
        if now.stop or (self.world.size == 1 and stop()):
            return None
        fetched_s = time.perf_counter() - begin
        others = spread(self.feed.each_s)
        plain = self.taken == MEASURED_STEP or not self.looks.due(step, self.taken)
        with self._measuring() as meter:
            work = partial(self._timed, now, stop, meanwhile)
            (measured, seconds), split = (self.again.at(work), {}) if plain else self.looks.at(work, self.pace.plain_s)
        _, nonsense = attempt(lambda: self.nonfinite.judge(step, measured, self._own_loss))
        if nonsense is not None:  # all ranks read the same sums, so all are here
            self.ranks.raise_first(nonsense)
        self.taken += 1
        self.tokens += self.job.batch_tokens
        gauges = measured | self._counted() | self._memory(meter) | {"comm_exposed_s": (waited := self.waits.take())}
        gauges |= self.speed.gauges(fetched_s + seconds, now.wait_s) | (idle := self._idle())
        gauges |= self.offloaded.gauges() | others | self.pace.gauges(self.reading.tail_s)
        gauges |= (twice := self.again.take())
        plain = plain and meter.source == NoMeter.source
        self.feed.own_s = fetched_s + seconds - waited - idle.get("bubble_s", 0.0) if plain else 0.0
        split = set_apart(split, idle.get("bubble_s", 0.0), waited)
        split = undisturbed(split, seconds, measured["host_cpu_s"], measured["host_queue_s"])
        sources = dict.fromkeys(meter.sizes(), meter.source) | dict.fromkeys(split, WINDOW)
        sources |= dict.fromkeys([*idle, *twice, *([] if split else ["comm_exposed_s"])], self.waits.source)
        gauges |= self.samples.beside(now.batch, step, self.taken - 1) if plain else {}
        self.pace.leave(seconds, plain=plain)
        return StepReport(step=step, gauges=gauges | split, sources=sources, save=now.save)

    def _idle(self) -> dict[str, float]:
        """How long this rank's stage stood still between passes: the first stage's, where the main rank is, lasts
        from a step's first pass to its last."""
        if self.sharded.pipeline is None:
            return {}
        computing, whole = self.sharded.pipeline.busy.take()
        return {"bubble_s": max(0.0, whole - computing)}

    def _timed(self, now: Fetched, stop: Stop, meanwhile: Meanwhile) -> tuple[dict[str, float], float]:
        begin, ran, queued = time.perf_counter(), time.thread_time(), queued_s()
        measured = self._advance(now, stop, meanwhile)
        measured |= {"host_cpu_s": time.thread_time() - ran, "host_queue_s": queued_s() - queued}
        return measured, time.perf_counter() - begin + self.reading.tail_s

    def _advance(self, now: Fetched, stop: Stop, meanwhile: Meanwhile) -> dict[str, float]:
        """Launch the whole step, look after the next batch while it runs, then read what it measured: the one wait
        for the device, and not for the last of its work."""
        rate = learning_rate(self.job, now.step, self.num_parameters)
        set_learning_rate(self.optimizer, rate)
        self.routers.start(self.scaler.factor)
        loss = self.forward_backward(now.batch, now.targets)
        reads: list[Read] = []
        marks: list[Mark] = []

        check = loss.detach()

        def known(norm: Tensor) -> None:
            nonlocal check
            check = check + norm if self.routers.has_experts else check
            scale = self.scaler.factor
            found = {"loss": loss, "grad_norm": norm} | ({"loss_scale": scale} if scale is not None else {})
            reads.append(self.reading.take(found))
            marks.append(self.reading.mark())

        begin = time.perf_counter()
        with self._meter.phase("optimizer"):
            update(self.sharded, self.optimizer, self.scaler, self.job.clip, known, loss)
        stepping_s = time.perf_counter() - begin
        reads.append(self.reading.take(self.routers.finish(check)))
        marks.append(self.reading.mark())
        self.feed.look_ahead(now.step + 1, stop)
        meanwhile()
        measured = {name: value for read in reads for name, value in read().items()}
        self.reading.leave(*marks)
        stepped_s = self.reading.stepped_s if self.device.type == "cuda" else stepping_s
        return measured | {"lr": rate, "optimizer_s": stepped_s}

    def forward_backward(self, batch: DeviceBatch, targets: float) -> Tensor:
        """Mean loss over all targets of all ranks; gradients are those of that mean."""
        if self.sharded.pipeline is not None:
            return self._through_stages(self.sharded.pipeline, batch, targets)
        total = torch.zeros((), device=self.device)
        micro = batch.micro(self.layout.micro_batch)
        for number, part in enumerate(micro):
            with self.sharded.accumulate(last=number + 1 == len(micro)):
                loss = self.loss_sum(part) / max(1.0, targets)
                with self._meter.phase("backward"):
                    self.scaler.scale(loss).backward()
            total = total + loss.detach()
        self.waits.after_backward()
        self._own_loss = total
        return self.sharded.total(total)

    def _through_stages(self, pipeline: Pipeline, batch: DeviceBatch, targets: float) -> Tensor:
        rows, count = len(batch.row_targets), self.layout.micro_batch
        with self._meter.phase("backward"):
            total = pipeline.step(self._rows(batch), self._passing(max(1.0, targets)), num_micro_batches=rows // count)
        begin = self.waits.mark()  # a stage that has done its part waits here for the others to drain
        self.sharded.finish_gradients()
        self.waits.after_backward()
        self._own_loss = total
        loss = self.sharded.total(total)
        self.waits.until_now(begin)
        return loss

    def _rows(self, batch: DeviceBatch) -> Rows:
        """What stages read: this rank's tokens, and the documents of whole rows."""
        part, _ = self._taken(batch)
        return Rows(
            tokens_BT=part.tokens_BT,
            positions_BT=part.positions_BT,
            targets_BT=part.targets_BT,
            documents_BT=batch.documents_BT if batch.has_documents else None,
        )

    def _passing(self, targets: float = 1.0) -> Passing:
        chunk, context = self.job.chunk_tokens(self.model.config.vocab), self.sharded.context
        return Passing(
            attends=self.choices.attend if context is None else context.attend,
            scale=self.scaler.scale,
            autocast=lambda: autocast(self.layout.precision, self.device, wanted=not self.sharded.is_fsdp),
            loss=lambda model, hidden, y: self.sharded.loss_sum(hidden, y, chunk=chunk, model=model) / targets,
        )

    def loss_sum(self, batch: DeviceBatch) -> Tensor:
        """Of a micro-batch; with stages, on the last of them and without a backward pass."""
        if self.sharded.pipeline is not None:
            return self.sharded.pipeline.evaluate(self._rows(batch), self._passing())
        with autocast(self.layout.precision, self.device, wanted=not self.sharded.is_fsdp):
            with self._meter.phase("forward"):
                batch, attend = self._taken(batch)
                hidden = self.model(batch.tokens_BT, batch.positions_BT, attend)
            self._meter.above(hidden)
            with self._meter.phase("loss"):
                chunk = self.job.chunk_tokens(self.model.config.vocab)
                return self.sharded.loss_sum(hidden, batch.targets_BT, chunk=chunk)

    def _taken(self, batch: DeviceBatch) -> tuple[DeviceBatch, Attend]:
        """This rank's tokens of the rows, all of them where rows are not cut, and how they attend."""
        documents_BT, context = batch.documents_BT if batch.has_documents else None, self.sharded.context
        if context is None:
            return batch, self.choices.attend(documents_BT)
        return batch.tokens(context.cut), context.attend(documents_BT)

    def close(self) -> None:
        """Let go of what reads ahead, and of what is still stepped beside it."""
        self.feed.close()
        self.offloaded.finish()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- held-out text

    def validate(self) -> float | None:
        """Mean loss on held-out text, the same text whatever the layout; None where nothing is held out."""
        begin = time.perf_counter()
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        share = {"rank": self.mesh.dp_rank, "world": self.mesh.dp_size}
        held_out = self.text.validation.batches(rows=self.text.train.batch, limit=self.job.eval_batches, **share)
        with self.sharded.evaluating():
            while (batch := self.ranks.together(lambda: next(held_out, None))) is not None:
                for part in to_device(batch, self.device).micro(self.layout.micro_batch):
                    total, count = total + self.loss_sum(part), count + part.num_targets
        (targets,) = self.ranks.total(float(count))
        self.waits.forget()
        targets /= self.world.size / self.mesh.dp_size
        self.val_loss = float(self.sharded.total(total)) / targets if targets else None
        self.validation_s = time.perf_counter() - begin
        self.pace.aside(self.validation_s)
        return self.val_loss

    # --- what is measured

    def _samples(self) -> Samples:
        def passes(part: DeviceBatch) -> None:
            with self.sharded.accumulate(last=False):
                self.loss_sum(part).backward()

        able = self.world.size == 1 and can_join(self.plan, self.sharded)  # others would wait for who joins longest
        joined = JoinedRows(self.model, passes, rows=self.layout.micro_batch) if able else None
        return Samples(self.job.profile_every if self.device.type == "cpu" else 0, self.layout.precision, joined)

    def _measuring(self) -> Any:
        """One step's memory is taken apart; the others are left alone."""
        if self.taken == MEASURED_STEP:
            half, compiled = self.layout.precision in HALF, self.job.compiled
            self._meter = make_meter(
                self.model,
                self.optimizer,
                half=half,
                device=self.device,
                compiled=compiled,
                elsewhere=self.offloaded.holds,
            )
        else:
            self._meter = NoMeter()
        return self._meter.step()

    def _counted(self) -> dict[str, float]:
        found = {"tokens_total": float(self.tokens)}
        counts = self.scaler.is_enabled() or self.job.on_nonfinite == "skip"
        return found | {"skipped_steps_total": float(self.nonfinite.skipped)} if counts else found

    def _memory(self, meter: NoMeter) -> dict[str, float]:
        sizes, now = meter.sizes(), memory_gauges(self.device)
        now["memory_peak_bytes"] = max(now["memory_peak_bytes"], meter.peak)
        return now | sizes
