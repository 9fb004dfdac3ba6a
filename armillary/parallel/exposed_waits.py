"""Exposed waits: how long a step waits for other ranks, from marks around the places where it may have to.

The places are FSDP's waits for all-gathered weights, tensor- and expert-parallel collectives, and the end of the
backward pass, where the last gradients are reduced.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from armillary.kernels.core.torch_compat import fsdp_param_groups
from armillary.parallel.device_timer import DeviceTimer, Mark


class ExposedWaits:
    """`mark()` before a wait, `until_now(mark)` after it; `take()` once per step, when the device has run it."""

    def __init__(self, device: torch.device) -> None:
        self._timer = DeviceTimer(device)
        self._pairs: list[tuple[Mark, Mark]] = []
        self._last: Mark = None
        self._host_s = 0.0

    @property
    def source(self) -> str:
        return "events" if self._timer.on_gpu else "measured waits"

    def mark(self) -> Mark:
        return self._timer.mark()

    def until_now(self, begin: Mark) -> None:
        self._pairs.append((begin, self.mark()))

    def add(self, seconds: float) -> None:
        """A wait of the host, already measured; on a GPU it is hidden behind the step that is running."""
        self._host_s += 0.0 if self._timer.on_gpu else seconds

    def take(self) -> float:
        """Seconds since the last call."""
        pairs, self._pairs = self._pairs, []
        host, self._host_s = self._host_s, 0.0
        since = self._timer.seconds
        return host + covered([(since(pairs[0][0], begin), since(pairs[0][0], end)) for begin, end in pairs])

    def forget(self) -> None:
        """Drop waits that belong to no step."""
        self._pairs, self._last, self._host_s = [], None, 0.0

    # --- places

    def watch(self, model: nn.Module) -> None:
        """Mark the waits inside a model that is sharded over ranks."""
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(self._watch_gradient)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _wrap_wait(module, self)

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


def _wrap_wait(module: FSDPModule, waits: ExposedWaits) -> None:
    """Weights are all-gathered ahead; the wait for them is the part that is not hidden."""
    for group in fsdp_param_groups(module):
        group.wait_for_unshard = _timed(group.wait_for_unshard, waits)


def _timed(wait: Callable[[], None], waits: ExposedWaits) -> Callable[[], None]:
    @wraps(wait)
    def timed() -> None:
        begin = waits.mark()
        wait()
        waits.until_now(begin)

    return timed
