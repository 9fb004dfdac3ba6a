"""The host events of a trace as a call tree, and the state of each thread over time.

A segment is an interval in which one event was the innermost on its thread. Segments of a thread do not overlap, so
sums over them count every moment once.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from armillary.profiling.trace.event_classes import MODULE, STEP, host_state
from armillary.profiling.trace.trace import ANNOTATION, HOST_KINDS, KINDS, OP, PYTHON, Array, Trace

STATES = ("annotation", "python", "op", "view", "code", "launch", "slow", "copy", "sync", "comm", "loader")
QUIET = 2
"""states below this index are neither torch nor the driver: Python runs"""
_INHERITED_STATES = ("sync", "comm", "loader")


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Segments of one thread, in order: the innermost event of each, and its state as an index into STATES."""

    start: Array
    end: Array
    event: Array
    state: Array

    def at(self, moment: float) -> int:
        """The innermost event at a moment, or -1."""
        index = int(np.searchsorted(self.end, moment, side="right"))
        inside = index < len(self.start) and self.start[index] <= moment
        return int(self.event[index]) if inside else -1


@dataclass(frozen=True, kw_only=True)
class Host:
    """The call tree; -1 stands for none."""

    trace: Trace
    parent: Array
    state: Array
    """index into STATES, -1: on the device"""
    op: Array
    """nearest operator, the event itself included; -1: none"""
    worker: Array
    """nearest operator whose work is known; -1: none"""
    module: Array
    """nearest Python event that is a module's call; -1: none"""
    self_s: Array
    """time without children"""
    threads: dict[int, Segments]

    @cached_property
    def main_thread(self) -> int | None:
        """The thread that runs the program: the one whose steps are marked, else the one with the most time in
        operators and driver calls, else in anything."""
        marked = self.trace.thread[steps_of(self.trace)]
        if len(marked) and int(marked[0]) in self.threads:
            return int(marked[0])
        busy = {thread: float((s.end - s.start)[s.state >= QUIET].sum()) for thread, s in self.threads.items()}
        return max(busy, key=lambda thread: busy[thread], default=None)

    def ancestors(self, event: int) -> Iterator[int]:
        """The event and what is around it, the innermost first."""
        while event >= 0:
            yield event
            event = int(self.parent[event])

    def where(self, event: int) -> str:
        """file:line of the user's code that led to an event, or '' where the trace has no stacks."""
        for around in self.ancestors(event):
            if self.trace.kind[around] == PYTHON and (line := source_line(self.trace.name_of(around))):
                return line
            detail = self.trace.detail[around]
            for frame in self.trace.details[detail].get("stack", "").split(";") if detail >= 0 else ():
                if line := source_line(frame.strip()):
                    return line
        return ""

    def at(self, thread: int, moment: float) -> int:
        """The innermost event of a thread at a moment, or -1."""
        return self.threads[thread].at(moment) if thread in self.threads else -1


def source_line(frame: str) -> str:
    """'train.py(88): step' -> 'train.py:88'; '' for frames of Python, torch or the profiler."""
    file, bracket, rest = frame.partition("(")
    number = rest.partition(")")[0]
    if not bracket or not number.isdigit() or not file.endswith(".py"):
        return ""
    foreign = (
        "torch/",
        "site-packages/",
        "dist-packages/",
        "<frozen",
        "lib/python",
        "torchinductor",
        "contextlib.py",
        "threading.py",
    )
    return "" if any(part in file for part in foreign) else f"{file}:{number}"


def read_host(trace: Trace, has_work: Array) -> Host:
    """The tree of all host threads; `has_work` says which events' work is known."""
    count = len(trace)
    names = ("parent", "op", "worker", "module")
    columns: dict[str, Array] = {name: np.full(count, -1, dtype=np.int32) for name in names}
    state: Array = np.full(count, -1, dtype=np.int8)
    self_s: Array = np.zeros(count)
    codes = state_codes(trace)
    on_host = np.isin(trace.kind, HOST_KINDS)
    modules = trace.matching(lambda name: name.startswith(MODULE)) & (trace.kind == PYTHON)
    threads = {}
    for thread in np.unique(trace.thread[on_host]):
        events = np.flatnonzero(on_host & (trace.thread == thread))
        segments = _sweep(trace, events, columns, state, codes, has_work, modules)
        np.add.at(self_s, segments.event, segments.end - segments.start)
        threads[int(thread)] = segments
    return Host(trace=trace, state=state, self_s=self_s, threads=threads, **columns)


def steps_of(trace: Trace) -> Array:
    return np.flatnonzero((trace.kind == ANNOTATION) & trace.matching(lambda name: name.startswith(STEP)))


def state_codes(trace: Trace) -> Array:
    """State of each event by itself; each (kind, name) is classified once."""
    keys, inverse = np.unique(trace.kind.astype(np.int64) << 32 | trace.name, return_inverse=True)
    table = [
        STATES.index(host_state(trace.names[key & 0xFFFFFFFF], KINDS[key >> 32])) if key >> 32 in HOST_KINDS else -1
        for key in keys.tolist()
    ]
    return np.array(table, dtype=np.int8)[inverse]


def _sweep(
    trace: Trace, events: Array, columns: dict[str, Array], state: Array, codes: Array, has_work: Array, modules: Array
) -> Segments:
    """One thread from left to right with a stack of what is open; a child that outlasts its parent is clipped there."""
    inherited = {STATES.index(name) for name in _INHERITED_STATES}
    starts, ends = trace.start[events].tolist(), trace.end[events].tolist()
    kinds, own, works = trace.kind[events].tolist(), codes[events].tolist(), has_work[events].tolist()
    is_module = modules[events].tolist()
    parent, op, worker, module, effective = ([-1] * len(events) for _ in range(5))
    seg_start, seg_end, seg_event = array("d"), array("d"), array("i")
    stack: list[int] = []
    cursor = 0.0

    def emit(event: int, until: float) -> None:
        if until > cursor:
            seg_start.append(cursor)
            seg_end.append(until)
            seg_event.append(event)

    for i, begin in enumerate(starts):
        while stack and ends[stack[-1]] <= begin:
            top = stack.pop()
            emit(top, ends[top])
            cursor = max(cursor, ends[top])
        top = stack[-1] if stack else -1
        if top >= 0:
            emit(top, begin)
            ends[i] = min(ends[i], ends[top])
        cursor = max(cursor, begin)
        parent[i] = top
        op[i] = i if kinds[i] == OP else op[top] if top >= 0 else -1
        worker[i] = i if works[i] else worker[top] if top >= 0 else -1
        module[i] = i if is_module[i] else module[top] if top >= 0 else -1
        effective[i] = effective[top] if top >= 0 and effective[top] in inherited else own[i]
        stack.append(i)
    while stack:
        top = stack.pop()
        emit(top, ends[top])
        cursor = max(cursor, ends[top])
    for name, values in (("parent", parent), ("op", op), ("worker", worker), ("module", module)):
        local = np.array(values, dtype=np.int64)
        columns[name][events] = np.where(local >= 0, events[local], -1)
    state[events] = effective
    local = np.array(seg_event, dtype=np.int64)
    return Segments(
        start=np.array(seg_start),
        end=np.array(seg_end),
        event=events[local],
        state=np.array(effective, dtype=np.int8)[local],
    )
