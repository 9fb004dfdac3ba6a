"""An order of passes, as stages really ran it, played through on a clock of its own: what it costs at given speeds.

No machine's load is in the result, so it says what a schedule is worth where a measurement says what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from armillary.parallel.pipeline_busy import Pass


def replayed_idle(
    orders: Sequence[Sequence[Pass]],
    *,
    chunks: int = 1,
    forward: float = 1.0,
    inputs: float = 1.0,
    weights: float = 1.0,
) -> float:
    """Share of the step in which stages stand idle, if hidden states travel in no time. `orders` are those of all
    stages; a pass begins once its stage is free and what it needs is there."""
    number = len(orders)
    done: dict[Pass, float] = {}
    free, busy, at = [0.0] * number, [0.0] * number, [0] * number
    took = {"F": forward / chunks, "B": (inputs + weights) / chunks, "I": inputs / chunks, "W": weights / chunks}
    while any(at[stage] < len(order) for stage, order in enumerate(orders)):
        ready = [stage for stage in range(number) if _is_ready(orders[stage], at[stage], done, chunks * number)]
        assert ready, "an order in which every stage waits for another"
        for stage in ready:
            letter, chunk, batch = orders[stage][at[stage]]
            begin = max([free[stage], *(done[key] for key in _needs(letter, chunk, batch, chunks * number))])
            free[stage] = done[_made(letter), chunk, batch] = begin + took[letter]
            busy[stage] += took[letter]
            at[stage] += 1
    return 1.0 - sum(busy) / (number * max(free))


def _made(letter: str) -> str:
    """Both forms of the backward pass give the stage before what it waits for."""
    return "B" if letter in "BI" else letter


def _needs(letter: str, chunk: int, batch: int, num_chunks: int) -> list[Pass]:
    if letter == "F":
        return [("F", chunk - 1, batch)] if chunk else []
    if letter == "W":
        return [("B", chunk, batch)]
    return [("F", chunk, batch)] + ([("B", chunk + 1, batch)] if chunk + 1 < num_chunks else [])


def _is_ready(order: Sequence[Pass], at: int, done: dict[Pass, float], num_chunks: int) -> bool:
    return at < len(order) and all(key in done for key in _needs(*order[at], num_chunks))
