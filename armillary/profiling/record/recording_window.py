"""The recorded window of a script's run: when it opens and closes, decided from the script's own steps.

A call of an optimiser's `step` ends a step of training; where there is none, a call that repeats without gradients is a
step of inference; where there is neither, the whole run is one step, up to a limit. torch allows one
recording at a time, of one thread: the thread that began it ends it, and it yields to the script's own profiler.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from armillary.profiling.record.child_processes import ChildProcesses
from armillary.profiling.record.step_detector import StepDetector
from armillary.profiling.record.trace_recorder import TraceRecorder, finish
from armillary.profiling.record.user_profiler import UserProfiler

SKIP, PLAIN = 2, 3
"""steps that do not count, then steps that are timed without the profiler"""
WHOLE_RUN_S = 30.0
"""longest recording of a script without steps"""


class RecordingWindow:
    """Follows the script's steps: skips, times, records, and tells `done` when it has what it needs."""

    def __init__(self, steps: int, done: Callable[[], None]) -> None:
        self.wanted = steps
        self.seen = 0
        self.plain: list[float] = []
        self.recorder: TraceRecorder | None = None
        self.finished = False
        self.lost = False
        """whether torch still records a thread that has ended or cannot be stopped from here"""
        self.script = StepDetector(ended=self._end_of_step, restart=self._restart, compiling=self._compiling)
        self.user_profiler = UserProfiler(self._yield_to_user)
        self.children = ChildProcesses()
        self._cold = TraceRecorder()
        self._in_cold = False
        self._done = done
        self._last = 0.0
        self._pid = os.getpid()
        self._signals = threading.RLock()

    def open(self) -> None:
        self.script.watch()
        self.user_profiler.watch()
        self.children.watch()
        os.register_at_fork(after_in_child=self._forget)
        with self.user_profiler.ours():
            self._cold.start()
        self._cold.begin_step()
        self._in_cold = True
        self._limit(WHOLE_RUN_S)

    def close(self) -> TraceRecorder:
        """The best recording there is: of warm steps, else of the run's beginning."""
        self._forget()
        if self.recorder is not None and self.recorder.running:
            self._stop()
        self._end_cold()
        return self.recorder if self.recorder is not None and self.recorder.steps else self._cold

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without the profiler."""
        return median(self.plain) if self.plain else None

    @property
    def own(self) -> bool:
        """Whether this process is the one that was opened, and not a fork of it."""
        return os.getpid() == self._pid

    def _forget(self) -> None:
        """Stop following the script, as in a forked child."""
        for watcher in (self.script, self.user_profiler, self.children):
            watcher.release()
        if not self.own:
            self._cold.drop_hooks()
            if self.recorder is not None:
                self.recorder.drop_hooks()

    # --- the script's own steps

    def _end_of_step(self, optimizer: Any) -> None:
        if self.finished or self._on_another_thread():
            return
        self.seen += 1
        self._end_cold()
        if self.recorder is not None:
            if optimizer is not None:
                self.recorder.optimizers.see(optimizer)
            self._next_recorded()
        elif self.user_profiler.running:
            self._last = 0.0
        elif self.seen >= SKIP:
            self._time_plain()
            if len(self.plain) >= PLAIN and not self._cold.running:
                self._start()

    def _on_another_thread(self) -> bool:
        return self.recorder is not None and self.recorder.thread != threading.get_ident()

    def _time_plain(self) -> None:
        finish()
        now = time.perf_counter()
        if self._last:
            self.plain.append(now - self._last)
        self._last = now

    def _start(self) -> None:
        self.recorder = TraceRecorder(hooks=not self.script.compiled)
        with self.user_profiler.ours():
            self.recorder.start()  # the step that follows pays what the first recorded one costs

    def _next_recorded(self) -> None:
        assert self.recorder is not None
        finish()
        self.recorder.end_step()
        if self.recorder.steps < self.wanted:
            self.recorder.begin_step()
        else:
            self._stop()
            self._done()

    def _stop(self) -> None:
        """End the recording; one of another thread cannot be ended, and is lost."""
        assert self.recorder is not None
        self.finished = True
        if self._on_another_thread():
            self.recorder.abandon()
            self.recorder, self.lost = None, True
            return
        with self.user_profiler.ours():
            self.recorder.stop()

    def _restart(self) -> None:
        """Start over: the calls so far were not the script's steps."""
        if self.finished:
            return
        self.seen, self.plain, self._last = 0, [], 0.0
        if self.recorder is not None:
            self._stop()
            self.recorder, self.finished = None, False

    def _compiling(self) -> None:
        """Steps before were eager, and the next ones compile: all of them are left out."""
        for recorder in (self._cold, self.recorder):
            if recorder is not None:
                recorder.drop_hooks()
        self._restart()

    def _yield_to_user(self) -> None:
        """The script starts its own profiler: our recording ends with what it has, or starts again later."""
        self._end_cold()
        if self.recorder is not None and self.recorder.running:
            self._stop()
            if self.recorder is not None and not self.recorder.steps:
                self.recorder, self.finished, self._last = None, False, 0.0

    # --- the beginning of the run

    def _end_cold(self) -> None:
        if not self._in_cold:
            return
        if threading.get_ident() != self._cold.thread:
            self._ask_main_thread()
            return
        self._in_cold = False
        self._limit(0.0)
        self._cold.end_step()
        with self.user_profiler.ours():
            self._cold.stop()

    def _limit(self, seconds: float) -> None:
        """End the recording of the beginning after a while; a script that uses the alarm itself keeps it."""
        if not hasattr(signal, "setitimer"):
            return
        with self._signals:
            if signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, self._alarm):
                signal.signal(signal.SIGALRM, self._alarm if seconds else signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, seconds)

    def _ask_main_thread(self) -> None:
        """Steps run on another thread than the recorded one, which has to stop the recording."""
        if not hasattr(signal, "pthread_kill"):
            return
        with self._signals:  # never while the handler is being taken away
            if signal.getsignal(signal.SIGALRM) == self._alarm:
                signal.pthread_kill(self._cold.thread, signal.SIGALRM)

    def _alarm(self, number: int, frame: object) -> None:
        self._end_cold()
