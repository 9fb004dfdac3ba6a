"""Trainer: model, optimizer and data of one rank, and the step that all ranks take together.

The optimizer updates fp32 weights; GEMMs run in the layout's precision. Gradients are those of the mean loss over all
targets of the step, however the step is split into ranks and micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from armillary.model.layers.attention_forms import Attend
from armillary.parallel.consensus import Consensus
from armillary.parallel.mesh import make_mesh
from armillary.parallel.pipeline.pipeline import Pipeline, Rows, StageFns
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.store.home import Home
from armillary.training.data.loader import DeviceBatch, to_device
from armillary.training.setup.build_model import build_model, open_text
from armillary.training.step.nonfinite import LossScaler, Nonfinite
from armillary.training.step.numerics import autocast
from armillary.training.step.optimizer import learning_rate, set_learning_rate, update
from armillary.training.step.optimizer_offload import Offloaded, optimizer_of
from armillary.training.step.router_balance import Routers
from armillary.training.step.spike import SpikeGuard
from armillary.training.step_batches import StepBatches, Stop
from armillary.training.telemetry.async_readback import StepValues
from armillary.training.telemetry.step_telemetry import NullTelemetry, StepReport, StepTelemetry

Meanwhile = Callable[[], None]


class Trainer:
    """`step(n)` runs step n. A context manager: the loader has worker processes."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        ranks: Consensus | None = None,
        *,
        kernels: Mapping[str, str] | None = None,
        home: Home | None = None,
        folder: Path | None = None,
        telemetry: type[NullTelemetry] = StepTelemetry,
    ) -> None:
        """`kernels` are those selected when the run began; new selections are cached in `home`. Optimizer states that
        are offloaded to disk are in `folder`."""
        assert plan.train is not None and plan.data is not None, "a plan for training"
        self.plan, self.job, self.layout = plan, plan.train, plan.layout
        self.world, self.device = world, world.device
        self.ranks = ranks or Consensus(rank=world.rank, size=world.size)
        self.mesh = self.ranks.run_on_all(lambda: make_mesh(plan.layout, world, self.job.axis_timeouts_s))
        self.text = self.ranks.run_on_all(lambda: open_text(plan))
        self.sharded, self.choices = build_model(plan, self.mesh, self.ranks, names=kernels, home=home)
        self.model = self.sharded.model
        self.num_parameters = self.sharded.num_parameters
        self.optimizer = self.ranks.run_on_all(
            lambda: optimizer_of(self.sharded, self.job, weights_16bit=self.choices.weights_16bit, folder=folder)
        )
        self.offloaded = Offloaded(self.sharded, self.optimizer)
        self.scaler = LossScaler(self.device, enabled=plan.layout.precision == "fp16", many=world.size > 1)
        self.routers = Routers(self.sharded, self.job)
        self.telemetry = telemetry(plan, self.sharded, self.optimizer, self.offloaded, home)
        self.val_loss: float | None = None
        self.validation_s = 0.0
        self.tokens = 0
        self.nonfinite = Nonfinite(self.job, self.ranks, self.optimizer, self.num_parameters)
        self.spikes = SpikeGuard(self.job, self.ranks, self.optimizer, scaled=self.scaler.is_enabled())
        self.batches = StepBatches(self.text.train, plan, self.mesh, self.ranks, work_s=lambda: self.telemetry.work_s)

    # --- one step

    def step(self, step: int, *, stop: Stop = lambda: False, meanwhile: Meanwhile = lambda: None) -> StepReport | None:
        """Run one step; None where the ranks agreed to stop before it, because `stop()` was true on one of them.
        `meanwhile()` is called while the device works."""
        self.telemetry.start_step()
        batch = self.batches.at(step, stop)
        if batch.stop or (self.world.size == 1 and stop()):
            return None
        with self.telemetry.step(batch) as values:
            loss, local_loss = self.forward_backward(batch.rows, batch.num_targets)
            self.optimizer_step(step, loss, values)
            self.batches.prefetch(step + 1, stop)
            meanwhile()
        self.check_values(step, values, local_loss)
        self.tokens += self.job.batch_tokens
        return self.telemetry.report(batch, values, self._counters())

    def check_values(self, step: int, values: Mapping[str, float], local_loss: Tensor) -> None:
        """Loss and gradient norm that are not finite, or far above the last ones."""
        self.nonfinite.check(step, values, local_loss)
        self.spikes.check(step, values)

    def forward_backward(self, batch: DeviceBatch, num_targets: float) -> tuple[Tensor, Tensor]:
        """(mean loss over all targets of all ranks, this rank's part of it); gradients are those of the mean."""
        self.routers.start(self.scaler.factor)
        if self.sharded.pipeline is not None:
            return self._through_stages(self.sharded.pipeline, batch, num_targets)
        local_loss = torch.zeros((), device=self.device)
        micro_batches = batch.micro(self.layout.micro_batch)
        for number, micro_batch in enumerate(micro_batches):
            with self.sharded.accumulate(last=number + 1 == len(micro_batches)):
                loss = self.loss_sum(micro_batch) / max(1.0, num_targets)
                with self.telemetry.phase("backward"):
                    self.scaler.scale(loss).backward()
            local_loss = local_loss + loss.detach()
        self.telemetry.waits.after_backward()
        return self.sharded.total(local_loss), local_loss

    def _through_stages(self, pipeline: Pipeline, batch: DeviceBatch, num_targets: float) -> tuple[Tensor, Tensor]:
        count, waits = len(batch.row_targets) // self.layout.micro_batch, self.telemetry.waits
        with self.telemetry.phase("backward"):
            local_loss = pipeline.step(
                self._rows(batch), self._stage_fns(max(1.0, num_targets)), num_micro_batches=count
            )
        begin = waits.mark()  # a stage that has finished waits here for the others to drain
        self.sharded.finish_gradients()
        waits.after_backward()
        loss = self.sharded.total(local_loss)
        waits.until_now(begin)
        return loss, local_loss

    def optimizer_step(self, step: int, loss: Tensor, values: StepValues) -> None:
        """Clip the gradients and update the weights; loss and gradient norm are read back as soon as both are known."""
        values["lr"] = learning_rate(self.job, step, self.num_parameters)
        set_learning_rate(self.optimizer, values["lr"])

        def read_back(norm: Tensor) -> None:
            scale = self.scaler.factor
            values.read({"loss": loss, "grad_norm": norm} | ({"loss_scale": scale} if scale is not None else {}))

        checked = self.spikes.guarded(loss)
        with self.telemetry.phase("optimizer"):
            norm = update(self.sharded, self.optimizer, self.scaler, self.job.clip, read_back, checked)
        values.read(self.routers.finish(checked, norm))

    def _rows(self, batch: DeviceBatch) -> Rows:
        """The input of the stages: this rank's tokens, and the documents of full rows."""
        part, _ = self._local_tokens(batch)
        return Rows(
            tokens_BT=part.tokens_BT,
            positions_BT=part.positions_BT,
            targets_BT=part.targets_BT,
            documents_BT=batch.documents_BT if batch.has_documents else None,
        )

    def _stage_fns(self, targets: float = 1.0) -> StageFns:
        chunk, context = self.job.chunk_tokens(self.model.config.vocab), self.sharded.context
        return StageFns(
            attends=self.choices.attend if context is None else context.attend,
            scale=self.scaler.scale,
            autocast=lambda: autocast(self.layout.precision, self.device, wanted=not self.sharded.is_fsdp),
            loss=lambda model, hidden, y: self.sharded.loss_sum(hidden, y, chunk=chunk, model=model) / targets,
        )

    def loss_sum(self, batch: DeviceBatch) -> Tensor:
        """Summed loss of a micro-batch. With pipeline stages: on the last of them, without a backward pass."""
        if self.sharded.pipeline is not None:
            return self.sharded.pipeline.evaluate(self._rows(batch), self._stage_fns())
        with autocast(self.layout.precision, self.device, wanted=not self.sharded.is_fsdp):
            with self.telemetry.phase("forward"):
                batch, attend = self._local_tokens(batch)
                hidden = self.model(batch.tokens_BT, batch.positions_BT, attend)
            self.telemetry.mark_hidden(hidden)
            with self.telemetry.phase("loss"):
                chunk = self.job.chunk_tokens(self.model.config.vocab)
                return self.sharded.loss_sum(hidden, batch.targets_BT, chunk=chunk)

    def _local_tokens(self, batch: DeviceBatch) -> tuple[DeviceBatch, Attend]:
        """This rank's tokens of the rows (all of them unless context parallelism shards rows), and their attention."""
        documents_BT, context = batch.documents_BT if batch.has_documents else None, self.sharded.context
        if context is None:
            return batch, self.choices.attend(documents_BT)
        return batch.tokens(context.shard), context.attend(documents_BT)

    def _counters(self) -> dict[str, float]:
        skips = self.scaler.is_enabled() or self.job.on_nonfinite == "skip" or self.job.on_spike in ("skip", "rewind")
        skipped = {"skipped_steps_total": float(self.nonfinite.skipped + self.spikes.skipped)} if skips else {}
        return {"tokens_total": float(self.tokens)} | skipped

    def close(self) -> None:
        """Close the loader, and wait for an offloaded optimizer step."""
        self.batches.close()
        self.offloaded.finish()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- held-out text

    def validate(self) -> float | None:
        """Mean loss on held-out text, the same text for every layout; None where nothing is held out."""
        begin = time.perf_counter()
        self.telemetry.progress.mark("validate")
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        share = {"rank": self.mesh.dp_rank, "world": self.mesh.dp_size}
        held_out = self.text.validation.batches(rows=self.text.train.batch, limit=self.job.eval_batches, **share)
        with self.sharded.evaluating():
            while (batch := self.ranks.run_on_all(lambda: next(held_out, None))) is not None:
                for part in to_device(batch, self.device).micro(self.layout.micro_batch):
                    total, count = total + self.loss_sum(part), count + part.num_targets
        (targets,) = self.ranks.total(float(count))
        self.telemetry.waits.forget()
        targets /= self.world.size / self.mesh.dp_size
        self.val_loss = float(self.sharded.total(total)) / targets if targets else None
        self.validation_s = time.perf_counter() - begin
        self.telemetry.exclude(self.validation_s)
        return self.val_loss
