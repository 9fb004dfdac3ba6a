"""How long a stage computes during a step, and how long it stands idle between: its bubble and its waits for others.

Marks lie around every pass of a micro-batch through a chunk: clock readings on a CPU, events in the stream on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

_PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
Pass = tuple[str, int, int]
"""(F forward, B backward, I its half for inputs, W its half for weights; chunk; micro-batch)"""


class Busy:
    """`begin()`, passes, `end()`; then `take()` once the device has done them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []
        self._whole: list[Any] = []
        self.order: list[Pass] = []
        """passes of the last step, as they were run"""

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self._spans, self._whole, self.order = [], [self._mark()], []

    def end(self) -> None:
        self._whole.append(self._mark())

    def during(self, work: Callable[..., Any], letter: str = "", chunk: int = 0) -> Callable[..., Any]:
        """`work`, counted as computing; with a letter, a pass whose first argument is the micro-batch."""

        @wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            start, kind = self._mark(), letter if kwargs.get("full_backward", True) else "I"
            if kind:
                self.order.append((kind, chunk, args[0]))
            made = work(*args, **kwargs)
            self._spans.append((kind, start, self._mark()))
            return made

        return counted

    def take(self) -> tuple[float, float]:
        """(seconds computing, seconds in all) of the last step."""
        if len(self._whole) < 2:
            return 0.0, 0.0
        return sum(self.seconds().values()), self._between(*self._whole)

    def seconds(self) -> dict[str, float]:
        """Letter -> seconds of all such passes of the last step; the loss counts with the forward pass."""
        found: dict[str, float] = {}
        for kind, start, end in self._spans:
            found[kind or "F"] = found.get(kind or "F", 0.0) + self._between(start, end)
        return found

    def _between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else end - start


def timed(stage: PipelineStage, busy: Busy) -> PipelineStage:
    """A stage whose passes are counted."""
    seen: Any = stage
    for name, letter in _PASSES.items():
        setattr(seen, name, busy.during(getattr(seen, name), letter, stage.stage_index))
    return stage
