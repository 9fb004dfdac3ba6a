"""Device timer: marks in the stream that computes, and the seconds between them.

On a GPU a mark is a CUDA event, read when the device has passed it; on a CPU it is a clock reading.
"""

import time
from typing import Any

import torch

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
