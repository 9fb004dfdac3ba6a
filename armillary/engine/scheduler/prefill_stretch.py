"""Steady prefill: runs of steps with the same decodes and chunks of one prompt, advanced without deciding each anew.

Under prefill pacing a prompt takes several steps, each sized by the times of those before, so they cannot be planned as
a whole like a decode stretch. What they have in common is kept here, the prefill planner sizes each chunk as it does
for the scheduler, and sequences and blocks are advanced once, by `close`. The slow reference is the loop itself
(tests/planning/simulation/test_simulated_replica.py compares them).
"""

from __future__ import annotations

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import PrefillChunk, StepWork
from armillary.engine.scheduler.decode_stretch import advance_decodes, has_blocks
from armillary.engine.scheduler.prefill_budget import Budget
from armillary.engine.scheduler.prefill_pacing import PrefillController
from armillary.engine.scheduler.scheduler import Scheduler

_LONGEST = 256
"""steps of a stretch, for whose blocks there must be memory"""


def prefill_stretch(scheduler: Scheduler, most: int) -> PrefillStretch | None:
    """A stretch of up to `most` steps, where the step in flight could be one of it; None where something else may
    happen in the next step."""
    under_way, controller = scheduler.under_way, scheduler.prefill.controller
    if len(under_way) != 1 or len(under_way[0].chunks) != 1 or scheduler.has_extras:
        return None
    in_flight = under_way[0]
    if in_flight.prefill_done or in_flight.last or not isinstance(controller, PrefillController):
        return None
    running = scheduler.request_table.running
    prompts = [seq for seq in running if seq.is_prefilling]
    decodes = [seq for seq in running if not seq.is_prefilling]
    if not prompts or not decodes or in_flight.decodes != decodes or any(seq.matching for seq in prompts):
        return None
    if in_flight.chunks[0].sequence is not prompts[0] or any(seq.constraint is not None for seq in decodes):
        return None
    steps = min(most, _LONGEST, min([seq.limit - 2 - seq.computed for seq in decodes]))
    prompt = prompts[0]
    if steps < 1 or not has_blocks(scheduler, decodes, steps, prompt.prefill_target - prompt.num_writable):
        return None
    return PrefillStretch(scheduler, controller, decodes, prompts, steps)


class PrefillStretch:
    """While it is open, its sequences are behind; everything else of the scheduler is as after each step."""

    def __init__(
        self,
        scheduler: Scheduler,
        controller: PrefillController,
        decodes: list[Sequence],
        prompts: list[Sequence],
        most: int,
    ) -> None:
        self._controller = controller
        self._scheduler, self._table, self._prefill = scheduler, scheduler.request_table, scheduler.prefill
        self._in_flight = scheduler.under_way[0]
        self._decodes, self._prompt, self._others = decodes, prompts[0], prompts[1:]
        self.num_decodes = len(decodes)
        self._num_drawn = len([seq for seq in decodes if seq.request.params.temperature])
        self._context = sum([seq.computed for seq in decodes]) + len(decodes)  # keys that the next step reads
        self._computed = self._prompt.computed
        self._size = 0  # of the chunk just decided
        self._most, self._steps = most, 0

    def decide(self) -> StepWork | None:
        """The work of the next step; None where that is not one of the stretch, and is left to the scheduler."""
        if self._steps >= self._most or self._table.deadlines.next() is not None:
            return None
        decodes, start = self.num_decodes, self._computed
        if self._controller.times_decodes(decodes):
            return None
        left = self._prompt.prefill_target - start
        num_prompts = 1 + len(self._others) + len(self._table.waiting)
        prefill = self._prefill
        budget = prefill.budget(self._scheduler.limit.tokens - decodes, decodes, num_prompts)
        if budget.spent:
            return None
        size = prefill.chunk_size(budget, decodes, left, start)
        if not 0 < size < left:
            return None
        if num_prompts > 1 and not self._others_wait(budget, size):
            return None
        self._size = size
        attention_pairs = size * (start + (size + 1) / 2)
        return StepWork(size, decodes, self._context, attention_pairs, 1, start, self._num_drawn)

    def _others_wait(self, budget: Budget, size: int) -> bool:
        """Whether what the first chunk leaves of the budget starts no other prompt."""
        budget.pay(size, self._computed)
        if budget.spent or not self._others:
            return budget.spent
        seq = self._others[0]
        return not self._prefill.chunk_size(budget, self.num_decodes, seq.prefill_target - seq.computed, seq.computed)

    def update(self, decided_at: float, now: float) -> None:
        """The step in flight has ended, and that of the last `decide` is in flight."""
        in_flight, prompt, size = self._in_flight, self._prompt, self._size
        self._scheduler.admission.begin_step(preempted=False)
        self._controller.took(in_flight, in_flight.decided_at, now)
        in_flight.decided_at, in_flight.admitted = decided_at, []
        in_flight.chunks = [PrefillChunk(prompt, prompt.row, self._computed, size, False)]
        self._computed += size
        self._context += self.num_decodes
        self._steps += 1

    def close(self) -> None:
        """Put the scheduler into the state that as many calls of `schedule` and `update` would leave."""
        steps, prompt, cache = self._steps, self._prompt, self._scheduler.cache
        if not steps:
            return
        advance_decodes(self._scheduler, self._decodes, steps)
        grown = cache.grow(prompt, self._computed)
        assert grown, "prefill_stretch has counted the blocks"
        prompt.computed, prompt.num_allocated = self._computed, 0
        prompt.num_visible = self._computed - self._size
