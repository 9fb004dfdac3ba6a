"""How much of a prompt a step takes: a budget in tokens, of which late tokens use more.

A chunk of n tokens after p costs n·(1 + (p + n/2)/A) tokens' worth, A being the context at which attention costs as
much as the rest of the model. So a step's time stays about the same all along a long prompt.
"""

from __future__ import annotations

from math import sqrt


def chunk_cost(count: int, past: int, attention_tokens: float | None) -> float:
    """What `count` tokens after `past` others cost, in tokens without a past."""
    if not attention_tokens:
        return float(count)
    return count * (1 + (past + count / 2) / attention_tokens)


def chunk_size(left: int, past: int, budget: float, block_tokens: int, attention_tokens: float | None) -> int:
    """Tokens of the `left` that the budget pays for, at least one; ends on a block where the prompt goes on."""
    count = int(budget)
    if attention_tokens:
        linear = 1 + past / attention_tokens
        # n²/(2A) + n·linear = budget, in the form that does not cancel
        count = int(2 * budget / (linear + sqrt(linear * linear + 2 * budget / attention_tokens)))
    if count >= left:
        return left
    aligned = count - (past + count) % block_tokens
    return max(1, count if aligned <= 0 else aligned)
