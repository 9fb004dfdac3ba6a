"""An executor on a virtual clock: a step takes as long as a `StepCost` says, and gives each sequence its next token."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from random import Random
from typing import Any

import numpy as np

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision, StepWork
from armillary.planning.simulation.simulated_drafts import Drafting
from armillary.planning.simulation.step_cost import StepCost

STOP = 0
"""the end token; other tokens are request numbers"""


class Launched:
    """A step that was launched, and when it will be done."""

    __slots__ = ("decision", "done_at")

    def __init__(self, decision: Decision, done_at: float) -> None:
        self.decision, self.done_at = decision, done_at


class SimulatedDevice:
    """The device of one replica, `slowdown` times as slow as its step costs. With pipeline stages these are of one
    stage: a step takes as many of them, and the next may follow after one."""

    def __init__(
        self,
        cost: StepCost,
        *,
        seed: int = 0,
        overlap: bool = True,
        drafting: Drafting | None = None,
        num_stages: int = 1,
    ) -> None:
        self.now = 0.0
        self.slowdown = 1.0
        self.lengths: dict[str, int] = {}
        """request id -> output tokens, where they are fewer than the request's limit"""
        self.collected: Decision | None = None  # the step whose tokens were taken last
        self._cost, self._overlap, self._drafting = cost, overlap, drafting
        self._rng = Random(seed)
        self._num_stages = num_stages
        self._free_at = 0.0  # of the first stage
        self._done_at = [0.0] * num_stages  # when each stage has ended its last step
        self._last: Launched | None = None  # the step in flight

    @property
    def can_skip(self) -> bool:
        """Whether `durations` knows how its clock moves: a host that is busy all along decides no step ahead."""
        return self._cost.waits or not self._overlap

    def clock(self) -> float:
        return self.now

    def launch(self, decision: Decision) -> Launched:
        copied_s = self._cost.host_block_s * decision.num_host_blocks if decision.copies else 0.0
        taken = self._step_s(decision.work, copied_s)
        if decision.drafts:
            assert self._drafting is not None, "only a system that drafts has a scheduler that does"
            taken += self._drafting.draft(decision, self._rng) * self.slowdown
        self._last = Launched(decision, self._begin(taken))
        return self._last

    def _step_s(self, work: StepWork, copied_s: float = 0.0) -> float:
        cost = self._cost
        taken = cost.seconds(work) * self.slowdown
        if copied_s:
            taken += copied_s * self.slowdown
        if cost.noise.ratios:
            taken *= self._rng.choice(cost.noise.ratios_near(work.prefill_tokens > 0, taken))
        return taken

    def _begin(self, taken: float) -> float:
        """Start a step of so many seconds once the device is free; when its tokens will be there."""
        begin = max(self.now, self._free_at)
        self._free_at = begin + taken
        if not self._cost.waits:
            self.now = self._free_at
        return self._through(begin, taken)

    def _through(self, begin: float, taken: float) -> float:
        """When a step leaves the last stage; each computes it for `taken` seconds, once it has ended the one before."""
        if self._num_stages == 1:  # `begin` is when it was free
            self._done_at[0] = begin = begin + taken
            return begin
        for stage, busy_until in enumerate(self._done_at):
            begin = self._done_at[stage] = max(begin, busy_until) + taken
        return begin

    def tokens(self, launched: Launched) -> list[int]:
        self.now, self.collected = max(self.now, launched.done_at), launched.decision
        sampling = launched.decision.sampling
        if not self.lengths:
            return [seq.number for seq in sampling]
        rows = Counter[int]()  # of a sequence: several where it has draft tokens
        tokens = []
        for seq in sampling:
            rows[id(seq)] += 1
            tokens.append(STOP if self._ends(seq, rows[id(seq)]) else seq.number)
        return tokens

    def _ends(self, seq: Sequence, more: int) -> bool:
        length = self.lengths.get(seq.request.id)
        return length is not None and seq.num_output + more >= length

    # --- many steps, one after the other or at once

    def follow(self, work: StepWork) -> None:
        """Launch a step and take the tokens of the one before, as `launch` and `tokens` do; its decision is in
        flight."""
        last = self._last
        assert last is not None, "a step is in flight"
        done_at = self._begin(self._step_s(work))
        self.now = max(self.now, last.done_at)
        last.done_at = done_at

    def ends(self, running: list[Sequence], steps: int) -> list[float]:
        """When each of the next `steps` steps of decodes alone has given its tokens."""
        rows = len(running)
        context = sum([seq.computed for seq in running]) + rows
        drawn = len([seq for seq in running if seq.request.params.temperature])
        contexts: Any = np.arange(context, context + rows * steps, rows, dtype=np.float64)
        work = StepWork(decode_tokens=rows, context_tokens=contexts, drawn_tokens=drawn)
        taken = np.asarray(self._cost.seconds(work)) * self.slowdown  # to the bit as one by one
        ratios = self._cost.noise.ratios_near(False, taken[0])
        if ratios:
            taken = taken * np.array(self._rng.choices(ratios, k=steps))
        if self._overlap:  # the tokens of a step come while the next runs
            assert self._last is not None, "a step is in flight"
            return list(accumulate(taken.tolist(), initial=self._last.done_at))
        return list(accumulate(taken.tolist(), initial=self.now))[1:]

    def skip_to(self, ends: list[float], steps: int) -> None:
        """So many of those steps are over."""
        self.now = ends[steps - 1]
        self._free_at = ends[steps] if self._overlap else self.now
        if self._overlap:
            assert self._last is not None, "a step is in flight"
            self._last.done_at = self._free_at
        self._done_at = [self._free_at]
