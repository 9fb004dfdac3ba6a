"""Counter-based random words, Philox 4×32 (Salmon et al., SC 2011), in plain torch: the twin of what kernels draw.

The word of element i is a pure function of (seed, i), so a backward draws the same mask again and nothing is stored.
Eight elements share a counter, 15 bits each (the lower ones of 16, so that they can be compared as bf16 numbers). Masks
take seven rounds, the fewest that the authors found to pass every test; ten, as usual, elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 8
"""elements a counter serves"""
WORD = 1 << 15
_MASK = 0xFFFFFFFF
ROUNDS, MASK_ROUNDS = 10, 7
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)


def threshold(p: float) -> int:
    """Words below it are dropped: p to the nearest 1 / 32768."""
    return min(WORD, max(0, round(p * WORD)))


def keep_scale(p: float) -> float:
    """What a kept element is multiplied by, so that the mean stays; 0 where nothing is kept."""
    kept = WORD - threshold(p)
    return WORD / kept if kept else 0.0


def kept(seed: Tensor, count: int, p: float) -> Tensor:
    """Which of elements 0 … count − 1 stay, on the seed's device."""
    counters = torch.arange(-(-count // LANES), dtype=torch.int64, device=seed.device)
    return (random_words(seed, counters) >= threshold(p)).flatten()[:count]


def random_words(seed: Tensor, counters: Tensor) -> Tensor:
    """[counters, 8] words of 15 bits; `seed` is an int64 tensor with one element, `counters` are int64."""
    words = philox(seed.reshape(()), counters, MASK_ROUNDS)
    return torch.stack([(word >> shift) & (WORD - 1) for word in words for shift in (0, 16)], dim=-1)


def philox(seed: Tensor, counters: Tensor, rounds: int = ROUNDS) -> list[Tensor]:
    """The four 32-bit words of each (seed, counter), all int64; seeds are one, or one a counter."""
    state = [counters & _MASK, (counters >> 32) & _MASK, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(rounds):
        state = _round(state, keys)
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEYS, strict=True)]
    return state


def _round(state: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
    c0, c1, c2, c3 = state
    # products of two 32-bit words wrap around in int64, but all 64 bits are there
    first, second = c0 * _FACTORS[0], c2 * _FACTORS[1]
    return [
        ((second >> 32) & _MASK) ^ c1 ^ keys[0],
        second & _MASK,
        ((first >> 32) & _MASK) ^ c3 ^ keys[1],
        first & _MASK,
    ]
