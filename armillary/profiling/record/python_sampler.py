"""Sampling of Python stacks, about every millisecond, from a thread of its own.

torch's own stacks trace every call, which makes Python-heavy steps several times slower and names only the line a
function begins at; samples cost a few per cent and name the very line. `sample_events` turns them into trace events.
"""

import faulthandler
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

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
