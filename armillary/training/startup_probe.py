"""Startup probe: the cost of a torch call and the fixed cost of a micro-batch on this CPU, measured once per run.

Both are measured before the first step, outside of every measured step, and reported with the first step's gauges
(`torch_call_s`, `micro_batch_overhead_fraction`). The diagnosis uses them to price fewer calls and fewer micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.model.layers import attention_forms as attend
from armillary.model.transformer import build
from armillary.parallel.apply import Sharded
from armillary.spec.model import LayerKind, ModelConfig
from armillary.spec.plan import Plan
from armillary.training.data.loader import DeviceBatch, to_device
from armillary.training.step.loss import loss_sum
from armillary.training.step.numerics import HALF, autocast
from armillary.training.trainer import Trainer

REPEATS, BUDGET_S = 20, 3.0
"""measurements of each cost, and the seconds after which no more are taken"""
MAX_MICRO_BATCHES, MAX_TOKENS, MAX_BYTES = 8, 2048, 128e6
"""micro-batches that are joined into one pass, their tokens, and the activations that the pass saves: enough to see
what joining saves, and little memory on a machine that trains"""
CALLS_16BIT, CALLS_FP32 = 408, 326
"""torch calls in one pass over the small layer, as the profiler counts those of a step: 16-bit autocast, fp32"""
Pass = Callable[[DeviceBatch], None]
"""forward and backward pass of one micro-batch"""
_CPU = torch.device("cpu")


def startup_costs(trainer: Trainer, step: int) -> dict[str, float]:
    """Gauges to report with `step`, the first of this process; none on a GPU, or where the run profiles no steps.
    Every rank measures, so that all load the cores as a step does. Weights, gradients and random numbers of the run
    stay as they are."""
    if not trainer.job.profile_every or trainer.device.type != "cpu":
        return {}
    begin, calls = time.perf_counter(), CallCostProbe(trainer.layout.precision)
    probe = _micro_batch_probe(trainer)
    rows = to_device(trainer.text.train.at(step), _CPU) if probe is not None else None
    call_s, fraction = [calls.measure()], None
    for _ in range(REPEATS):
        call_s.append(calls.measure())
        fraction = probe.fraction(rows) if probe is not None and rows is not None else None
        if time.perf_counter() - begin > BUDGET_S:
            break
    overhead = {"micro_batch_overhead_fraction": fraction} if fraction is not None else {}
    return {"torch_call_s": median(call_s)} | overhead


def _micro_batch_probe(trainer: Trainer) -> MicroBatchProbe | None:
    if trainer.world.size > 1 or not joinable(trainer.plan, trainer.sharded):
        return None

    def run(batch: DeviceBatch) -> None:
        with trainer.sharded.accumulate(last=False):
            trainer.loss_sum(batch).backward()

    return MicroBatchProbe(trainer.model, run, rows=trainer.layout.micro_batch)


# --- the cost of a torch call


class CallCostProbe:
    """`measure()` times one small layer over four tokens, forward and backward: all calls of a block, and almost no
    work. A pass before the timed one warms the caches, as the calls of a step find them."""

    def __init__(self, precision: str) -> None:
        config = ModelConfig(
            hidden=64, heads=2, kv_heads=2, head_dim=32, ffn=192, vocab=64, context=4, layers=(LayerKind(),)
        )
        self._model, self._precision = build(config, dtype=torch.float32, device=_CPU, seed=0), precision
        self._tokens_BT = torch.arange(4, device=_CPU)[None]

    def measure(self) -> float:
        """CPU seconds of this thread per torch call."""
        self._run()
        begin = time.thread_time()
        self._run()
        return (time.thread_time() - begin) / (CALLS_16BIT if self._precision in HALF else CALLS_FP32)

    def _run(self) -> None:
        tokens_BT = self._tokens_BT
        with autocast(self._precision, _CPU):
            hidden = self._model(tokens_BT, tokens_BT, attend.plain)
            loss = loss_sum(self._model, hidden, tokens_BT, chunk=0)
        loss.backward()  # type: ignore[no-untyped-call]


# --- the fixed cost of a micro-batch


def joinable(plan: Plan, sharded: Sharded) -> bool:
    """Whether a step has several micro-batches and one rank can run some of them alone: the model is not sharded,
    offloads nothing, and is not compiled for one number of rows."""
    job, layout = plan.train, plan.layout
    if job is None or job.compiled or sharded.is_fsdp or layout.tp * layout.pp * layout.cp * layout.ep > 1:
        return False
    return layout.offload == "none" and layout.num_micro_batches(job.batch_tokens, job.sequence) > 1


class MicroBatchProbe:
    """The share of a micro-batch's time that does not depend on its rows: torch calls, casting weights, accumulating
    gradients, GEMMs too small to be efficient. Measured by running 1 and n micro-batches' rows in one pass."""

    def __init__(self, model: nn.Module, run: Pass, *, rows: int) -> None:
        """`rows` per micro-batch."""
        self._model, self._run, self._rows, self._saved_bytes = model, run, rows, 0
        self._alone: list[float] = []
        self._joined: list[float] = []

    def fraction(self, batch: DeviceBatch) -> float | None:
        """(n · alone − joined) / (n − 1) / alone, by this thread's CPU time; None where n is below 2 because rows are
        too large to be joined. Other load on the machine only adds time, so the fastest tenth of all passes so far is
        compared. The first pass allocates the gradients and warms the caches."""
        if self._saved_bytes and self._count(batch) < 2:
            return None
        with torch.random.fork_rng(devices=[]), _without_gradients(self._model):
            micro_batch = batch.micro(self._rows)[0]
            self._warm_up(micro_batch)
            count = self._count(batch)
            if count < 2:
                return None
            self._alone.extend((self._seconds(micro_batch), self._seconds(micro_batch)))
            self._joined.append(self._seconds(batch.micro(count * self._rows)[0]))
        return min(1.0, max(0.0, (count - _fastest(self._joined) / _fastest(self._alone)) / (count - 1)))

    def _warm_up(self, batch: DeviceBatch) -> None:
        """One pass; the first counts the bytes of its saved tensors, where a view counts as its base."""
        if self._saved_bytes:
            self._run(batch)
            return

        def save(tensor: Tensor) -> Tensor:
            self._saved_bytes += tensor.nbytes
            return tensor

        with saved_tensors_hooks(save, lambda tensor: tensor):
            self._run(batch)

    def _count(self, batch: DeviceBatch) -> int:
        """How many micro-batches are joined."""
        tokens, available = self._rows * batch.tokens_BT.shape[1], len(batch.row_targets) // self._rows
        return min(MAX_MICRO_BATCHES, available, MAX_TOKENS // tokens, int(MAX_BYTES // max(1, self._saved_bytes)))

    def _seconds(self, batch: DeviceBatch) -> float:
        begin = time.thread_time()
        self._run(batch)
        return time.thread_time() - begin


def _fastest(seconds: Sequence[float]) -> float:
    """The slowest of the fastest tenth."""
    return sorted(seconds)[len(seconds) // 10]


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """The model without gradients; afterwards it has those that it had."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
