"""The engine's loop: schedule a step, launch it, take its tokens. With overlap, the next is scheduled while one runs;
with pipeline stages, while every other stage has one.

An executor has `launch` (start a step, return a handle) and `tokens` (wait for it): the model on a device, a predicted
device on a virtual clock, or a fake in a test.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any, Protocol, cast

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision, Outcome, joined
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.step_time import StepTimes
from armillary.errors import ArmillaryError


class Executor(Protocol):
    """Executes decisions in their order."""

    def launch(self, decision: Decision) -> Any:
        """Start a step; returns a handle for `tokens`. `StepTooLarge` where there is no memory for it."""

    def tokens(self, launched: Any) -> Items[int]:
        """Wait for a step; the token of each sequence of `decision.sampling`, -1 where its logits are not finite."""


class DeferredExecutor(Executor, Protocol):
    """An executor whose launched steps may be `unsampled` until the tokens of the step before are known."""

    def draw(self, launched: Any) -> None:
        """Sample such a step."""


def _is_unsampled(launched: Any) -> bool:
    """Whether a launched step is still to be sampled."""
    return getattr(launched, "unsampled", False)


class StepFailed(ArmillaryError):
    """An executor could not do a step but can do others; the message ends with what the user can do."""


class StepTooLarge(StepFailed):
    """There was no memory for a step, and nothing of it was done; a smaller one may fit."""


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
        self.clock = clock  # current time; requests are submitted by the same clock
        self.schedule_s = 0.0  # seconds of the last decision
        self.launch_s = 0.0
        self.wait_s = 0.0  # seconds that the last step waited for the device
        self.taken: list[int] = []  # numbers of the steps whose tokens the last step took
        self.times = StepTimes(scheduler.settings.attention_tokens)
        self._launched: list[tuple[Decision, Any]] = []
        self._num_stages = scheduler.settings.num_stages
        self._defers = hasattr(executor, "draw")

    def step(self) -> tuple[Decision, Outcome]:
        """Schedule and launch a step, then take the tokens of the one before (without overlap: of the same step). With
        stages, take those of the oldest step once as many are in flight, or where nothing can be scheduled."""
        self.wait_s, self.taken = 0.0, []
        ahead = self._num_ahead()
        before = self._collect(ahead) if len(self._launched) > ahead else None
        decision = self._begin()
        while decision is None:
            decision = self._begin()
        if decision.empty and self._num_stages > 1:
            self._take(*self._launched.pop())
            ahead = len(self._launched) - 1
        elif decision.empty:
            ahead = 0
        outcome = self._collect(ahead)
        if before is not None:
            outcome = joined(before, outcome)
        if self._defers and self._launched and _is_unsampled(self._launched[-1][1]):
            self._draw(decision)
        return decision, outcome

    def _num_ahead(self) -> int:
        """How many steps may be in flight while the next is decided. One that may have draft tokens follows known
        tokens; with stages every step does."""
        if self._num_stages > 1:
            return self._num_stages - 1
        speculation = self.scheduler.speculation
        return int(self.overlap and (speculation is None or not speculation.active))

    def _begin(self) -> Decision | None:
        """Schedule and launch; None where there was no memory: the next decision will be smaller."""
        begin = self.clock()
        decision = self.scheduler.schedule(begin)
        decided = self.clock()
        self.schedule_s = decided - begin
        try:
            launched = None if decision.empty else self.executor.launch(decision)
            if self._defers and _is_unsampled(launched) and not (self.overlap and self._launched):
                cast(DeferredExecutor, self.executor).draw(launched)
        except StepTooLarge as error:
            self.scheduler.retreat(decision, begin, str(error))
            return None
        self._launched.append((decision, launched))
        self.launch_s = self.clock() - decided
        return decision

    def _draw(self, decision: Decision) -> None:
        """Sample tokens that depend on those just taken. Where there is no memory for that, the step is rolled back."""
        try:
            cast(DeferredExecutor, self.executor).draw(self._launched[-1][1])
        except StepTooLarge as error:
            self._launched.pop()
            self.scheduler.retreat(decision, self.clock(), str(error))

    def fail(self, error: str) -> list[Sequence]:
        """The executor could not do a step: the sequences in flight end, the others continue with the next step."""
        self._launched.clear()
        return self.scheduler.fail(self.clock(), error)

    def _collect(self, num_in_flight: int) -> Outcome:
        """Take the tokens of launched steps but for the last `num_in_flight`."""
        collected = None
        while len(self._launched) > max(0, num_in_flight):
            outcome = self._take(*self._launched.pop(0))
            collected = outcome if collected is None else joined(collected, outcome)
        return Outcome([], [], []) if collected is None else collected

    def _take(self, decision: Decision, launched: Any) -> Outcome:
        """Take the tokens of a step."""
        begin = self.clock()
        tokens = () if decision.empty else self.executor.tokens(launched)
        now = self.clock()
        self.wait_s += now - begin
        self.taken.append(decision.number)
        self.times.took(decision, now - decision.decided_at)
        return self.scheduler.update(decision, tokens, now)
