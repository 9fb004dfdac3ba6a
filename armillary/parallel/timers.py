"""Timers of a training step on the device: what a pipeline stage computes, and how long a step waits for other ranks.

On a GPU a mark is a CUDA event, read when the device has passed it; on a CPU it is a clock reading. A stage is marked
around every pass of a micro-batch. Exposed waits are marked around the places where a step may have to wait: FSDP's
waits for all-gathered weights, tensor- and expert-parallel collectives, and the end of the backward pass, where the
last gradients are reduced.
"""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from armillary.kernels.core.torch_compat import fsdp_param_groups

_TIMED = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
Pass = tuple[str, int, int]
"""(F forward, B backward, I its half for inputs, W its half for weights; chunk; micro-batch)"""
Mark = Any


class DeviceTimer:
    """`mark()` twice, then `seconds(begin, end)` once the device has passed both."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self.on_gpu else end - begin


# --- pipeline stages


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

    def watch(self, stage: PipelineStage) -> PipelineStage:
        """The stage, with its passes timed."""
        module: Any = stage
        for name, letter in _TIMED.items():
            setattr(module, name, self.during(getattr(module, name), letter, stage.stage_index))
        return stage

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


# --- waits for other ranks


class ExposedWaits:
    """`mark()` before a wait, `until_now(mark)` after it; `take()` once per step, when the device has run it."""

    def __init__(self, device: torch.device) -> None:
        self._timer = DeviceTimer(device)
        self._spans: list[tuple[Mark, Mark]] = []
        self._last: Mark = None
        self._host_s = 0.0

    @property
    def source(self) -> str:
        return "events" if self._timer.on_gpu else "measured waits"

    def mark(self) -> Mark:
        return self._timer.mark()

    def until_now(self, begin: Mark) -> None:
        self._spans.append((begin, self.mark()))

    def add(self, seconds: float) -> None:
        """A wait of the host, already measured; on a GPU it is hidden behind the step that is running."""
        self._host_s += 0.0 if self._timer.on_gpu else seconds

    def take(self) -> float:
        """Seconds since the last call."""
        spans, host_s, since = self._spans, self._host_s, self._timer.seconds
        self._spans, self._host_s = [], 0.0
        return host_s + covered([(since(spans[0][0], begin), since(spans[0][0], end)) for begin, end in spans])

    def forget(self) -> None:
        """Drop waits that belong to no step."""
        self._spans, self._last, self._host_s = [], None, 0.0

    # --- places

    def watch(self, model: nn.Module) -> None:
        """Mark the waits inside a model that is sharded over ranks."""
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(self._watch_gradient)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # weights are all-gathered ahead: only the wait for them is exposed
                for group in fsdp_param_groups(module):
                    group.wait_for_unshard = self._timed(group.wait_for_unshard)

    def _timed(self, wait: Callable[[], None]) -> Callable[[], None]:
        @wraps(wait)
        def timed() -> None:
            begin = self.mark()
            wait()
            self.until_now(begin)

        return timed

    def _watch_gradient(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """The backward pass ends where the forward pass began: its last own work is the embedding's gradient."""
        if output.requires_grad:
            output.register_hook(self._reach_end)

    def _reach_end(self, gradient: Tensor) -> None:
        self._last = self.mark()

    def after_backward(self) -> None:
        """The time since the embedding's gradient was a wait for the last gradients to be reduced."""
        if self._last is not None:
            self.until_now(self._last)
            self._last = None


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of all spans: a collective may lie inside another wait."""
    total, upto = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total
