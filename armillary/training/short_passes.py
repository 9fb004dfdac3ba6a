"""Short passes: what a micro-batch takes whatever its rows are, from passes over all of its tokens and over a part.

Calls, weights that are rounded and gradients that are summed anew, products too small to be quick: all of it comes once
a micro-batch. The model itself makes the passes, between two steps, when its gradients are gone; they are let go again,
and nothing is sent to other ranks, so that the run is the same with them and without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from armillary.parallel.apply import Sharded
from armillary.spec.plan import Plan
from armillary.training.data.batch import LAYOUT
from armillary.training.data.loader import DeviceBatch

PIECES = 4
"""parts of a micro-batch, one of which is timed beside all of them"""
MOST_TOKENS = 1024
"""of a micro-batch that is timed: more of them hide what does not follow their number"""
Passes = Callable[[DeviceBatch], None]
"""forward and backward of one micro-batch"""


def can_pass(plan: Plan, sharded: Sharded) -> bool:
    """Whether steps have several micro-batches, and a rank can pass one by itself: through a whole model, which keeps
    everything here and is not compiled for rows of one length."""
    job, layout = plan.train, plan.layout
    if job is None or job.compile or sharded.is_fsdp or layout.tp * layout.pp * layout.cp * layout.ep > 1:
        return False
    return layout.offload == "none" and layout.num_micro_batches(job.batch_tokens, job.sequence) > 1


class ShortPasses:
    """`micro_batch_s(batch)` between two steps."""

    def __init__(self, model: nn.Module, passes: Passes, *, rows: int) -> None:
        """`rows` of a micro-batch."""
        self._model, self._passes, self._rows = model, passes, rows

    def micro_batch_s(self, batch: DeviceBatch) -> float:
        """Seconds of this thread that do not follow the number of tokens: PIECES parts take as many times as long as
        one, less what all of them together save. A first pass makes the gradients that the others add to."""
        whole = pieces(batch.micro(self._rows)[0])
        part = whole.micro(len(whole.row_targets) // PIECES)[0]
        with torch.random.fork_rng(devices=[]), _gradients_aside(self._model):
            self._passes(part)
            parts_s = self._took(part)
            whole_s = self._took(whole)
            parts_s = (parts_s + self._took(part)) / 2
        self.raw = {'part_s': parts_s, 'whole_s': whole_s}
        return min(parts_s, max(0.0, (PIECES * parts_s - whole_s) / (PIECES - 1)))

    def _took(self, batch: DeviceBatch) -> float:
        begin = time.thread_time()
        self._passes(batch)
        return time.thread_time() - begin


def pieces(micro: DeviceBatch) -> DeviceBatch:
    """A micro-batch in as many rows as PIECES divide, of one document each: its own rows, or shorter ones where these
    are few; fewer, and then shorter ones, where there are too many tokens."""
    rows, length = micro.tokens_BT.shape
    if rows < PIECES:
        rows, length = PIECES, max(1, rows * length // PIECES)
    rows = max(PIECES, min(rows, MOST_TOKENS // length) // PIECES * PIECES)
    length = min(length, MOST_TOKENS // rows)
    cuts: dict[str, Any] = {name: _rows_of(getattr(micro, name), rows, length) for name in LAYOUT}
    return replace(micro, **cuts, row_targets=(length,) * rows, row_documents=(1,) * rows)


def _rows_of(told_BT: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """The first rows·length of what is told of all tokens, or what there is of it over again."""
    flat = told_BT.flatten()
    return flat.repeat(-(-rows * length // len(flat)))[: rows * length].view(rows, length)


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
