"""How much of a prompt a step takes: a budget in tokens, of which late tokens use more.

A chunk of n tokens after p costs n·(1 + (p − A/4 + n/2)/A) tokens' worth, but n at least, A being the context at which
attention costs as much as the rest of the model. So a step's time stays about the same all along a long prompt, and
steps of short prompts are as full as they may be.
"""

from __future__ import annotations

from math import sqrt

_FREE = 0.25
"""of A: a context that is not counted"""


def chunk_cost(count: int, past: int, attention_tokens: float | None) -> float:
    """What `count` tokens after `past` others cost, in tokens without a past."""
    if not attention_tokens:
        return float(count)
    return count * (1 + max(0.0, (past + count / 2) / attention_tokens - _FREE))


def chunk_size(
    left: int, past: int, budget: float, block_tokens: int, attention_tokens: float | None, tile: int = 1
) -> int:
    """Tokens of the `left` that the budget pays for, at least one; where the prompt goes on, whole tiles of queries,
    which attention pays for anyway, and up to the end of a block."""
    count = int(budget)
    if attention_tokens:
        linear = 1 + past / attention_tokens - _FREE
        # n²/(2A) + n·linear = budget, in the form that does not cancel; more than the budget where all is free
        count = min(count, int(2 * budget / (linear + sqrt(linear * linear + 2 * budget / attention_tokens))))
    if count >= left:
        return left
    ends = (count - (past + count) % unit for unit in (tile, block_tokens) if unit % block_tokens == 0)
    return max(1, next((end for end in ends if end > 0), count))
