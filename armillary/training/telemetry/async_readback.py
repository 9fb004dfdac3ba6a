"""Reading: the numbers of a step, brought to the host as soon as they are known, while the device goes on.

Loss and gradients' norm are there before the optimiser runs. They travel on a stream of their own, so that the host
learns them, writes them down and begins the next step while the device still steps the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Mark = Any
"""an event of the device; None on a CPU, which is done when it comes back"""
Read = Callable[[], dict[str, float]]
"""waits for the numbers, and gives them"""


class Reading:
    """`take(numbers)` when they are known; what it gives is called when they are wanted."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tail: tuple[Mark, Mark] = (None, None)
        self._left = self._came = self.tail_s = 0.0
        self.stepped_s = 0.0
        """what the device took in the step before from knowing the gradients' norm to the end of its work"""

    def take(self, numbers: Mapping[str, Tensor]) -> Read:
        if not numbers:
            return dict
        stacked = torch.stack([value.detach().double().reshape(()) for value in numbers.values()])
        if self._stream is None:
            return lambda: dict(zip(numbers, stacked.tolist(), strict=True))
        copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(stacked.device))
        with torch.cuda.stream(self._stream):
            there = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            there.copy_(stacked, non_blocking=True)
            copied.record(self._stream)
        stacked.record_stream(self._stream)

        def read() -> dict[str, float]:
            copied.synchronize()
            return dict(zip(numbers, there.tolist(), strict=True))

        return read

    # --- what the device still did when the host went on

    def come(self) -> None:
        """The host begins a step."""
        self._came = time.perf_counter()

    def mark(self) -> Mark:
        """A moment of the device."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def leave(self, known: Mark, done: Mark) -> None:
        """The host has this step's numbers and goes on: `known` is when they were there, `done` the end of the step's
        work. `tail_s` is then how long the device still worked on the step before while the host was away: that time
        belongs to this one, which found the device busy."""
        before, left = self._tail, self._left
        self._tail, self._left = (known, done), time.perf_counter()
        device_s = before[0].elapsed_time(before[1]) / 1e3 if before[0] is not None and before[1] is not None else 0.0
        self.stepped_s = device_s
        self.tail_s = min(device_s, max(0.0, self._came - left))
