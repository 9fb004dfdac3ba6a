"""Recompute timer: how long the backward pass of a step recomputes activations.

A block with recompute calls its `watched` function; the timer sets that to the block's plain forward between two
marks, taken only while a backward pass runs. Fused passes that recompute their own norms are not timed, nor are
compiled blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from armillary.parallel.exposed_waits import ExposedWaits


class RecomputeTimer:
    """`with timed(): …` around a step, then `take()`."""

    def __init__(self, model: nn.Module, device: torch.device, *, enabled: bool = True) -> None:
        """`enabled` is False for compiled blocks, which a new `watched` would compile again."""
        blocks = getattr(model, "blocks", None) if enabled else None
        self._blocks: list[Any] = [] if blocks is None else [b for b in blocks.values() if hasattr(b, "watched")]
        self._spans = ExposedWaits(device)

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        for block in self._blocks:
            block.watched = partial(self._run, type(block).plain)
        try:
            yield {}
        finally:
            for block in self._blocks:
                del block.watched

    def take(self) -> dict[str, float]:
        """recompute_s of the last step, once the device has run it; nothing where nothing was recomputed."""
        seconds = self._spans.take()
        return {"recompute_s": seconds} if seconds else {}

    def _run(self, forward: Any, *args: Any) -> Any:
        if torch._C._current_graph_task_id() < 0:  # the forward pass
            return forward(*args)
        begin = self._spans.mark()
        try:
            return forward(*args)
        finally:  # torch raises out of it as soon as all saved tensors are recomputed
            self._spans.until_now(begin)
