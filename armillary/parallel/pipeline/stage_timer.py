"""Stage timer: how long a pipeline stage computes during a step, and how long it is idle (bubble and waits).

Marks lie around every pass of a micro-batch through a virtual stage.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from armillary.parallel.device_timer import DeviceTimer, Mark

_PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
Pass = tuple[str, int, int]
"""(F forward, B backward, I its half for inputs, W its half for weights; chunk; micro-batch)"""


class StageTimer:
    """`begin()`, passes, `end()`; then `take()` once the device has run them."""

    def __init__(self, device: torch.device) -> None:
        self._timer = DeviceTimer(device)
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._step: list[Mark] = []
        self.order: list[Pass] = []
        """passes of the last step, in the order in which they ran"""

    def begin(self) -> None:
        self._spans, self._step, self.order = [], [self._timer.mark()], []

    def end(self) -> None:
        self._step.append(self._timer.mark())

    def during(self, work: Callable[..., Any], letter: str = "", chunk: int = 0) -> Callable[..., Any]:
        """`work`, timed as computing; with a letter, a pass whose first argument is the micro-batch."""

        @wraps(work)
        def counted(*args: Any, **kwargs: Any) -> Any:
            start, kind = self._timer.mark(), letter if kwargs.get("full_backward", True) else "I"
            if kind:
                self.order.append((kind, chunk, args[0]))
            result = work(*args, **kwargs)
            self._spans.append((kind, start, self._timer.mark()))
            return result

        return counted

    def take(self) -> tuple[float, float]:
        """(seconds computing, seconds from begin to end) of the last step."""
        if len(self._step) < 2:
            return 0.0, 0.0
        return sum(self.seconds().values()), self._timer.seconds(*self._step)

    def seconds(self) -> dict[str, float]:
        """Letter -> seconds of all such passes of the last step; the loss counts with the forward pass."""
        seconds: dict[str, float] = {}
        for kind, start, end in self._spans:
            seconds[kind or "F"] = seconds.get(kind or "F", 0.0) + self._timer.seconds(start, end)
        return seconds


def timed(stage: PipelineStage, timer: StageTimer) -> PipelineStage:
    """The stage, with its passes timed."""
    module: Any = stage
    for name, letter in _PASSES.items():
        setattr(module, name, timer.during(getattr(module, name), letter, stage.stage_index))
    return stage
