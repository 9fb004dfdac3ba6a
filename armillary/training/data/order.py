"""The order in which samples are seen: a pure function of (seed, step), whatever the number of ranks.

Every epoch is its own permutation, computed for the asked positions only by a keyed Feistel network with cycle
walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): no table, so no limit in size.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 6


def sample_ids(seed: int, step: int, batch: int, num_samples: int) -> np.ndarray:
    """The `batch` sample numbers of a step, int64; each epoch visits every number below `num_samples` once."""
    assert num_samples > 0 and step >= 0
    first = step * batch
    positions: np.ndarray = np.arange(first, first + batch, dtype=np.int64)
    epochs: np.ndarray = positions // num_samples
    places: np.ndarray = positions % num_samples
    ids: np.ndarray = np.empty(batch, np.int64)
    for epoch in range(first // num_samples, (first + batch - 1) // num_samples + 1):
        here = epochs == epoch
        ids[here] = permuted(places[here], num_samples, seed=seed, epoch=epoch)
    return ids


def permuted(places: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of 0 … size-1, chosen by (seed, epoch), sends `places`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    out = _feistel(places.astype(np.uint64), half, keys)
    # the network permutes 4^half ≥ size numbers: whoever lands outside walks on along the cycle until inside
    while (outside := out >= np.uint64(size)).any():
        out[outside] = _feistel(out[outside], half, keys)
    return out.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ np.uint64(key)) & low)
    joined: np.ndarray = (left << shift) | right
    return joined


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[int]:
    """One 64-bit key a round: splitmix64 over seed, then epoch, then the round."""
    state = _next(_next(seed & _MASK) ^ (epoch & _MASK))
    return [_next(state + number) for number in range(_ROUNDS)]


def _next(state: int) -> int:
    return int(_mixed(np.array([(state + 0x9E3779B97F4A7C15) & _MASK], dtype=np.uint64))[0])
