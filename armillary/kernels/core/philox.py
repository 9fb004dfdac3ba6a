"""Counter-based random numbers, Philox 4×32 with ten rounds (Salmon et al., SC 2011), in plain torch: the twin of the
kernels' generator. Each 32-bit word is a pure function of (seed, counter)."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_KEYS = (0x9E3779B9, 0xBB67AE85)
_FACTORS = (0xD2511F53, 0xCD9E8D57)


def philox(seed: Tensor, counters: Tensor) -> list[Tensor]:
    """The four 32-bit words of each (seed, counter), all int64; one seed for all, or one per counter."""
    state = [counters & _MASK, (counters >> 32) & _MASK, torch.zeros_like(counters), torch.zeros_like(counters)]
    keys = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        # the product of two 32-bit words wraps around in int64, but all 64 bits are there
        first, second = state[0] * _FACTORS[0], state[2] * _FACTORS[1]
        state = [
            ((second >> 32) & _MASK) ^ state[1] ^ keys[0],
            second & _MASK,
            ((first >> 32) & _MASK) ^ state[3] ^ keys[1],
            first & _MASK,
        ]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEYS, strict=True)]
    return state
