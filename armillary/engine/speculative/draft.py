"""Draft tokens of one sequence in one step, and what is known of a sequence's drafts so far.

A step computes a sequence's last token and its draft tokens as rows of their own, each with the past before it, and
samples a token for every one. A draft token is accepted where it equals the token that the row before it has sampled.
Every row is sampled with the request's parameters and the random number of its position, so the accepted tokens, and
the one after them, are exactly those that decoding one by one gives: greedy, sampled and seeded alike. A rejected
token leaves keys and values behind that the next step overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from armillary.engine.request.sequence import Sequence
from armillary.engine.speculative.prompt_lookup import PromptLookup

_PRIOR = 2.0  # tries that the mean of all sequences counts for in a sequence's own acceptance
_KEEP = 0.9  # decay of a sequence's older tries per step


class Draft:
    """Draft tokens of a sequence in a step."""

    __slots__ = ("at", "base", "computed", "count", "row", "sequence", "start", "tokens")

    def __init__(self, sequence: Sequence, base: int, start: int, count: int, tokens: list[int], computed: int) -> None:
        self.sequence = sequence
        self.row = sequence.row
        self.base = base  # index of the sequence's last token among the step's decodes
        self.at = -1  # index of the first draft token among them
        self.start = start  # position of the first draft token
        self.count = count
        self.tokens = tokens  # empty: the executor's draft model proposes them
        self.computed = computed  # tokens that the draft model has computed

    def accepted(self, sampled: Items[int]) -> list[int]:
        """Tokens that the sequence gets: the one after its last token, and one for each accepted draft token.
        `sampled` are those of the step's rows, in the order of their positions."""
        seq, out = self.sequence, [sampled[0]]
        for guess, following in zip(self.tokens, sampled[1:], strict=True):
            if out[-1] != guess or (guess in seq.stops and seq.num_output + len(out) >= seq.request.params.min_tokens):
                break
            out.append(following)
        return out


@dataclass(kw_only=True)
class DraftState:
    """A sequence's drafts so far."""

    lookup: PromptLookup | None = None
    proposal: list[int] = field(default_factory=list)  # by prompt lookup, for the tokens known so far
    proposed_at: int = -1  # how many those were
    computed: int = 0  # tokens whose keys and values the draft model has
    accepted: float = 0.0
    tried: float = 0.0

    def learn(self, accepted: int, tried: int) -> None:
        self.accepted = _KEEP * self.accepted + accepted
        self.tried = _KEEP * self.tried + tried

    def acceptance(self, mean: float) -> float:
        """Estimated probability that the next draft token is accepted, `mean` being that of all sequences."""
        return (self.accepted + _PRIOR * mean) / (self.tried + _PRIOR)
