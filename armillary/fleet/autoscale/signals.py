"""What the autoscaler knows of a service at one time, and its averages over windows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from armillary.stats import Slope, fitted_slope


@dataclass(frozen=True, kw_only=True)
class Signals:
    """One look at a service. Counts are of all replicas together; latencies are of the time since the last look."""

    now: float
    """seconds, by any clock that does not jump"""
    ready: int
    """replicas that get requests"""
    starting: int = 0
    """replicas that are not ready yet"""
    arrived_per_s: float = 0.0
    """requests per second since the last look"""
    in_flight: int = 0
    """requests at replicas, those in their queues included"""
    waiting: int = 0
    """requests in the queues of replicas, and those that found none"""
    kv_used: float = 0.0
    """mean KV cache usage"""
    ttft_p99_s: float | None = None
    """none: no request had its first token"""
    itl_p99_s: float | None = None
    gpu_used: float | None = None
    """mean GPU utilisation: share of the time since the last look in which an engine step was running; none: not
    known"""

    @property
    def replicas(self) -> int:
        return self.ready + self.starting


class SignalHistory:
    """Signals of the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._signals: deque[Signals] = deque()

    def add(self, signals: Signals) -> None:
        self._signals.append(signals)
        while self._signals[0].now <= signals.now - self._length_s:
            self._signals.popleft()

    def since(self, begin: float) -> list[Signals]:
        return [signals for signals in self._signals if signals.now > begin]

    def mean(self, name: str, window_s: float) -> float:
        """Mean of a signal over the last `window_s` seconds; 0 where it was not known."""
        values = [getattr(each, name) for each in self.since(self._signals[-1].now - window_s)]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else 0.0

    def slope(self, name: str, window_s: float) -> Slope:
        """Growth of a signal per second, by linear regression over the window; 0 with fewer than four samples."""
        samples = self.since(self._signals[-1].now - window_s)
        values = [getattr(each, name) or 0.0 for each in samples]
        return fitted_slope([each.now for each in samples], values) if len(samples) > 3 else Slope(0.0, 0.0)
