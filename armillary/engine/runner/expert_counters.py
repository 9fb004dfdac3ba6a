"""How often each expert was chosen: counters on the device, and what the host knows of them."""

import math
import time
from typing import Any

import torch
from torch import Tensor

# L layers with experts, E experts of each

_COPY_S = 0.2  # between copies to the host


class ExpertCounters:
    """Copied behind a step now and then, so that nothing waits for them; empty for a model without experts."""

    def __init__(self, counts_LE: Tensor) -> None:
        self._counts_LE = counts_LE
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far, which served no request."""
        with torch.inference_mode():
            self._counts_LE.zero_()
        self.latest: Any = None  # array [L, E] on the host, as of the last copy
        self._copied_at, self._is_old = -math.inf, False

    def start_copy(self) -> Tensor | None:
        """A copy on the device for `arrived`; None where the last one is recent."""
        now = time.monotonic()
        self._is_old = self._counts_LE.numel() > 0 and now - self._copied_at < _COPY_S
        if not self._counts_LE.numel() or self._is_old:
            return None
        self._copied_at = now
        return self._counts_LE.clone()

    def arrived(self, counts_LE: Tensor | None) -> None:
        """The copy is on the host."""
        if counts_LE is not None:
            self.latest = counts_LE.numpy()

    def refresh(self) -> None:
        """Copy now; waits for the device, so it is for an idle one."""
        if self._is_old:
            self.latest, self._is_old = self._counts_LE.cpu().clone().numpy(), False
