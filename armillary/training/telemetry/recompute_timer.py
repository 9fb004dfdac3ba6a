"""Again: how long a step spends on activations that its backward pass makes a second time.

A recomputing block calls what it is told to: here, itself between two marks once gradients flow. Blocks stay what they
are, hand-written passes too; passes that make their own norms again are not seen, nor is what a compiler took apart.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from armillary.parallel.exposed_waits import Waits

T = TypeVar("T")


class Again:
    """`at(step)` in place of calling it, then `take()`."""

    def __init__(self, model: nn.Module, device: torch.device, *, seen: bool = True) -> None:
        """`seen`: whether blocks may be told what to call; compiled ones would be compiled anew."""
        blocks = getattr(model, "blocks", None) if seen else None
        self._blocks: list[Any] = [] if blocks is None else [one for one in blocks.values() if hasattr(one, "watched")]
        self._waits = Waits(device)

    def at(self, step: Callable[[], T]) -> T:
        """What `step` gives."""
        for block in self._blocks:
            block.watched = partial(self._timed, type(block).plain)
        try:
            return step()
        finally:
            for block in self._blocks:
                del block.watched

    def take(self) -> dict[str, float]:
        """recompute_s of the step before, once the device has done it; nothing where nothing was made again."""
        seconds = self._waits.take()
        return {"recompute_s": seconds} if seconds else {}

    def _timed(self, run: Any, *args: Any) -> Any:
        if torch._C._current_graph_task_id() < 0:  # the first time
            return run(*args)
        begin = self._waits.mark()
        try:
            return run(*args)
        finally:  # it ends early, once all that is needed is there
            self._waits.until_now(begin)
