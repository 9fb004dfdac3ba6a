"""Token budgets of a step: for prefill, where tokens late in a prompt cost more, and after a step found no memory.

A chunk of n tokens after p costs n·(1 + (p − A/4 + n/2)/A) tokens' worth, but n at least, A being the context at which
attention costs as much as the rest of the model. So a step's time stays about the same all along a long prompt, and
steps of short prompts are as full as they may be.
"""

from dataclasses import dataclass
from math import sqrt

from armillary.engine.scheduler.dp_pacing import DpPacing
from armillary.engine.scheduler.prefill_pacing import PrefillController
from armillary.engine.scheduler.settings import STREAMED_SLOWDOWN, Settings

FREE = 0.25  # fraction of A: context that is not counted


def chunk_cost(count: int, past: int, attention_tokens: float | None, free: float = FREE) -> float:
    """Cost of `count` tokens after `past` others, in tokens without a past."""
    if not attention_tokens:
        return float(count)
    return count * (1 + max(0.0, (past + count / 2) / attention_tokens - free))


def chunk_size(
    left: int,
    past: int,
    budget: float,
    block_tokens: int,
    attention_tokens: float | None,
    tile: int = 1,
    free: float = FREE,
) -> int:
    """Tokens of the `left` that the budget pays for, at least one. A chunk that does not end the prompt is a multiple
    of the query tile, which attention computes anyway, and ends with a block."""
    count = int(budget)
    if attention_tokens:
        linear = 1 + past / attention_tokens - free
        # n²/(2A) + n·linear = budget, in the form that does not cancel; more than the budget where all is free
        count = min(count, int(2 * budget / (linear + sqrt(linear * linear + 2 * budget / attention_tokens))))
    if count >= left:
        return left
    for unit in (tile, block_tokens):
        beyond = (past + count) % unit
        if not unit % block_tokens and count > beyond:
            return count - beyond
    return max(1, count)


@dataclass(kw_only=True, slots=True)
class Budget:
    """What a step may still prefill."""

    tokens: float  # tokens without a past that it pays for
    most: int  # most tokens, whatever they cost
    attention_tokens: float | None
    free: float = FREE
    least: int = 1
    """least tokens of the first chunk, whatever they cost: fewer would cost as much"""
    one_partial: bool = False
    """after the first chunk, only chunks that end their prompt are added: another partial chunk would cost tiles and
    padding of its own without an earlier first token"""
    _begun: bool = False

    @property
    def spent(self) -> bool:
        return self.tokens < 1 or self.most < 1

    def size(self, left: int, past: int, block_tokens: int, tile: int) -> int:
        """Tokens of a prompt's next chunk; 0 after the first where `one_partial` holds and the chunk would not end
        it."""
        count = chunk_size(left, past, self.tokens, block_tokens, self.attention_tokens, tile, self.free)
        if count > self.most:
            count = chunk_size(left, past, float(self.most), block_tokens, None, tile)
        count = min(count, int(self.tokens))
        if not self._begun:
            return max(count, min(left, self.least, self.most))
        return 0 if self.one_partial and count < left else count

    @property
    def is_paced(self) -> bool:
        """Whether the next chunk is the one whose time is limited."""
        return self.one_partial and not self._begun

    def close(self) -> None:
        """No more prefill in this step."""
        self.tokens = 0.0

    def pay(self, count: int, past: int) -> None:
        self.tokens -= chunk_cost(count, past, self.attention_tokens, self.free)
        self.most -= count
        self._begun = True


class PrefillPlanner:
    """Sizes the prefill of each step: what the step has left beside its decodes and, where a controller limits the time
    that prefill may add, what keeps that limit."""

    def __init__(self, settings: Settings, block_tokens: int) -> None:
        self._settings, self._block_tokens = settings, block_tokens
        slowdown = settings.prefill_slowdown
        self.controller: PrefillController | DpPacing | None = None if slowdown is None else self._controller(slowdown)
        self.gives_way = False  # no limit while more sequences wait for their first token than decode
        self.other_decodes = 0
        """sequences that decode and are not in this step: on other dp ranks, or in steps of other pipeline stages"""
        self.other_prompts = 0

    def _controller(self, slowdown: float) -> PrefillController:
        tile, block = self._settings.query_tile, self._block_tokens
        return PrefillController(slowdown, self._settings.attention_tokens, block if tile % block else tile)

    def stream(self) -> None:
        """Outputs are streamed from now on. Unless a recipe says how long prefill may delay decodes, steps are limited
        by the default, as long as no more sequences wait for their first token than decode: beyond that, the limit
        would cost throughput. Batches that are read when they are complete are faster without a limit."""
        if (
            self.controller is None
            and self._settings.prefill_tokens is None
            and self._settings.batching == "continuous"
        ):
            self.controller, self.gives_way = self._controller(STREAMED_SLOWDOWN), True

    def budget(self, left: int, decodes: int, prompts: int) -> Budget:
        """Of a step with so many decodes that has `left` tokens for so many prompts."""
        settings, every_decode = self._settings, decodes + self.other_decodes
        if every_decode and settings.prefill_tokens is not None:
            left = min(left, settings.prefill_tokens)
        gives_way = self.gives_way and prompts + self.other_prompts > every_decode
        if not every_decode or not prompts or self.controller is None or gives_way:
            return Budget(tokens=left, most=left, attention_tokens=settings.attention_tokens)
        usual = -(-every_decode // settings.num_stages)  # a step without decodes delays those of the next ones
        tokens, attention_tokens = self.controller.allowance(max(decodes, usual))
        return Budget(
            tokens=min(left, tokens),
            most=min(left, self.controller.most),
            attention_tokens=attention_tokens,
            free=0.0,
            least=settings.query_tile,
            one_partial=True,
        )

    def chunk_size(self, budget: Budget, decodes: int, left: int, past: int) -> int:
        """Tokens of the next chunk of a prompt with `left` tokens after `past` others: what the budget pays for, or the
        size that the controller has seen to keep the time limit. What the first chunk is denied goes to no other."""
        settings = self._settings
        count = min(budget.size(left, past, self._block_tokens, settings.query_tile), settings.max_chunk or left)
        if self.controller is None or not budget.is_paced or count >= left:
            return count
        allowed = self.controller.size(decodes, count, past, min(left - 1, budget.most))
        if allowed < count:
            budget.close()
        return allowed


_FIRST_STEPS, _MOST_STEPS = 32, 8192  # successful steps before a larger one is tried: at first, and at most


class StepLimit:
    """Most tokens of a step, decodes and prefill together. After a step that found no memory it is halved, and doubled
    again after so many successful steps; the number of steps doubles with every failure."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tokens = most
        self.next_decode = 0  # first decode of the next step, while not all of them fit
        self._patience, self._good = _FIRST_STEPS, 0

    @property
    def tight(self) -> bool:
        return self.tokens < self.most

    def failed(self, tokens: int) -> None:
        """A step of so many tokens found no memory."""
        self.tokens, self._good = max(1, tokens // 2), 0
        self._patience = min(_MOST_STEPS, 2 * self._patience)

    def went_well(self) -> None:
        self._good += 1
        if self._good >= self._patience:
            self.tokens, self._good = min(self.most, 2 * self.tokens), 0

    def reset(self) -> None:
        """The request that did not fit alone is gone: the others may fit together."""
        self.tokens, self._good = self.most, 0
