"""Draft lengths of a step: those with the most accepted tokens per second, none where drafts do not pay.

With B sequences, of which sequence i has d_i draft tokens and accepts each with probability a_i given those before it,

    tokens    B + Σ_i Σ_{j ≤ d_i} a_i^j
    seconds   verify(B + Σ_i d_i) + Σ_j propose(sequences with d_i ≥ j) + catching up of the draft model

Draft tokens are taken in the order of their probability; the prefix with the most tokens per second wins. As B grows,
a step's time grows with its rows and its drafts are worth less: lengths fall to zero.
"""

from __future__ import annotations

from typing import NamedTuple

from armillary.engine.speculative.step_costs import StepCosts

MARGIN = 1.03  # drafts must be expected to be so many times as fast: estimates of either side are off by some per cent
_FURTHER = 16  # draft tokens without a better rate after which no more are looked at
_TRIAL = 0.01
"""share of the time that trial drafts may cost: acceptance is unknown where nothing is drafted"""


class Candidate(NamedTuple):
    """A sequence that may have draft tokens."""

    acceptance: float
    most: int
    missing: int = 0  # tokens that the draft model has to catch up with
    left: int = 1  # most tokens still to come, which share the time of those


class LengthController:
    """Chooses draft lengths by measured costs."""

    def __init__(self, verify: StepCosts, propose: StepCosts | None, most: int) -> None:
        """`propose`: seconds of a pass of the draft model; None where drafts cost nothing."""
        self.verify, self.propose, self.most = verify, propose, most
        self._elapsed_s = self._trials_s = 0.0

    def pays(self, decodes: int, acceptance: float) -> bool:
        """Whether drafts may pay where no sequence accepts with a higher probability."""
        plain = MARGIN * self._rate(decodes, 0.0, [])
        return any(
            self._rate(decodes, drafted * _expected(acceptance, depth), [drafted] * depth) > plain
            for depth in range(1, self.most + 1)
            for drafted in {1, decodes}
        )

    def may_try(self, decodes: int) -> bool:
        """Whether a trial draft is due."""
        return self.propose is not None and self._trials_s + self._trial_cost(decodes, 0.0) <= _TRIAL * self._elapsed_s

    def _trial_cost(self, decodes: int, missing: float) -> float:
        return max(0.0, self._seconds(decodes + 1, [1], missing) - self.verify.seconds(decodes))

    def lengths(self, decodes: int, candidates: list[Candidate], num_free_rows: int) -> list[int]:
        """Draft tokens of each candidate, in a step of so many decodes with so many rows left."""
        lengths, best = [0] * len(candidates), [0] * len(candidates)
        if not candidates or num_free_rows <= 0:
            return best
        gains = sorted(
            ((each.acceptance**depth, i) for i, each in enumerate(candidates) for depth in range(1, each.most + 1)),
            key=lambda gain: -gain[0],
        )
        best_rate, tokens = MARGIN * self._rate(decodes, 0.0, []), 0.0
        depths: list[int] = []  # sequences with at least so many draft tokens
        missing, best_number = 0.0, 0
        for number, (gain, i) in enumerate(gains[:num_free_rows]):
            tokens += gain
            lengths[i] += 1
            if lengths[i] == 1:
                missing += candidates[i].missing / max(1, candidates[i].left)
            if lengths[i] > len(depths):
                depths.append(0)
            depths[lengths[i] - 1] += 1
            rate = self._rate(decodes, tokens, depths, missing)
            if rate > best_rate:
                best, best_rate, best_number = lengths.copy(), rate, number
            elif number > best_number + _FURTHER:
                break
        return best

    def trial(self, decodes: int, candidates: list[Candidate], num_free_rows: int) -> list[int]:
        """One draft token for the candidate with the least to catch up with, now and then, where none pays by what is
        known."""
        none = [0] * len(candidates)
        if self.propose is None or not candidates or num_free_rows <= 0:
            return none
        cheapest = max(range(len(candidates)), key=lambda i: (-candidates[i].missing, candidates[i].acceptance))
        cost = self._trial_cost(decodes, candidates[cheapest].missing)
        if self._trials_s + cost > _TRIAL * self._elapsed_s:
            return none
        self._trials_s += cost
        none[cheapest] = 1
        return none

    def expected_s(self, decodes: int, lengths: list[int]) -> float:
        """Expected seconds of a step with these draft lengths."""
        depths = [sum(length >= depth for length in lengths) for depth in range(1, max(lengths, default=0) + 1)]
        return self._seconds(decodes + sum(lengths), depths)

    def took(self, decodes: int, lengths: list[int], seconds: float) -> None:
        """A step without prefill has ended."""
        factor = seconds / max(1e-9, self.expected_s(decodes, lengths))
        self.verify.learn(decodes + sum(lengths), factor)
        if self.propose is not None and (any(lengths) or self.propose.is_relative):
            self.propose.learn(sum(length > 0 for length in lengths), factor)
        self._elapsed_s += seconds

    def _rate(self, decodes: int, extra: float, depths: list[int], missing: float = 0.0) -> float:
        return (decodes + extra) / self._seconds(decodes + sum(depths), depths, missing)

    def _seconds(self, rows: int, depths: list[int], missing: float = 0.0) -> float:
        seconds = self.verify.seconds(rows)
        if self.propose is not None and depths:
            seconds += sum(map(self.propose.seconds, depths))
            seconds += max(0.0, self.propose.seconds(depths[0] + round(missing)) - self.propose.seconds(depths[0]))
        return seconds


def _expected(acceptance: float, depth: int) -> float:
    """Accepted tokens of so many draft tokens."""
    return sum(acceptance**j for j in range(1, depth + 1))
