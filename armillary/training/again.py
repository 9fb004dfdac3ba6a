"""Again: how long a recorded step spends on activations that its backward pass makes a second time.

Parts of a block that are called while gradients flow are called for that. Hooks are there for the recorded step only;
blocks that are compiled, or kernels of our own, have no parts to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from armillary.training.waits import Waits


class Again:
    """`with again.watched(): step()`, then `take()`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        blocks = getattr(model, "blocks", None)
        self._parts = [part for block in (blocks.values() if blocks is not None else ()) for part in block.children()]
        self._waits = Waits(device)
        self._open: dict[int, Any] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.register_forward_pre_hook(self._begin).remove)
                stack.callback(part.register_forward_hook(self._end, always_call=True).remove)  # it may stop half-way
            yield

    def take(self) -> float:
        """Seconds, once the device is done."""
        self._open.clear()
        return self._waits.take()

    def _begin(self, part: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:
            self._open[id(part)] = self._waits.mark()

    def _end(self, part: nn.Module, args: Any, made: Any) -> None:
        begin = self._open.pop(id(part), None)
        if begin is not None:
            self._waits.until_now(begin)
