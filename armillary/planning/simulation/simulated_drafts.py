"""Speculative decoding in a simulation: the engine's own speculation decides how much is drafted, and each draft token
is accepted with a given probability; drafting and verifying take predicted times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from armillary.engine.scheduler.decision import Decision
from armillary.engine.speculative.draft_length import LengthController
from armillary.engine.speculative.speculation import Speculation
from armillary.engine.speculative.step_costs import StepCosts
from armillary.planning.simulation.step_cost import StepCost

if TYPE_CHECKING:
    from armillary.engine.scheduler.scheduler import Scheduler

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MOST_ROWS = 64
"""rows of a step, draft tokens included, where serve.max_running is less, as in engine/build_speculation.py"""
REJECTED = -7
"""a draft token that no row samples"""


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How drafts are made and judged."""

    acceptance: float
    """probability that a draft token is accepted, those before it being so"""
    most: int
    """draft tokens of a request per step"""
    verify_s: Mapping[int, float]
    """seconds of a step by its rows"""
    propose_s: Mapping[int, float] | None = None
    """seconds of a pass of the draft model by its rows; none: drafts are looked up, which takes no time"""

    def attach(self, scheduler: Scheduler) -> None:
        """Let a scheduler draft."""
        settings = scheduler.settings
        propose = None if self.propose_s is None else StepCosts(self.propose_s)
        scheduler.speculation = Speculation(
            LengthController(StepCosts(self.verify_s), propose, self.most),
            scheduler.cache,
            has_model=True,
            max_rows=min(settings.max_tokens_per_step, max(settings.max_running, _MOST_ROWS)),
            max_len=settings.max_model_len,
            totals=scheduler.totals,
        )

    def draft(self, decision: Decision, rng: Random) -> float:
        """Fill the drafts of a step with tokens that will be accepted up to a random one; the seconds that took."""
        for draft in decision.drafts:
            good = 0
            while good < draft.count and rng.random() < self.acceptance:
                good += 1
            draft.tokens = [draft.sequence.number] * good + [REJECTED] * (draft.count - good)
        if self.propose_s is None:
            return 0.0
        return max(draft.count for draft in decision.drafts) * StepCosts(self.propose_s).seconds(len(decision.drafts))


def drafting_of(acceptance: float, most: int, cost: StepCost, context: float, draft: StepCost | None) -> Drafting:
    """Times of sequences of about `context` tokens: by the model's step cost, and the draft model's."""

    def seconds(each: StepCost) -> dict[int, float]:
        return {rows: each.decode_seconds(rows, context) for rows in _SIZES}

    propose_s = None if draft is None else seconds(draft)
    return Drafting(acceptance=acceptance, most=most, verify_s=seconds(cost), propose_s=propose_s)
