"""Asynchronous readback: the values of a step are copied to the host while the device continues.

Loss and gradient norm are known before the optimizer runs. They are copied on a separate stream, so that the host can
log them and start the next step while the device still updates the weights.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from armillary.parallel.timers import DeviceTimer, Mark

Read = Callable[[], dict[str, float]]
"""waits for the values and returns them"""


class AsyncReadback:
    """`copy(values)` when they are computed; call what it returns when they are needed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._timer = DeviceTimer(device)
        self._last: tuple[Mark, Mark] | None = None
        self._finished = self._started = self.overrun_s = 0.0
        self.after_norm_s = 0.0
        """device time of the previous step from its gradient norm to its end; 0 on a CPU, which runs nothing later"""

    def copy(self, values: Mapping[str, Tensor]) -> Read:
        if not values:
            return dict
        stacked = torch.stack([value.detach().double().reshape(()) for value in values.values()])
        if self._stream is None:
            return lambda: dict(zip(values, stacked.tolist(), strict=True))
        copied = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(stacked.device))
        with torch.cuda.stream(self._stream):
            pinned = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            pinned.copy_(stacked, non_blocking=True)
            copied.record(self._stream)
        stacked.record_stream(self._stream)

        def read() -> dict[str, float]:
            copied.synchronize()
            return dict(zip(values, pinned.tolist(), strict=True))

        return read

    # --- device work that outlasts the host's step

    def start(self) -> None:
        """The host starts a step."""
        self._started = time.perf_counter()

    def mark(self) -> Mark:
        return self._timer.mark()

    def finish(self, known: Mark, done: Mark) -> None:
        """The host has this step's values: `known` is when the device had computed the norm, `done` the end of the
        step's work. `overrun_s` is how long the device still ran the previous step between the host's two steps; that
        time belongs to this step, which found the device busy."""
        previous, finished = self._last, self._finished
        self._last, self._finished = (known, done), time.perf_counter()
        self.after_norm_s = self._timer.seconds(*previous) if previous is not None and self._timer.on_gpu else 0.0
        self.overrun_s = min(self.after_norm_s, max(0.0, self._started - finished))


class StepValues(dict[str, float]):
    """The values of one step by gauge name, complete after `wait()`."""

    def __init__(self, readback: AsyncReadback) -> None:
        super().__init__()
        self._readback = readback
        self._reads: list[Read] = []
        self._marks: list[Mark] = []

    def read(self, values: Mapping[str, Tensor]) -> None:
        """Start to copy values that the device has computed."""
        self._reads.append(self._readback.copy(values))
        self._marks.append(self._readback.mark())

    def wait(self) -> None:
        for read in self._reads:
            self.update(read())
        self._readback.finish(self._marks[0], self._marks[-1])
