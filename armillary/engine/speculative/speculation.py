"""Speculative decoding in the scheduler: adds draft tokens to a decided step, and takes those that are accepted.

Drafts follow known tokens, so a step with drafts is not decided while another is in flight. Requests with a structure,
and such as want a vector, have no drafts: their masks depend on every token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.request.counters import Totals
from armillary.engine.request.sequence import Sequence
from armillary.engine.speculative.draft import Draft, DraftState
from armillary.engine.speculative.draft_length import Candidate, LengthController
from armillary.engine.speculative.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from armillary.engine.scheduler.decision import Decision

_FIRST_MEAN = 0.7  # acceptance before the first draft: high enough that drafts are tried
_LEARN = 0.02  # weight of one step in the mean acceptance
_LOOKED_UP = 64  # most sequences of a step whose last tokens are looked up
_ASIDE = 16  # while drafts do not pay, two in so many steps look whether they would: one proposes, the next compares
_SPARE = 2  # free blocks per running sequence that drafts leave for tokens
_CAUGHT_UP = 4  # tokens of a draft model's first pass beyond which its time says nothing about other steps


class Speculation:
    """Drafts by prompt lookup, or by a model that the executor runs (`has_model`)."""

    def __init__(
        self,
        controller: LengthController,
        cache: KVCache,
        *,
        has_model: bool,
        lag: int = 0,
        max_rows: int,
        max_len: int,
        totals: Totals,
    ) -> None:
        """`lag`: as `DraftModel.lag`; `max_rows`: most rows of a step, draft tokens included; `max_len`: longest
        sequence with drafts."""
        self.controller, self._cache, self.totals = controller, cache, totals
        self._has_model, self._max_rows, self._max_len = has_model, max_rows, max_len
        self._lag, self._caught_up = lag, _CAUGHT_UP + lag * controller.most
        self.active = True  # whether the next step may have drafts: it is then decided when all tokens are known
        self._mean = _FIRST_MEAN
        self._next = 0  # where the next step's lookups begin
        self._last_end = float("-inf")

    # --- before a step

    def draft(self, decision: Decision, num_running: int, num_free_rows: int) -> None:
        """Add draft tokens to the decodes of a decision, `num_free_rows` at most."""
        num_free_rows = min(num_free_rows, self._max_rows - len(decision.decodes) - len(decision.chunks))
        decodes = len(decision.decodes)
        if not self.active or not decodes or num_free_rows <= 0:
            return
        eligible = [(base, seq, most) for base, seq in enumerate(decision.decodes) if (most := self._most(seq)) > 0]
        candidates = [self._candidate(seq, most) for _, seq, most in eligible]
        lengths = self.controller.lengths(decodes, candidates, num_free_rows)
        if not any(lengths):
            lengths = self.controller.trial(decodes, candidates, num_free_rows)
        spare = _SPARE * num_running * len(self._cache.groups)
        for (base, seq, _), length in zip(eligible, lengths, strict=True):
            if length and (count := self._fitting(seq, length, spare)):
                self._add(decision, base, seq, count)

    def _most(self, seq: Sequence) -> int:
        """Most draft tokens of a sequence: its limit, the draft model's, and what was found."""
        state, known = _state(seq), len(seq.tokens)
        if seq.constraint is not None or seq.long_rope or seq.computed != known or known <= self._lag:
            return 0
        most = min(self.controller.most, seq.limit - known - 1, self._max_len - known - 1)
        if self._has_model:
            return most
        return min(most, len(state.proposal)) if state.proposed_at == known else 0

    def _candidate(self, seq: Sequence, most: int) -> Candidate:
        state = _state(seq)
        missing = max(0, len(seq.tokens) - state.computed - 2) if self._has_model else 0
        return Candidate(state.acceptance(self._mean), most, missing, seq.limit - len(seq.tokens))

    def _fitting(self, seq: Sequence, length: int, spare: int) -> int:
        """Draft tokens that blocks are there for; nothing is preempted for them."""
        last = len(seq.tokens) - 1
        upto = last + 1 + length
        if upto > seq.num_writable and self._cache.pool.num_free > spare:
            seq.computed = last  # windows are freed by the first row of the step
            self._cache.grow(seq, upto)
            seq.computed = last + 1
        return max(0, min(length, seq.num_writable - last - 1))

    def _add(self, decision: Decision, base: int, seq: Sequence, count: int) -> None:
        state, start = _state(seq), len(seq.tokens)
        tokens = [] if self._has_model else state.proposal[:count]
        draft = Draft(seq, base, start, count, tokens, state.computed)
        draft.at = len(decision.decodes)
        decision.drafts.append(draft)
        decision.decodes += [seq] * count
        decision.positions += range(start, start + count)

    # --- after it

    def accept(self, decision: Decision, sampled: list[int]) -> tuple[list[Sequence], list[int]]:
        """The sequences that got a token, once per token, and their tokens: without what rejected rows sampled."""
        drafts, end = {draft.base: draft for draft in decision.drafts}, len(decision.decodes)
        sequences: list[Sequence] = []
        tokens: list[int] = []
        for base, seq in enumerate(decision.decodes[: decision.num_decodes]):
            draft = drafts.get(base)
            got = self._accepted(decision, draft, sampled) if draft and seq.finish is None else [sampled[base]]
            sequences += [seq] * len(got)
            tokens += got
        return sequences + decision.sampling[end:], tokens + sampled[end:]

    def _accepted(self, decision: Decision, draft: Draft, sampled: list[int]) -> list[int]:
        seq, state = draft.sequence, _state(draft.sequence)
        got = draft.accepted([sampled[draft.base], *sampled[draft.at : draft.at + draft.count]])
        accepted = len(got) - 1
        seq.computed += accepted
        del seq.logprobs[seq.num_output + len(got) :]
        if len(seq.tokens) + len(got) == seq.limit:
            decision.last.append(seq)
        # a head computes accepted tokens again, from the model's hidden states instead of its own
        state.computed = draft.start + (-self._lag if self._lag else min(accepted, draft.count - 1))
        self._learn(state, accepted, min(accepted + 1, draft.count))
        self.totals.drafted += draft.count
        self.totals.accepted += accepted
        return got

    def took(self, decision: Decision, sequences: list[Sequence], now: float) -> None:
        """A step has ended and its tokens are added to `sequences`."""
        seconds, self._last_end = now - max(decision.decided_at, self._last_end), now
        decodes, lengths = decision.num_decodes, [draft.count for draft in decision.drafts]
        caught_up = any(draft.start - draft.computed > self._caught_up for draft in decision.drafts) and self._has_model
        if decodes and not decision.chunks and seconds > 0:
            plain_s = self.controller.verify.seconds(decodes) * len(sequences) / decodes
            self.totals.speculated_s += seconds
            self.totals.plain_s += plain_s if lengths else seconds
            if not caught_up:
                self.controller.took(decodes, lengths, seconds)
        if self.active or self.totals.steps % _ASIDE < 2:
            if not self._has_model:
                self._look_up(decision, sequences)
            self._decide(decision)

    def _look_up(self, decision: Decision, sequences: list[Sequence]) -> None:
        """Look the last tokens of sequences up; where an earlier proposal was not used, it is compared with what came,
        so that acceptance is known without a draft."""
        unique = [seq for seq in dict.fromkeys(sequences) if seq.finish is None and seq.constraint is None]
        if len(unique) > _LOOKED_UP:
            self._next = self._next % len(unique)
            unique = (unique[self._next :] + unique[: self._next])[:_LOOKED_UP]
            self._next += _LOOKED_UP
        drafted = {id(draft.sequence) for draft in decision.drafts}
        for seq in unique:
            state = _state(seq)
            state.lookup = state.lookup or PromptLookup()
            if state.proposal and id(seq) not in drafted and state.proposed_at == len(seq.tokens) - 1:
                self._learn(state, int(state.proposal[0] == seq.tokens[-1]), 1)
            state.proposal, state.proposed_at = (
                state.lookup.propose(seq.tokens, self.controller.most),
                len(seq.tokens),
            )

    def _decide(self, decision: Decision) -> None:
        """Whether drafts may pay in the next step, by the likeliest of the sequences of this one."""
        decodes = len({id(seq) for seq in decision.sampling if seq.finish is None})
        states = [seq.draft for seq in decision.sampling if seq.finish is None and seq.draft is not None]
        if not self._has_model:
            states = [state for state in states if state.proposal]
        best = max((state.acceptance(self._mean) for state in states), default=self._mean if self._has_model else 0.0)
        self.active = not decodes or (
            decodes < self._max_rows and (self.controller.pays(decodes, best) or self.controller.may_try(decodes))
        )

    def _learn(self, state: DraftState, accepted: int, tried: int) -> None:
        state.learn(accepted, tried)
        self._mean += _LEARN * (accepted / tried - self._mean)


def _state(seq: Sequence) -> DraftState:
    if seq.draft is None:
        seq.draft = DraftState()
    return seq.draft
