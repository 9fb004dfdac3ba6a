"""Waits: how long a step stood still for other ranks, from marks around the places where it may have to.

On a GPU the marks are events in the stream that computes, read when the step is over; on a CPU they are clock readings.
The places are FSDP's waits for gathered weights, tensor-parallel exchanges, and the end of the backward pass, where the
last gradients are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

Mark = Any


class Waits:
    """`mark()` before, `until_now(mark)` after; `take()` once a step, when the device has done it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pairs: list[tuple[Mark, Mark]] = []
        self._last: Mark = None
        self._host_s = 0.0

    @property
    def source(self) -> str:
        return "events" if self._on_gpu else "measured waits"

    def mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def until_now(self, begin: Mark) -> None:
        self._pairs.append((begin, self.mark()))

    def add(self, seconds: float) -> None:
        """A wait of the host, already measured; on a GPU it is hidden behind the step that is running."""
        self._host_s += 0.0 if self._on_gpu else seconds

    def take(self) -> float:
        """Seconds since it was last asked."""
        pairs, self._pairs = self._pairs, []
        host, self._host_s = self._host_s, 0.0
        return host + covered([self._span(begin, end, pairs[0][0]) for begin, end in pairs])

    def _span(self, begin: Mark, end: Mark, first: Mark) -> tuple[float, float]:
        """Seconds from the step's first mark to both."""
        if self._on_gpu:
            return first.elapsed_time(begin) / 1e3, first.elapsed_time(end) / 1e3
        return begin - first, end - first

    def forget(self) -> None:
        """What was waited for belongs to no step."""
        self._pairs, self._last, self._host_s = [], None, 0.0

    # --- places

    def watch(self, model: nn.Module) -> None:
        """Mark the waits inside a model that is spread over ranks."""
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(self._watch_gradient)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _wrap_wait(module, self)

    def _watch_gradient(self, module: nn.Module, args: Any, made: Tensor) -> None:
        """The backward pass ends where the forward began: its last own work is the embedding's gradient."""
        if made.requires_grad:
            made.register_hook(self._reach_end)

    def _reach_end(self, gradient: Tensor) -> None:
        self._last = self.mark()

    def after_backward(self) -> None:
        """What is left after the model's own work was waiting for the last gradients to be summed."""
        if self._last is not None:
            self.until_now(self._last)
            self._last = None


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of all spans together, where they overlap counted once: an exchange may lie inside another wait."""
    total, upto = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total


def _wrap_wait(module: FSDPModule, waits: Waits) -> None:
    """Weights are gathered ahead; what the wait for them costs is what was not hidden."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13 may have several
    for group in groups:
        if group is not None:
            group.wait_for_unshard = _timed(group.wait_for_unshard, waits)


def _timed(wait: Callable[[], None], waits: Waits) -> Callable[[], None]:
    @wraps(wait)
    def timed() -> None:
        begin = waits.mark()
        wait()
        waits.until_now(begin)

    return timed
