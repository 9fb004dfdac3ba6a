"""Why the device was idle: each idle interval is split by what the host did until the next launch.

The thread that made the next launch is examined. Short Python code between operators belongs to the launches it
prepares; longer than GLUE_S it is the program's own time. After a synchronisation the queue is empty, so
the time to refill it is charged to the synchronisation.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from armillary.profiling.profile import Cause, Gap
from armillary.profiling.trace.host_calls import QUIET, STATES, Host, Segments
from armillary.profiling.trace.intervals import covered_before, gaps_between, union
from armillary.profiling.trace.launch_correlation import Links
from armillary.profiling.trace.trace import Array, Trace

GLUE_S = 50e-6
"""Python between two operators; longer is the program's own time"""
_BETWEEN_KERNELS_S = 20e-6
"""longest delay between kernels of a device with work in its queue"""
_LATENCY_S = 200e-6
"""longest latency of a launch on an idle device: a graph is slower than a kernel"""
_SLOW_LAUNCH_S = 1e-3
"""a launch that takes longer loads its code or grows a pool first"""
_CPU_OP_S = 100e-6
"""an operator that launches nothing and takes longer computes on the host"""
SWITCH_S = (4.5e-3, 7e-3)
"""CPython hands the interpreter lock over every 5 ms: a thread that waits for a busy one waits about that long"""
_PART: dict[Cause, str] = {
    "launch": "launch_gap",
    "loader": "host",
    "gil": "host",
    "host": "host",
    "sync": "sync",
    "copy": "sync",
    "collective": "comm_exposed",
    "unrecorded": "unjudged",
    "unknown": "unknown",
}
CAUSE_OF_STATE: dict[str, Cause] = {
    "sync": "sync",
    "comm": "collective",
    "loader": "loader",
    "copy": "copy",
    "slow": "host",
}


@dataclass(slots=True)
class Stretch:
    """One idle interval and its causes."""

    start: float
    end: float
    causes: dict[tuple[str, Cause], float] = field(default_factory=dict)
    """(part of the budget, cause) -> seconds"""
    longest: dict[Cause, tuple[float, int]] = field(default_factory=dict)
    """cause -> the host's event that took most of it"""
    note: str = ""
    """text shown instead of an event"""

    def add(self, cause: Cause, seconds: float, event: int = -1, part: str = "") -> None:
        if seconds > 0:
            key = (part or _PART[cause], cause)
            self.causes[key] = self.causes.get(key, 0.0) + seconds
            if event >= 0 and seconds > self.longest.get(cause, (0.0, -1))[0]:
                self.longest[cause] = (seconds, event)

    def event_of(self, cause: Cause) -> int:
        """The host's event behind most of it, or -1."""
        return self.longest.get(cause, (0.0, -1))[1]


def idle_stretches(trace: Trace, host: Host, links: Links, device: Array, window: tuple[float, float]) -> list[Stretch]:
    """Intervals in which none of the `device` events ran, each with its causes."""
    starts, ends = gaps_between(trace.start[device], trace.end[device], *window)
    ordered = device[np.argsort(trace.start[device], kind="stable")]
    begins = trace.start[ordered]
    causes = _IdleCauses(trace, host, links)
    stretches = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        index = int(np.searchsorted(begins, end, side="left"))
        following = int(ordered[index]) if index < len(ordered) else -1
        before = int(ordered[index - 1]) if index else -1
        stretch = Stretch(start, end)
        causes.attribute(stretch, before, following)
        stretches.append(stretch)
    return stretches


@dataclass
class _IdleCauses:
    trace: Trace
    host: Host
    links: Links
    syncs: dict[int, tuple[Array, Array]] = field(default_factory=dict)

    def attribute(self, stretch: Stretch, before: int, following: int) -> None:
        launch = int(self.links.launch[following]) if following >= 0 else -1
        if launch < 0:
            if self.host.main_thread is None:
                stretch.add("unknown", stretch.end - stretch.start)
            else:
                self._host(stretch, self.host.main_thread, stretch.start, stretch.end)
            return
        called, returned = float(self.trace.start[launch]), float(self.trace.end[launch])
        if self.links.graph[following] and before >= 0 and self.links.launch[before] == launch:
            stretch.note = "between kernels of a CUDA graph"
            stretch.add("launch", stretch.end - stretch.start, part="idle")
        elif called <= stretch.start:
            self._queued(stretch, stretch.start, launch, returned)
        else:
            at = min(called, stretch.end)
            self._host(stretch, int(self.trace.thread[launch]), stretch.start, at)
            self._queued(stretch, at, launch, returned, fresh=True)

    def _queued(self, stretch: Stretch, since: float, launch: int, returned: float, *, fresh: bool = False) -> None:
        """From the launch to the start: the call itself (beyond _SLOW_LAUNCH_S it loads code), the launch latency, and
        then a wait for a copy of some thread. A queue that still does not move waits for work that the trace does not
        have: of before the recording, of another device or rank, or left out of the file."""
        call_s = max(0.0, min(returned, stretch.end) - since)
        copying = STATES[self.host.state[launch]] == "copy"
        stretch.add("copy" if copying else "host" if call_s > _SLOW_LAUNCH_S else "launch", call_s, launch)
        rest = stretch.end - since - call_s
        latency = min(rest, _LATENCY_S if fresh else _BETWEEN_KERNELS_S)
        if fresh or call_s or rest <= _BETWEEN_KERNELS_S:
            stretch.add("launch", latency, launch, part="launch_gap" if fresh or call_s else "idle")
            rest -= latency
        if rest <= 0:
            return
        edges = covered_before(*self._copies, np.array([stretch.end - rest, stretch.end]))
        copies = float(edges[1] - edges[0])
        stretch.add("copy", copies, launch)
        stretch.add("unrecorded", rest - copies)
        if rest - copies > _BETWEEN_KERNELS_S:
            stretch.note = "queued behind work that the trace does not have"

    @cached_property
    def _copies(self) -> tuple[Array, Array]:
        """Intervals in which any thread copies from or to pageable memory."""
        events = np.flatnonzero(self.host.state == STATES.index("copy"))
        return union(self.trace.start[events], self.trace.end[events])

    def _host(self, stretch: Stretch, thread: int, low: float, high: float) -> None:
        own = Stretch(low, high)
        charge(own, self.host.threads.get(thread), low, high)
        after_sync = self._after_sync(thread, low, high)
        for (part, cause), seconds in own.causes.items():
            if cause == "launch" and after_sync >= 0:
                stretch.add("sync", seconds, after_sync)
            else:
                stretch.add(cause, seconds, own.event_of(cause), part)

    def _after_sync(self, thread: int, low: float, high: float) -> int:
        """The synchronisation that emptied the queue before or within [low, high], or -1."""
        if thread not in self.syncs:
            events = np.flatnonzero((self.trace.thread == thread) & (self.host.state == STATES.index("sync")))
            ends = self.trace.end[events]
            order = np.argsort(ends, kind="stable")
            self.syncs[thread] = (events[order], ends[order])
        events, ends = self.syncs[thread]
        index = int(np.searchsorted(ends, high, side="right")) - 1
        return int(events[index]) if index >= 0 and ends[index] >= low - _BETWEEN_KERNELS_S else -1


def charge(stretch: Stretch, segments: Segments | None, low: float, high: float) -> None:
    """Split [low, high] by what one thread did."""
    if segments is None or high <= low:
        stretch.add("unknown", max(0.0, high - low))
        return
    first = int(np.searchsorted(segments.end, low, side="right"))
    last = int(np.searchsorted(segments.start, high, side="left"))
    quiet_from = low
    for index in range(first, last):
        if segments.state[index] < QUIET:
            continue
        begin, end = max(low, float(segments.start[index])), min(high, float(segments.end[index]))
        _quiet(stretch, segments, quiet_from, begin)
        state, seconds = STATES[segments.state[index]], end - begin
        computes = state in ("op", "code") and seconds > _CPU_OP_S
        cause = CAUSE_OF_STATE.get(state, "host" if computes else "launch")
        stretch.add(cause, seconds, int(segments.event[index]))
        quiet_from = end
    _quiet(stretch, segments, quiet_from, high)


def _quiet(stretch: Stretch, segments: Segments, low: float, high: float) -> None:
    is_glue = high - low <= GLUE_S
    stretch.add("launch" if is_glue else "host", high - low, -1 if is_glue else segments.at((low + high) / 2))


# --- for people


def as_gaps(stretches: list[Stretch], host: Host, window: tuple[float, float], most: int = 200) -> tuple[Gap, ...]:
    """The longest, each with its main cause and the line that caused it."""
    gil = gil_waits(stretches, host)
    longest = sorted((s for s in stretches if s.causes), key=lambda s: s.start - s.end)[:most]
    return tuple(_as_gap(stretch, host, window[0], gil) for stretch in longest)


def _as_gap(stretch: Stretch, host: Host, origin: float, gil: bool) -> Gap:
    _, cause = max(stretch.causes, key=lambda both: stretch.causes[both])
    if cause == "host" and gil and SWITCH_S[0] <= stretch.end - stretch.start <= 3 * SWITCH_S[1]:
        cause = "gil"
    event = stretch.event_of("host" if cause == "gil" else cause)
    what = stretch.note or (_host_call(host, event) if event >= 0 else "Python")
    return Gap(
        start_s=stretch.start - origin,
        seconds=stretch.end - stretch.start,
        cause=cause,
        what=what,
        where=host.where(event) if event >= 0 else "",
    )


def _host_call(host: Host, event: int) -> str:
    """The operator around a driver's call, or the call itself."""
    op = int(host.op[event])
    for around in host.ancestors(op):
        if STATES[host.state[around]] == "sync" and host.trace.name_of(around) == "aten::item":
            return "aten::item"
    return host.trace.name_of(op if op >= 0 else event)


def gil_waits(stretches: list[Stretch], host: Host) -> bool:
    """Whether the host's intervals look like waits for the interpreter lock: another thread was seen computing in
    Python during most of them, or there are many, all of about the switch interval, and most of the host's time."""
    waits = [s for s in stretches if s.causes.get(("host", "host"), 0.0) > GLUE_S]
    seconds = [s.causes[("host", "host")] for s in waits]
    typical = [length for length in seconds if SWITCH_S[0] <= length <= SWITCH_S[1]]
    if len(typical) >= 5 and sum(typical) > 0.5 * sum(seconds):
        return True
    taken = sum(_others_computed(host, s.start, s.end) for s in waits if s.end - s.start >= SWITCH_S[0] / 2)
    return len(waits) >= 5 and taken > 0.5 * sum(seconds)


def _others_computed(host: Host, low: float, high: float) -> float:
    """Seconds of an interval in which a thread other than the main one ran Python code."""
    most = 0.0
    for thread, segments in host.threads.items():
        if thread == host.main_thread:
            continue
        first, last = np.searchsorted(segments.end, low, side="right"), np.searchsorted(segments.start, high)
        in_python = [i for i in range(first, last) if _runs_python(host, int(segments.event[i]))]
        most = max(most, sum(min(high, segments.end[i]) - max(low, segments.start[i]) for i in in_python))
    return float(most)


def _runs_python(host: Host, event: int) -> bool:
    """Whether a thread runs Python code and is not inside a call of C, where it may wait."""
    return ".py(" in host.trace.name_of(event) and bool(host.where(event))
