"""Joined rows: how much of a micro-batch comes whatever its rows are, from passes over one and over several at once.

Calls, weights that are rounded and gradients that are summed anew, products too small to be quick or for a second
thread: all of it comes once a micro-batch. The model itself makes the passes, between two steps, when its gradients are
gone; new ones are let go again, and nothing is sent to other ranks: the run is the same with them and without.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from armillary.parallel.apply import Sharded
from armillary.spec.plan import Plan
from armillary.training.data.loader import DeviceBatch

MOST, MOST_TOKENS, MOST_BYTES = 8, 2048, 128e6
"""micro-batches that are joined, their tokens, and what is kept of them for the backward pass: enough to see what
joining saves, and no strain on the memory of a machine that trains"""
REMEMBERED = 64
"""passes over several that are compared"""
Passes = Callable[[DeviceBatch], None]
"""forward and backward of one micro-batch"""


def can_join(plan: Plan, sharded: Sharded) -> bool:
    """Whether steps have several micro-batches, and a rank can pass some by itself: through a whole model, which keeps
    everything here and is not compiled for so many rows."""
    job, layout = plan.train, plan.layout
    if job is None or job.compiled or sharded.is_fsdp or layout.tp * layout.pp * layout.cp * layout.ep > 1:
        return False
    return layout.offload == "none" and layout.num_micro_batches(job.batch_tokens, job.sequence) > 1


class JoinedRows:
    """`fraction(batch)` between two steps."""

    def __init__(self, model: nn.Module, passes: Passes, *, rows: int) -> None:
        """`rows` of a micro-batch."""
        self._model, self._passes, self._rows, self._kept = model, passes, rows, 0
        self._alone, self._together = deque[float](maxlen=2 * REMEMBERED), deque[float](maxlen=REMEMBERED)

    def fraction(self, batch: DeviceBatch) -> float | None:
        """Share of a micro-batch's time, by this thread's clock, that does not follow its rows: what n take one by one,
        less what they take together, for each but one. None where they are too large to be joined. A first pass makes
        the gradients that the others add to, and brings back to the caches what the next ones find there in a step.
        Whatever else a machine does only ever adds time: the quickest tenth of all passes so far are compared."""
        if self._kept and self._count(batch) < 2:
            return None
        with torch.random.fork_rng(devices=[]), _gradients_aside(self._model):
            one = batch.micro(self._rows)[0]
            self._first(one)
            count = self._count(batch)
            if count < 2:
                return None
            self._alone.extend((self._took(one), self._took(one)))
            self._together.append(self._took(batch.micro(count * self._rows)[0]))
        return min(1.0, max(0.0, (count - _quick(self._together) / _quick(self._alone)) / (count - 1)))

    def _first(self, one: DeviceBatch) -> None:
        """A pass, the first time with a count of the bytes that it keeps; views count as what they look into."""
        if self._kept:
            self._passes(one)
            return

        def keep(tensor: Tensor) -> Tensor:
            self._kept += tensor.nbytes
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            self._passes(one)

    def _count(self, batch: DeviceBatch) -> int:
        """How many are joined."""
        tokens, there = self._rows * batch.tokens_BT.shape[1], len(batch.row_targets) // self._rows
        return min(MOST, there, MOST_TOKENS // tokens, int(MOST_BYTES // max(1, self._kept)))

    def _took(self, batch: DeviceBatch) -> float:
        begin = time.thread_time()
        self._passes(batch)
        return time.thread_time() - begin


def _quick(seconds: Sequence[float]) -> float:
    """The quickest tenth end here."""
    return sorted(seconds)[len(seconds) // 10]


@contextmanager
def _gradients_aside(model: nn.Module) -> Iterator[None]:
    """The model without gradients, and afterwards with those that it had."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
