"""A training run over weeks on a virtual clock: steps, checkpoints, failures, stragglers, restarts.

Devices fail, and become slow, independently at constant rates (exponential times); a failure loses the steps since the
last checkpoint and may also strike a checkpoint or a restart. Without stragglers the mean goodput is Daly's formula
(planning/cost/failures.py), which a test holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from random import Random
from typing import Literal, NamedTuple

What = Literal["training", "checkpoint", "restart"]


class Span(NamedTuple):
    """A time of the run in which one thing went on."""

    what: What
    begin_s: float
    end_s: float
    steps: int
    """that it added: negative where a failure took them back"""
    slow: bool = False
    """a device was slow"""


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """Times of a run."""

    step_s: float
    slow_step_s: float
    """with one slow device"""
    steps: int
    interval_steps: int
    """between checkpoints"""
    checkpoint_s: float
    restart_s: float
    mtbf_s: float
    """between failures of any device"""
    straggler_mtbf_s: float = inf
    straggler_s: float = 0.0
    """until a slow device is found and replaced"""
    longest_s: float = inf
    """the run is played through so far at most"""


@dataclass(kw_only=True)
class TrainingRun:
    """What happened."""

    case: TrainingCase
    spans: list[Span] = field(default_factory=list, repr=False)
    failures: int = 0
    stragglers: int = 0
    now_s: float = 0.0
    steps: int = 0

    @property
    def goodput_fraction(self) -> float:
        """Time of the steps that were kept, at full speed, over all time."""
        return self.steps * self.case.step_s / self.now_s if self.now_s else 1.0

    def lost(self) -> dict[str, float]:
        """Shares of the time: checkpoints, restarts, slow devices, repeated steps; with the goodput they are 1."""
        total = max(self.now_s, 1e-12)
        slow_s = sum(span.end_s - span.begin_s for span in self.spans if span.slow)
        lost = {
            "checkpoints": self._spent("checkpoint") / total,
            "restarts": self._spent("restart") / total,
            "stragglers": slow_s * (1 - self.case.step_s / self.case.slow_step_s) / total,
        }
        return lost | {"repeated": max(0.0, 1.0 - self.goodput_fraction - sum(lost.values()))}

    def _spent(self, what: What) -> float:
        return sum(span.end_s - span.begin_s for span in self.spans if span.what == what)


class SimulatedTraining:
    """One run; make a new one for the next."""

    def __init__(self, case: TrainingCase, *, seed: int = 0) -> None:
        self._case, self._rng, self._run = case, Random(f"training {seed}"), TrainingRun(case=case)
        self._saved = 0
        self._fails_at = self._draw(case.mtbf_s)
        self._slows_at = self._draw(case.straggler_mtbf_s)
        self._found_at = inf  # the slow device

    def run(self) -> TrainingRun:
        """Until the last step, or the longest time."""
        run, case = self._run, self._case
        while run.steps < case.steps and run.now_s < case.longest_s:
            if not self._train():
                continue
            if run.steps < case.steps:
                self._checkpoint()
            else:
                break
        return run

    def _draw(self, mean_s: float) -> float:
        return self._run.now_s + self._rng.expovariate(1 / mean_s) if mean_s < inf else inf

    def _train(self) -> bool:
        """Steps to the next checkpoint; False where something came in between."""
        run, case = self._run, self._case
        left = min(case.interval_steps - (run.steps - self._saved), case.steps - run.steps)
        slow = self._found_at < inf
        step_s = case.slow_step_s if slow else case.step_s
        stops_at = min(self._fails_at, self._found_at, self._slows_at if not slow else inf, case.longest_s)
        begin, done = run.now_s, left
        if begin + left * step_s > stops_at:
            done = max(0, int((stops_at - begin) / step_s))
        completes = done == left
        run.now_s = begin + left * step_s if completes else max(begin, stops_at)
        run.steps += done
        run.spans.append(Span("training", begin, run.now_s, done, slow))
        if completes:
            return True
        if stops_at == self._fails_at:
            self._fail()
        elif stops_at == self._found_at:
            self._found_at = inf
            self._slows_at = self._draw(case.straggler_mtbf_s)
            self._restart()
        elif stops_at == self._slows_at:
            run.stragglers += 1
            self._slows_at, self._found_at = inf, run.now_s + case.straggler_s
        return False

    def _checkpoint(self) -> None:
        run, begin = self._run, self._run.now_s
        if begin + self._case.checkpoint_s > self._fails_at:
            run.now_s = self._fails_at
            run.spans.append(Span("checkpoint", begin, run.now_s, 0))
            self._fail()
        else:
            run.now_s = begin + self._case.checkpoint_s
            run.spans.append(Span("checkpoint", begin, run.now_s, 0))
            self._saved = run.steps

    def _fail(self) -> None:
        self._run.failures += 1
        self._fails_at = self._draw(self._case.mtbf_s)
        self._restart()

    def _restart(self) -> None:
        """From the last checkpoint; a failure in between begins it again. A slow device stays slow."""
        run, begin = self._run, self._run.now_s
        lost, run.steps = run.steps - self._saved, self._saved
        while begin + self._case.restart_s > self._fails_at:
            begin = self._fails_at
            run.failures += 1
            self._fails_at = begin + self._rng.expovariate(1 / self._case.mtbf_s)
        end = begin + self._case.restart_s
        run.spans.append(Span("restart", run.now_s, end, -lost))
        run.now_s = end
        if self._slows_at < end:  # nobody trains meanwhile
            self._slows_at = self._draw(self._case.straggler_mtbf_s)


def interval_steps(interval_s: float, step_s: float) -> int:
    """Whole steps of about so many seconds."""
    return max(1, ceil(interval_s / step_s - 0.5))
