"""Circuit breaker of a replica: after failures in a row it gets no requests, then a single trial, then all again."""

from __future__ import annotations

from dataclasses import dataclass

FAILURES = 3
"""failed requests in a row that open the circuit"""
FAILED_PROBES = 2
"""failed health checks in a row that open it"""
_FIRST_S, _MOST_S = 1.0, 30.0


@dataclass(slots=True)
class Breaker:
    """closed: requests pass; open: none do until `retry_at`, or, where health checks opened it, until one passes."""

    failures: int = 0
    failed_probes: int = 0
    opened: int = 0  # times in a row, without a success between
    retry_at: float | None = None  # none: closed
    trial: bool = False  # a request is testing an open circuit
    by_probe: bool = False  # it was opened by health checks, so that one which passes closes it

    def admits(self, now: float) -> bool:
        """Whether a request may go to the replica. No client has to try one that health checks took out: the next check
        does."""
        return self.retry_at is None or (not self.by_probe and now >= self.retry_at and not self.trial)

    def begin(self) -> bool:
        """A request goes to this replica; whether it is the trial of an open circuit."""
        self.trial = self.trial or self.retry_at is not None
        return self.retry_at is not None

    def succeeded(self) -> None:
        self.failures = self.failed_probes = self.opened = 0
        self.retry_at, self.trial, self.by_probe = None, False, False

    def failed(self, now: float) -> None:
        """A request failed. Those that were in flight when the circuit opened do not make its pause longer."""
        self.failures += 1
        is_due = self.failures >= FAILURES if self.retry_at is None else now >= self.retry_at
        if is_due:
            self._open(now)

    def trial_ended(self) -> None:
        """The trial is over, whether or not it said anything about the replica: another may follow."""
        self.trial = False

    def probe_passed(self, now: float) -> None:
        """Close a circuit that probes opened. One that failed requests opened closes when its time is over, and the
        next failure opens it for longer."""
        self.failed_probes = 0
        if self.by_probe:
            self.succeeded()
        elif self.retry_at is not None and now >= self.retry_at:
            self.retry_at, self.trial, self.failures = None, False, FAILURES - 1

    def probe_failed(self, now: float) -> None:
        self.failed_probes += 1
        if self.failed_probes >= FAILED_PROBES:
            self.by_probe = True
            self._open(now)

    def _open(self, now: float) -> None:
        self.trial = False
        self.retry_at = now + min(_MOST_S, _FIRST_S * 2**self.opened)
        self.opened = min(self.opened + 1, 10)
