"""The window of a script's run that is recorded: when it opens and closes, decided from the script's own steps.

A call of an optimiser's `step` ends a step of training; where there is none, a forward pass of an outermost module
without gradients is a step of inference; where there is neither, the whole run is one step, up to a limit.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from armillary.profiling.recorder import Recorder, finish

SKIP, PLAIN = 2, 3
"""steps that do not count, then steps that are timed without the profiler"""
WHOLE_RUN_S = 30.0
"""longest recording of a script without steps"""


class Window:
    """Follows the script's steps: skips, times, records, and tells `done` when it has what it needs."""

    def __init__(self, steps: int, done: Callable[[], None]) -> None:
        self.wanted = steps
        self.seen = 0
        self.plain: list[float] = []
        self.recorder: Recorder | None = None
        self.what = "run"
        """whose end is a step: optimizer step, forward pass, or the run"""
        self.finished = False
        self._cold = Recorder()
        self._done = done
        self._owner: Any = None
        self._forwards = 0
        self._depth = 0
        self._last = 0.0
        self._handles: list[Any] = []
        self._compile = torch.compile

    def open(self) -> None:
        self._handles = [
            optimizers.register_optimizer_step_post_hook(self._after_optimizer),
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(self._after_forward, always_call=True),
        ]
        torch.compile = self._compiling
        self._cold.start()
        self._cold.begin_step()
        self._limit(WHOLE_RUN_S)

    def close(self) -> Recorder:
        """The best recording there is: of warm steps, else of the run's beginning."""
        self._release(0)
        if self.recorder is not None and not self.finished:
            self._stop()
        if self.recorder is not None and self.recorder.steps:
            return self.recorder
        self._end_cold()
        return self._cold

    @property
    def plain_s(self) -> float | None:
        """Seconds of a step without the profiler."""
        return median(self.plain) if self.plain else None

    # --- the script's own steps

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Only the first optimiser ends steps: a script with two takes one step with both."""
        if self._owner is None or self.what == "forward":
            self._owner, self.what = optimizer, "optimizer"
            self.seen, self.plain = 0, []
        if optimizer is self._owner and not self.finished:
            self._end_of_step()

    def _before_forward(self, module: Any, inputs: Any) -> None:
        self._depth += 1

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and not torch.is_grad_enabled() and self._owner is None and not self.finished:
            self._forwards += 1
            if self._forwards > 1:  # one alone is a run, not a loop
                self.what = "forward"
                self._end_of_step()

    def _compiling(self, *args: Any, **kwargs: Any) -> Any:
        """torch.compile looks at hooks on all modules: they go, and only what it returns is followed."""
        self._release(1)
        made = self._compile(*args, **kwargs)
        if isinstance(made, torch.nn.Module):
            self._handles.append(made.register_forward_hook(self._after_forward))
        return made

    def _release(self, first: int) -> None:
        torch.compile = self._compile
        for handle in self._handles[first:]:
            handle.remove()
        del self._handles[first:]

    def _end_of_step(self) -> None:
        self.seen += 1
        if self.seen == 1:
            self._end_cold()
        if self.recorder is not None:
            self._next_recorded()
        elif self.seen >= SKIP + PLAIN:
            self._time_plain()
            self.recorder = Recorder()
            self.recorder.start()  # the step that follows pays what the first recorded one costs
        elif self.seen >= SKIP:
            self._time_plain()

    def _time_plain(self) -> None:
        finish()
        now = time.perf_counter()
        if self.seen > SKIP:
            self.plain.append(now - self._last)
        self._last = now

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
        assert self.recorder is not None
        self.finished = True
        self.recorder.stop()

    # --- the beginning of the run

    def _end_cold(self) -> None:
        if self._cold.running:
            self._limit(0.0)
            self._cold.end_step()
            self._cold.stop()

    def _limit(self, seconds: float) -> None:
        """End the recording of the beginning after a while; a script that uses the alarm itself keeps it."""
        if not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) not in (signal.SIG_DFL, self._alarm):
            return
        signal.signal(signal.SIGALRM, self._alarm if seconds else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _alarm(self, number: int, frame: object) -> None:
        self._end_cold()
