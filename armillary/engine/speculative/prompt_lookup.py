"""Prompt lookup: the tokens that followed the last occurrence of a sequence's last tokens (Saxena, 2023).

Where an output repeats parts of its prompt, or itself, this proposes long drafts at the cost of a dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

_MOST = 32_768  # tokens of a prompt, its last, that are looked at
SIZES = (4, 2)  # tokens that must agree; the longer match is preferred


class PromptLookup:
    """Where each run of tokens of a sequence last ended."""

    __slots__ = ("_ends", "_upto")

    def __init__(self) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in SIZES]
        self._upto = 0  # runs that end before this position are known

    def propose(self, tokens: Items[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`, of which only the last are new since the call before. The last
        tokens themselves are found from the next call on."""
        self._learn(tokens)
        for size, ends in zip(SIZES, self._ends, strict=True):
            if (end := ends.get(tuple(tokens[-size:]))) is not None and len(tokens) > size:
                return _continued(tokens, end, most)
        return []

    def _learn(self, tokens: Items[int]) -> None:
        upto = len(tokens)
        begin = max(self._upto, upto - _MOST)
        for size, ends in zip(SIZES, self._ends, strict=True):
            for end in range(max(size, begin), upto):
                ends[tuple(tokens[end - size : end])] = end
        self._upto = max(self._upto, upto)


def _continued(tokens: Items[int], end: int, most: int) -> list[int]:
    """The `most` tokens after `end`; a repetition with a shorter period goes on."""
    period, following = len(tokens) - end, list(tokens[end : end + most])
    while 0 < len(following) < most:
        following.append(following[len(following) - period])
    return following
