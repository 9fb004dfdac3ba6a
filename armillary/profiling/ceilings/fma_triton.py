"""The Triton kernel of `fma`: every element goes through a long chain of multiply-adds without leaving a register.

It is a file of its own because Triton reads its source and must be there at import.
"""

from typing import Any

import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _chain(row, a, b, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row + at)
    for _ in range(ROUNDS):
        x = x * a + b
    tl.store(row + at, x)


def chain(row: Any, rounds: int) -> None:
    """x = x·a + b, `rounds` times, for each of the row's elements; a < 1, so that values stay finite."""
    assert row.numel() % _BLOCK == 0
    _chain[(row.numel() // _BLOCK,)](row, 0.97, 0.31, ROUNDS=rounds, BLOCK=_BLOCK, num_warps=4)
