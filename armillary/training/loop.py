"""The training loop: read, forward and backward over micro-batches, clip, step, measure.

One device for now: a layout that needs more is refused. Weights stay in fp32; bf16 runs the matrix products through
autocast. A run ends, or stops on Ctrl-C, with a Hugging Face export.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from armillary.errors import ArmillaryError, BadData
from armillary.model.attend import Attend, packed, plain
from armillary.model.device import pick_device
from armillary.model.transformer import Transformer, build
from armillary.model.weights import load_model, save_model
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.store.gauges import GaugeWriter
from armillary.store.runs import Run
from armillary.training.data.batches import Batch, Batches, validation_batches
from armillary.training.data.shards import TokenShards
from armillary.training.loss import loss_sum
from armillary.training.measure import memory_gauges, source_of
from armillary.training.optim import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from armillary.training.precision import autocast, numerics
from armillary.training.stop import StopRequest

Watch = Callable[["StepReport"], None]
_UPDATE_S = 2.0
"""seconds between notes of how far a run is, each of which is synced to disk"""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step measured; the keys of `gauges` are gauge names."""

    step: int
    gauges: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended."""

    run: Run
    steps: int
    finished: bool
    """False when it was stopped before its last step"""
    loss: float
    val_loss: float | None
    export: Path


def train(plan: Plan, run: Run, *, device: str | None = None, watch: Watch | None = None) -> Trained:
    """Train what the plan says, and export it when it ends or is stopped."""
    job = plan.train
    assert job is not None and plan.data is not None, "a plan for training"
    step, stopped = 0, False
    try:
        settings = numerics(tf32=plan.layout.precision == "tf32", deterministic=job.deterministic)
        with StopRequest() as stop, settings, GaugeWriter(run.gauges) as gauges:
            trainer = Trainer(plan, device=pick_device(device))
            record = Recorder(run, gauges, every=job.log_every)
            for step in range(job.steps):
                report = trainer.step(step)
                stopped = stop.asked and step + 1 < job.steps
                record(report, last=stopped or step + 1 == job.steps)
                if watch:
                    watch(report)
                if stopped:
                    break
        export = save_model(trainer.model, run.export(step + 1), like=trainer.tokenizer_folder, overwrite=True)
    except BaseException as error:
        run.update(state="failed", error=str(error) or type(error).__name__)
        raise
    loss = report.gauges["loss"]
    run.update(state="interrupted" if stopped else "finished", step=step + 1, loss=loss)
    return Trained(run=run, steps=step + 1, finished=not stopped, loss=loss, val_loss=trainer.val_loss, export=export)


class Recorder:
    """Writes a step's gauges, and now and then how far the run is."""

    def __init__(self, run: Run, gauges: GaugeWriter, *, every: int) -> None:
        self.run, self.gauges, self.every = run, gauges, every
        self._updated = time.monotonic()

    def __call__(self, report: StepReport, *, last: bool) -> None:
        if last or report.step % self.every == 0 or "val_loss" in report.gauges:
            self.gauges.write(report.gauges, step=report.step, source=source_of(report.gauges))
        if last or time.monotonic() - self._updated > _UPDATE_S:
            self.run.update(step=report.step + 1, loss=report.gauges["loss"])
            self._updated = time.monotonic()


class Trainer:
    """Model, optimiser and data of one run; `step(n)` does everything of step n."""

    def __init__(self, plan: Plan, *, device: torch.device) -> None:
        assert plan.train is not None and plan.data is not None
        self.job, self.layout, self.device = plan.train, plan.layout, device
        data = Path(plan.data.path)
        shards = TokenShards.open(data, "train")
        self.validation = TokenShards.open(data, "validation")
        self.tokenizer_folder = shards.tokenizer_folder
        _check_data(plan.model, shards, data)
        rows = self.job.batch_tokens // self.job.sequence
        self.batches = Batches(shards=shards, sequence=self.job.sequence, batch=rows, seed=plan.data.seed)
        self.model = self._start(plan.model, plan.weights)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = make_optimizer(self.model, self.job)
        self.val_loss: float | None = None

    def _start(self, config: ModelConfig, weights: str) -> Transformer:
        """The model in fp32, the precision of the weights that are stepped."""
        if weights:
            model = load_model(weights, dtype=torch.float32, device=self.device)
        else:
            model = build(config, dtype=torch.float32, device=self.device, seed=self.job.seed)
        if self.job.compile:
            for block in model.blocks.values():
                block.compile()
        return model.train()

    def step(self, step: int) -> StepReport:
        begin = time.perf_counter()
        batch = self.batches.at(step)
        data_wait = time.perf_counter() - begin
        rate = learning_rate(self.job, step, self.num_parameters)
        set_learning_rate(self.optimizer, rate)
        loss = self.forward_backward(batch)
        norm = clip_gradients(self.model.parameters(), self.job.clip)
        measured = {"loss": float(loss), "grad_norm": float(norm), "lr": rate}  # float() waits for the device
        _refuse_nan(step, measured)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._finish_device_work()
        seconds = time.perf_counter() - begin
        return StepReport(step=step, gauges=measured | self._speed(seconds, data_wait) | self._validated(step))

    def _finish_device_work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Mean loss of the batch's targets; gradients are those of that mean, whatever the micro-batches."""
        total = torch.zeros((), device=self.device)
        for micro in _micro_batches(batch, self.layout.micro_batch):
            part = self.loss_sum(micro) / max(1, batch.num_targets)
            part.backward()
            total += part.detach()
        return total

    def loss_sum(self, batch: Batch) -> Tensor:
        tokens, targets, positions, documents = (
            torch.from_numpy(array).to(self.device)
            for array in (batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.documents_BT)
        )
        with autocast(self.layout.precision, self.device):
            hidden = self.model(tokens, positions, _attend(batch, documents))
            return loss_sum(self.model, hidden, targets, chunk=self.job.chunk_tokens(self.model.config.vocab))

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss on held-out text, the same text whatever the micro-batch; None where nothing is held out."""
        total, count = 0.0, 0
        rows = self.batches.batch
        for batch in validation_batches(self.validation, self.job.sequence, rows, limit=self.job.eval_batches):
            for micro in _micro_batches(batch, self.layout.micro_batch):
                if micro.num_targets:
                    total, count = total + float(self.loss_sum(micro)), count + micro.num_targets
        return total / count if count else None

    def _validated(self, step: int) -> dict[str, float]:
        due = step + 1 == self.job.steps or (self.job.eval_every and (step + 1) % self.job.eval_every == 0)
        if not due:
            return {}
        self.val_loss = self.validate()
        return {} if self.val_loss is None else {"val_loss": self.val_loss}

    def _speed(self, seconds: float, data_wait: float) -> dict[str, float]:
        rate = self.job.batch_tokens / seconds
        speed = {"step_s": seconds, "data_wait_s": data_wait, "tokens_per_s": rate, "tokens_per_s_per_device": rate}
        return speed | memory_gauges(self.device)


def _attend(batch: Batch, documents_BT: Tensor) -> Attend:
    """Plain where every row is one document, which is quicker than a mask."""
    return plain if not batch.documents_BT.any() else packed(documents_BT)


def _micro_batches(batch: Batch, rows: int) -> list[Batch]:
    count = len(batch.tokens_BT)
    return [batch.rows(start, min(start + rows, count)) for start in range(0, count, rows)]


def _check_data(config: ModelConfig, shards: TokenShards, data: Path) -> None:
    if shards.index.vocab > config.vocab:
        need = f"{data} has token ids up to {shards.index.vocab - 1}, beyond the model's vocabulary of {config.vocab}"
        raise BadData(f"{need}; prepare it with --vocab {config.vocab}, or --set model.vocab={shards.index.vocab}")


def _refuse_nan(step: int, measured: dict[str, float]) -> None:
    for name in ("loss", "grad_norm"):
        if not math.isfinite(measured[name]):
            lower = measured["lr"] / 3
            raise ArmillaryError(f"{name} is {measured[name]} at step {step}; try --set train.lr={lower:.1g}")
