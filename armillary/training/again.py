"""Again: how long a recorded step spends on activations that its backward pass makes a second time.

Parts of a block that are called while gradients flow are called for that. Hooks are there for the recorded step only;
blocks that are compiled, or kernels of our own, have no parts to be seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from armillary.training.waits import Waits


class Again:
    """`with again.watched(): step()`, then `take()`."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        blocks = getattr(model, "blocks", None)
        self._blocks = list(blocks.values()) if blocks is not None else []
        self._waits = Waits(device)
        self._spans: dict[tuple[int, int], list[Any]] = {}
        """(block, backward pass) -> mark before its first part, mark after its last"""

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number, block in enumerate(self._blocks):
                for part in block.children():
                    stack.callback(part.register_forward_pre_hook(partial(self._begin, number)).remove)
                    end = part.register_forward_hook(partial(self._end, number), always_call=True)  # it may stop early
                    stack.callback(end.remove)
            yield

    def take(self) -> float:
        """Seconds, once the device is done."""
        for begin, end in self._spans.values():
            self._waits.add_span(begin, end)
        self._spans.clear()
        return self._waits.take()

    def _begin(self, block: int, part: nn.Module, args: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task >= 0 and (block, task) not in self._spans:
            mark = self._waits.mark()
            self._spans[block, task] = [mark, mark]

    def _end(self, block: int, part: nn.Module, args: Any, made: Any) -> None:
        span = self._spans.get((block, torch._C._current_graph_task_id()))
        if span is not None:
            span[1] = self._waits.mark()
