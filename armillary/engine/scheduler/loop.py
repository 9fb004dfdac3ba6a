"""The engine's loop: decide a step, run it, take its tokens. With overlap, the next is decided while one runs.

The executor is anything with `launch` (begin a step, give something to wait on) and `tokens` (wait for it): the model
on a device, a prediction on a virtual clock, or a stand-in in a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol, cast

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision, Outcome
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.step_estimate import StepTimes
from armillary.errors import ArmillaryError


class Executor(Protocol):
    """Does what decisions say, in the order they come."""

    def launch(self, decision: Decision) -> Any:
        """Begin a step; what `tokens` needs to wait for it. `StepTooLarge` where there is no memory for it."""

    def tokens(self, launched: Any) -> Items[int]:
        """Wait, and give the token drawn for each of `decision.sampling`; -1 where the numbers were of no use."""


class LateExecutor(Executor, Protocol):
    """One whose launched steps may be `late`: their tokens are drawn once those of the step before are known."""

    def draw(self, launched: Any) -> None:
        """Draw them."""


def _is_late(launched: Any) -> bool:
    """Whether tokens of a launched step are still to be drawn."""
    return getattr(launched, "late", False)


class StepFailed(ArmillaryError):
    """An executor could not do a step, but can do others; the message ends with the next step for a person."""


class StepTooLarge(StepFailed):
    """There was no memory for a step, and nothing of it was done; a smaller one may do."""


class Loop:
    """Scheduler and executor, one step at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.overlap = overlap
        self.clock = clock
        """what time it is; requests are submitted by the same one"""
        self.schedule_s = 0.0
        """what the last decision took"""
        self.launch_s = 0.0
        """what launching it took"""
        self.wait_s = 0.0
        """what the last step waited for the device"""
        self.taken: list[int] = []
        """numbers of the steps whose tokens it took"""
        self.times = StepTimes(scheduler.settings.attention_tokens)
        """how long steps take here"""
        self._launched: list[tuple[Decision, Any]] = []

    def step(self) -> tuple[Decision, Outcome]:
        """Decide and launch a step, then take the tokens of the one before (of the same one without overlap)."""
        self.wait_s, self.taken = 0.0, []
        decision = self._begin()
        while decision is None:
            decision = self._begin()
        waits = self.overlap and not decision.empty and len(self._launched) == 1
        outcome = Outcome([], [], []) if waits else self._collect()
        if self._launched and _is_late(self._launched[-1][1]):
            self._draw(decision)
        return decision, outcome

    def _begin(self) -> Decision | None:
        """Decide and launch; None where there was no memory for it, and the next will be smaller."""
        begin = self.clock()
        decision = self.scheduler.schedule(begin)
        decided = self.clock()
        self.schedule_s = decided - begin
        try:
            launched = None if decision.empty else self.executor.launch(decision)
            if _is_late(launched) and not (self.overlap and self._launched):
                cast(LateExecutor, self.executor).draw(launched)
        except StepTooLarge as error:
            self.scheduler.retreat(decision, begin, str(error))
            return None
        self._launched.append((decision, launched))
        self.launch_s = self.clock() - decided
        return decision

    def _draw(self, decision: Decision) -> None:
        """Draw tokens that depend on those that were just taken. Where there is no memory for that, nothing of the step
        counts."""
        try:
            cast(LateExecutor, self.executor).draw(self._launched[-1][1])
        except StepTooLarge as error:
            self._launched.pop()
            self.scheduler.retreat(decision, self.clock(), str(error))

    def fail(self, error: str) -> list[Sequence]:
        """The executor could not do a step: what was under way is over, the rest goes on with the next step."""
        self._launched.clear()
        return self.scheduler.fail(self.clock(), error)

    def _collect(self) -> Outcome:
        """Take what is back; with overlap, a step that computes stays under way."""
        keep = 1 if self.overlap and not self._launched[-1][0].empty else 0
        found = Outcome([], [], [])
        while len(self._launched) > keep:
            decision, launched = self._launched.pop(0)
            begin = self.clock()
            tokens = () if decision.empty else self.executor.tokens(launched)
            now = self.clock()
            self.wait_s += now - begin
            self.taken.append(decision.number)
            self.times.took(decision, now - decision.decided_at)
            outcome = self.scheduler.update(decision, tokens, now)
            found.sequences.extend(outcome.sequences)
            found.tokens.extend(outcome.tokens)
            found.finished.extend(outcome.finished)
        return found
