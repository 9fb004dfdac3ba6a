"""Goodput: every second of a run, its restarts included, in one account that sums to 100 %, from its events.

Steps that were taken and later taken again, because a failure lost them, count as repeated; so does the time from the
last known step to a failure. Steps that a failed run has not taken again yet still count as useful.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from armillary.store.lease import NAME as LEASE
from armillary.store.lease import read_lease
from armillary.store.run_events import EventName, RunEvent, read_events
from armillary.store.runs import Run

Part = Literal[
    "useful",
    "repeated",
    "saving",
    "validation",
    "logging",
    "preparing",
    "loading",
    "exporting",
    "restarting",
    "waiting",
    "idle",
    "other",
]
PARTS: Mapping[Part, str] = {
    "useful": "useful steps",
    "repeated": "repeated steps",
    "saving": "checkpoint stalls",
    "validation": "validation",
    "logging": "logging between steps",
    "preparing": "preparing data",
    "loading": "loading",
    "exporting": "export",
    "restarting": "restarting",
    "waiting": "waiting for nodes",
    "idle": "idle",
    "other": "other",
}
JOB_PARTS: Mapping[str, tuple[Part, ...]] = {
    "data preparation": ("preparing",),
    "I/O": ("loading", "saving", "exporting"),
    "scheduling": ("restarting", "waiting"),
    "validation": ("validation",),
    "logging": ("logging",),
    "repeated steps": ("repeated",),
    "other": ("other",),
}
"""what a job does beside its steps, and the parts of the account in each; data preparation has the wait for batches,
too"""
_PART_OF: Mapping[EventName, Part] = {
    "created": "loading",
    "resumed": "loading",
    "loading": "loading",
    "validation": "validation",
    "saving": "saving",
    "exporting": "exporting",
    "restarting": "restarting",
    "waiting": "waiting",
    "failed": "idle",
    "stopped": "idle",
    "finished": "idle",
}
_ENDS = ("failed", "stopped", "finished")
_STARTS = ("created", "resumed", "restarting", "waiting")
"""events that the main rank's `loading` follows"""
_BY_A_SURVIVOR = ("steps", "validation", "saving", "exporting")
"""events that the main rank may still write after the launcher has seen another rank fail"""


@dataclass(frozen=True, kw_only=True)
class GoodputAccount:
    """Seconds of a run by what they were spent on."""

    seconds: Mapping[Part, float]
    data_wait_s: float = 0.0  # part of useful
    num_saves: int = 0
    num_failures: int = 0
    restart_s: float = 0.0  # from failures to the next step, without idle time

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def share(self, part: Part) -> float:
        return self.seconds[part] / self.total_s if self.total_s else 0.0

    @property
    def goodput_fraction(self) -> float:
        return self.share("useful")

    @property
    def save_s(self) -> float | None:
        """What a checkpoint costs; None where there was none."""
        return self.seconds["saving"] / self.num_saves if self.num_saves else None

    @property
    def mtbf_s(self) -> float | None:
        """Mean time between failures while it ran; None where nothing failed."""
        return (self.total_s - self.seconds["idle"]) / self.num_failures if self.num_failures else None

    def rows(self) -> list[tuple[str, float, float]]:
        """(name, seconds, share) of what took any time."""
        return [(text, self.seconds[part], self.share(part)) for part, text in PARTS.items() if self.seconds[part] > 0]

    def amdahl(self) -> list[tuple[str, float, float]]:
        """(name, share, speedup) of the whole job if that took no time: 1 / (1 − share), after Amdahl. Idle time, in
        which nothing ran, is no part of the job."""
        work_s = self.total_s - self.seconds["idle"]
        spent = {name: sum(self.seconds[part] for part in parts) for name, parts in JOB_PARTS.items()}
        spent["data preparation"] += self.data_wait_s
        spent["steps"] = self.seconds["useful"] - self.data_wait_s
        shares = {name: seconds / work_s for name, seconds in spent.items() if seconds > 0 and work_s > 0}
        rows = [(name, share, 1 / (1 - share) if share < 1 else float("inf")) for name, share in shares.items()]
        return sorted(rows, key=lambda row: -row[1])


@dataclass
class _Steps:
    """Steps [first, last) that took some time."""

    first: float
    last: float
    seconds: float
    data_wait_s: float


@dataclass
class _Ledger:
    """Adds up events in their order."""

    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    steps: list[_Steps] = field(default_factory=list)
    event: EventName | None = None
    since: float = 0.0
    step: float = 0.0
    num_saves: int = 0
    saved: float = -1.0  # step of the last one
    num_failures: int = 0
    restart_s: float = 0.0
    is_restart: bool = False  # a failure was the last, no step yet

    def add(self, event: RunEvent) -> None:
        now = event.time if self.event is None else max(event.time, self.since)  # a clock may be set back
        if self.event == "failed" and event.event in _BY_A_SURVIVOR:
            self._book("restarting", now - self.since)
            self.since = now
            return
        begin = now - max(0.0, event.number("preparing_s"))
        if self.event is not None:
            begin = max(self.since, begin)
            self._close(event, begin)
        self._book("preparing", now - begin)
        if event.event == "steps":
            self._rewind(event.number("step"))
            self.step, self.is_restart = event.number("step"), False
        if event.event == "saving" and event.number("step") != self.saved:  # a run that ends waits for its last one
            self.saved = event.number("step")
            self.num_saves += 1
        self.event, self.since = event.event, now

    def _close(self, event: RunEvent, now: float) -> None:
        """Book the time since the last event."""
        failed = self._is_failure(event.event)
        if failed and event.event in ("created", "resumed", "loading"):  # nobody noted when it died
            died = min(now, max(self.since, event.number("seen")))
            self._book("idle", now - died)
            now = died
        if self.event == "failed" and event.event in ("failed", "restarting", "waiting"):  # a survivor says it, too
            self._book("restarting", now - self.since)
        elif self.event == "steps":
            self._book_steps(event, now - self.since, lost=failed or "step" not in event.more)
        else:
            self._book(self._part, now - self.since)
        self.num_failures += failed
        self.is_restart = self.is_restart or failed

    def _is_failure(self, event: EventName) -> bool:
        if self.event in _ENDS or (self.event, event) == ("waiting", "restarting"):
            return False
        died = event == "loading" and self.event not in _STARTS
        return died or event in ("failed", "restarting", "created", "resumed")

    @property
    def _part(self) -> Part:
        return _PART_OF.get(self.event, "other") if self.event is not None else "other"

    def _book(self, part: Part, seconds: float) -> None:
        self.seconds[part] += seconds
        if self.is_restart and part in ("loading", "restarting", "waiting"):
            self.restart_s += seconds

    def _book_steps(self, event: RunEvent, span: float, *, lost: bool) -> None:
        """Time of the steps since the last event; without a complete one it is lost, or the run waited to stop."""
        if lost:
            return self._book("repeated", span)
        step = event.number("step")
        if step <= self.step:
            return self._book("other" if step == self.step else "repeated", span)
        logging_s = min(span, max(0.0, event.number("logging_s")))
        seconds = span - logging_s
        self._book("logging", logging_s)
        data_wait_s = min(seconds, max(0.0, event.number("data_wait_s")))
        self.steps.append(_Steps(self.step, step, seconds, data_wait_s))
        self.step = step

    def _rewind(self, step: float) -> None:
        """Steps from `step` on are taken again."""
        while self.steps and self.steps[-1].last > step:
            span = self.steps.pop()
            share = max(0.0, (step - span.first) / (span.last - span.first))
            self._book("repeated", (1 - share) * span.seconds)
            if share > 0:
                self.steps.append(_Steps(span.first, step, share * span.seconds, share * span.data_wait_s))

    def account(self) -> GoodputAccount:
        useful = sum(span.seconds for span in self.steps)
        return GoodputAccount(
            seconds=self.seconds | {"useful": self.seconds["useful"] + useful},
            data_wait_s=sum(span.data_wait_s for span in self.steps),
            num_saves=self.num_saves,
            num_failures=self.num_failures,
            restart_s=self.restart_s,
        )


def account_of(events: Sequence[RunEvent], *, now: float | None = None, died: bool = False) -> GoodputAccount:
    """The account up to the last event, or up to `now` for a run that goes on, or that `died` then."""
    ledger = _Ledger()
    for event in events:
        ledger.add(event)
    if now is not None and ledger.event is not None and ledger.event not in _ENDS:
        if died:
            ledger.add(RunEvent(time=now, event="failed"))
        elif ledger.event == "steps":
            ledger.seconds["useful"] += max(0.0, now - ledger.since)
        else:
            ledger._book(ledger._part, max(0.0, now - ledger.since))
    return ledger.account()


def account_of_run(run: Run, *, now: float) -> GoodputAccount | None:
    """The account of a run as it stands; None where it has no events."""
    events = read_events(run.folder)
    if not events:
        return None
    state = run.state.state
    if state == "running":
        return account_of(events, now=now)
    return account_of(events, now=last_seen(run) if state == "died" else None, died=state == "died")


def last_seen(run: Run) -> float:
    """When the process that owns the run last renewed its lease; 0 where it has none."""
    return (run.folder / LEASE).stat().st_mtime if read_lease(run.folder) is not None else 0.0
