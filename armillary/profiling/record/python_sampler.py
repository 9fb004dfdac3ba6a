"""Sampling of Python stacks, about every millisecond, from a thread of its own; the samples become trace events.

torch's own stacks trace every call, which makes Python-heavy steps several times slower and names only the line a
function begins at; samples cost a few per cent and name the very line. A sample says where Python was at one moment;
drawn as an event it must not seem to hold, or be held by, operators whose times are exact. So it is clipped to the
interval between two exact events, and left out inside operators.
"""

import faulthandler
import os
import re
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Frame = tuple[str, int, str]
"""file, line, function"""

_EVERY_S = 0.001
_BUSY = 0.25
"""share of the time between two samples that another thread must have computed to be worth showing"""
_THREAD = re.compile(rb"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(rb'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of one thread's stack, the outermost frame first; the time is that of the trace's clock, since
    1970."""

    time_ns: int
    thread: int
    stack: tuple[Frame, ...]


class Sampler:
    """Samples the thread that started it, and other threads while they use a core.

    Stacks are dumped by faulthandler: frame objects of a thread that is just leaving a function crash Python 3.11.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self.every_s = every_s
        self._samples: list[tuple[int, int, dict[int, int]]] = []
        """when, where its dump ends, and the threads worth showing: Python's id -> the system's"""
        self._cpu_ns: dict[int, int] = {}
        self._dumps = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._text = b""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        main = threading.current_thread()
        self._thread = threading.Thread(target=self._run, args=(main,), name="armillary-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        with self._dumps:
            self._dumps.seek(0)
            self._text = self._dumps.read()

    def _run(self, main: threading.Thread) -> None:
        last = time.perf_counter_ns()
        while not self._stop.wait(self.every_s):
            now = time.perf_counter_ns()
            self._sample(main, now - last)
            last = now

    def _sample(self, main: threading.Thread, passed_ns: int) -> None:
        shown = {
            thread.ident: thread.native_id or 0
            for thread in threading.enumerate()
            if thread.ident and thread is not self._thread and (thread is main or self._computed(thread, passed_ns))
        }
        now, file = time.time_ns(), self._dumps.fileno()
        faulthandler.dump_traceback(file, all_threads=True)
        self._samples.append((now, os.lseek(file, 0, os.SEEK_CUR), shown))

    def _computed(self, thread: threading.Thread, passed_ns: int) -> bool:
        """Whether it used a core since the last sample; where the system cannot say, it counts as waiting."""
        assert thread.ident is not None
        if not hasattr(time, "pthread_getcpuclockid"):
            return False
        try:
            used = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
        except OSError:  # it ended meanwhile
            return False
        before = self._cpu_ns.get(thread.ident)
        self._cpu_ns[thread.ident] = used
        return before is not None and used - before >= _BUSY * passed_ns

    def samples(self) -> Iterator[Sample]:
        """What was seen, in the order of time."""
        begin = 0
        for time_ns, end, shown in self._samples:
            for thread, stack in _stacks(self._text[begin:end]):
                if thread in shown:
                    yield Sample(time_ns=time_ns, thread=shown[thread], stack=stack)
            begin = end


def _stacks(dump: bytes) -> Iterator[tuple[int, tuple[Frame, ...]]]:
    """(Python's id of the thread, stack) of each thread in a dump, which has the innermost frame first."""
    heads = list(_THREAD.finditer(dump))
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        frames = _FRAME.findall(dump, head.end(), following.start() if following else len(dump))
        yield (
            int(head.group(1), 16),
            tuple((file.decode(), int(line), name.decode()) for file, line, name in reversed(frames)),
        )


# --- trace events

_WAITS = (
    "aten::item",
    "aten::_local_scalar_dense",
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
)
"""calls in which Python waits: their line is worth knowing"""
_EXACT = ("cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver", "runtime")

_APART = 0.01
"""µs between neighbours, which rounding would otherwise put inside one another"""
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""frames of the recording itself are left out"""

Event = dict[str, Any]
Stretch = tuple[float, float]
SampledSpan = tuple[float, float, tuple[Frame, ...]]
"""start and end in µs, and the stack"""


def sample_events(samples: Iterable[Sample], exact: list[Event], base_ns: int, pid: int) -> list[Event]:
    """Trace events of the samples: a stack of frames for each interval that a sample represents."""
    threads = _by_thread(exact)
    free = {thread: free_stretches(events) for thread, events in threads.items()}
    events: list[Event] = []
    by_thread: dict[int, list[Sample]] = {}
    for sample in samples:
        by_thread.setdefault(sample.thread, []).append(sample)
    for thread, taken in by_thread.items():
        for start, end, stack in merged(placed(taken, free.get(thread), base_ns)):
            events += [_event(frame, start, end, thread, pid) for frame in stack if not frame[0].startswith(_OURS)]
    return events


def placed(samples: list[Sample], free: list[Stretch] | None, base_ns: int) -> Iterator[SampledSpan]:
    """(start, end, stack) in µs; the midpoint between two samples of one interval is the border."""
    times = [(sample.time_ns - base_ns) / 1e3 for sample in samples]
    starts = [start for start, _ in free] if free is not None else []
    for index, (at, sample) in enumerate(zip(times, samples, strict=True)):
        before = (times[index - 1] + at) / 2 if index else at - 500.0
        after = (at + times[index + 1]) / 2 if index + 1 < len(times) else at + 500.0
        if free is not None:
            number = bisect_right(starts, at) - 1
            if number < 0 or free[number][1] <= at:
                continue
            low, high = free[number]
            # the first and last sample of a stretch stand for all of it that lies outside the others
            before = low if not index or times[index - 1] < low else before
            after = high if index + 1 == len(times) or times[index + 1] >= high else after
        if after > before:
            yield before, after, sample.stack


def merged(stays: Iterable[SampledSpan]) -> Iterator[SampledSpan]:
    """Consecutive spans with the same stack, merged."""
    last: SampledSpan | None = None
    for stay in stays:
        if last is not None and last[1] == stay[0] and last[2] == stay[2]:
            last = (last[0], stay[1], stay[2])
            continue
        if last is not None:
            yield last
        last = stay
    if last is not None:
        yield last


def free_stretches(events: list[Event]) -> list[Stretch]:
    """Intervals of one thread between the borders of its events, without those inside operators."""
    events = sorted(events, key=lambda event: (event["ts"], -event["dur"]))
    stretches: list[Stretch] = []
    open_: list[tuple[float, bool]] = []
    cursor, allowed = float("-inf"), True

    def advance(until: float) -> None:
        nonlocal cursor
        if until > cursor and allowed and cursor > float("-inf"):
            stretches.append((cursor, until))
        cursor = max(cursor, until)

    for event in events:
        while open_ and open_[-1][0] <= event["ts"]:
            advance(open_[-1][0])
            open_.pop()
            allowed = open_[-1][1] if open_ else True
        advance(event["ts"])
        allowed = _python_may_stand_in(event, open_[-1][1] if open_ else True)
        open_.append((event["ts"] + event["dur"], allowed))
    while open_:
        advance(open_[-1][0])
        open_.pop()
        allowed = open_[-1][1] if open_ else True
    return stretches


def _python_may_stand_in(event: Mapping[str, Any], outside: bool) -> bool:
    if event["name"] in _WAITS:
        return True
    return outside and event["cat"] in ("user_annotation", "python_function")


def _by_thread(exact: list[Event]) -> dict[int, list[Event]]:
    threads: dict[int, list[Event]] = {}
    for event in exact:
        if event.get("ph") == "X" and event.get("cat") in _EXACT and isinstance(event.get("tid"), int):
            threads.setdefault(event["tid"], []).append(event)
    return threads


def _event(frame: Frame, start: float, end: float, thread: int, pid: int) -> Event:
    file, line, function = frame
    here = os.getcwd() + os.sep  # a path as the person who ran it would type it
    name = f"{file.removeprefix(here)}({line}): {function}"
    return {
        "ph": "X",
        "cat": "python_function",
        "name": name,
        "pid": pid,
        "tid": thread,
        "ts": start + _APART,
        "dur": max(0.0, end - start - 2 * _APART),
        "args": {"sampled": 1},
    }
