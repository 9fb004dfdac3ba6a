"""Pacing of prefill with data-parallel attention: one controller for all dp ranks, since their steps last equally long.

It learns from the tokens of all ranks together, which the experts get in any case. What it allows is divided evenly
over the ranks that have prompts.
"""

from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.prefill_pacing import PrefillController


class DpPacing:
    """The controller as the planner of each rank sees it."""

    def __init__(self, controller: PrefillController) -> None:
        self.controller = controller
        self._decodes, self._parts = 0, 1
        self._allowed: tuple[float, float | None] | None = None  # in this step; None: no rank has asked yet

    def begin_step(self, decodes: int, ranks_with_prompts: int) -> None:
        """All ranks decode so many sequences, and so many of the ranks have prompts."""
        self._decodes, self._parts, self._allowed = decodes, max(1, ranks_with_prompts), None

    def allowance(self, rows: int) -> tuple[float, float | None]:
        """As `PrefillController.allowance`, of one rank; `rows` are all ranks'."""
        if self._allowed is None:
            self._allowed = self.controller.allowance(self._decodes)
        tokens, attention_tokens = self._allowed
        return tokens / self._parts, attention_tokens

    @property
    def most(self) -> int:
        return max(1, self.controller.most // self._parts)

    def size(self, rows: int, count: int, past: int, most: int) -> int:
        """Sizes are measured with one chunk in a step."""
        return self.controller.size(self._decodes, count, past, most) if self._parts == 1 else count

    def took(self, decision: Decision, begun: float, now: float) -> None:
        """A rank's part says nothing: the controller gets the steps of all ranks together."""

    def took_decodes(self, rows: int, seconds: list[float], now: float) -> None:
        raise AssertionError("steps of several dp ranks are not skipped")
