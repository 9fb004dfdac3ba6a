"""How many tokens a step may have after one of them found no memory: half as many, and slowly more again.

Memory that others took may come back, so a larger step is tried after a while, and after twice as long each time that
it fails again.
"""

from __future__ import annotations

_FIRST_STEPS, _MOST_STEPS = 32, 8192
"""steps that have to go well before a larger one is tried: at first, and at most"""


class StepLimit:
    """Tokens of a step at most: those of decodes and of prompts together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self.next_decode = 0
        """where the decodes that go next begin, while not all of them fit a step"""
        self._patience, self._good = _FIRST_STEPS, 0

    @property
    def tight(self) -> bool:
        return self.tokens < self.most

    def failed(self, tokens: int) -> None:
        """A step of so many found no memory."""
        self.tokens, self._good = max(1, tokens // 2), 0
        self._patience = min(_MOST_STEPS, 2 * self._patience)

    def went_well(self) -> None:
        """A step was done."""
        self._good += 1
        if self._good >= self._patience:
            self.tokens, self._good = min(self.most, 2 * self.tokens), 0

    def reset(self) -> None:
        """Whoever did not fit alone is gone: the others may fit together."""
        self.tokens, self._good = self.most, 0
