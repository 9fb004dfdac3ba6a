"""The order in which samples are seen: a pure function of (seed, step) for any number of ranks.

Every epoch is its own permutation, computed for the asked positions only by a keyed Feistel network with cycle
walking (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002): no table, so no limit in size.
"""

import numpy as np

_MASK = 2**64 - 1
_ROUNDS = 6


def ids_at(seed: int, positions: np.ndarray, edges: np.ndarray, *, mix: int = 0) -> np.ndarray:
    """The sample numbers at `positions` of the endless order. Samples edges[k] … edges[k+1]-1 lie in shard k; with
    `mix`, an epoch goes through the shards in a random order, and only so many are mixed with each other."""
    size = int(edges[-1])
    ids: np.ndarray = np.empty(len(positions), np.int64)
    epochs: np.ndarray = positions // size
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        places = positions[here] % size
        if 0 < mix < len(edges) - 1:
            ids[here] = _by_groups(places, edges, mix, seed=seed, epoch=epoch)
        else:
            ids[here] = permuted(places, size, seed=seed, epoch=epoch)
    return ids


def _by_groups(places: np.ndarray, edges: np.ndarray, mix: int, *, seed: int, epoch: int) -> np.ndarray:
    """Shards are permuted, `mix` neighbours of that order are a group, and the samples of a group are permuted."""
    shards = shard_order(len(edges) - 1, seed=seed, epoch=epoch)
    begins = np.concatenate([[0], np.cumsum(np.diff(edges)[shards])])
    groups = group_at(places, edges, mix, seed=seed, epoch=epoch)
    ids: np.ndarray = np.empty(len(places), np.int64)
    for group in np.unique(groups).tolist():
        first, last = begins[group * mix], begins[min((group + 1) * mix, len(shards))]
        here = groups == group
        key = _next(_next(seed & _MASK) ^ (group + 1))  # of this group: groups of one size would have one permutation
        inside = first + permuted(places[here] - first, int(last - first), seed=key, epoch=epoch)
        slot = np.searchsorted(begins, inside, side="right") - 1
        ids[here] = edges[shards[slot]] + inside - begins[slot]
    return ids


def group_at(places: np.ndarray, edges: np.ndarray, mix: int, *, seed: int, epoch: int) -> np.ndarray:
    """Number of the group in which places of an epoch lie."""
    shards = shard_order(len(edges) - 1, seed=seed, epoch=epoch)
    begins = np.concatenate([[0], np.cumsum(np.diff(edges)[shards])])
    slots: np.ndarray = np.asarray(np.searchsorted(begins, places, side="right"))
    return (slots - 1) // mix


def shard_order(num_shards: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch goes through the shards."""
    return permuted(np.arange(num_shards), num_shards, seed=_next(seed & _MASK), epoch=epoch)


def permuted(places: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Where a permutation of 0 … size-1, chosen by (seed, epoch), sends `places`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    out = _feistel(places.astype(np.uint64), half, keys)
    # the network permutes 4^half ≥ size numbers: a number outside follows the cycle until it is inside
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
    """One 64-bit key per round: splitmix64 over seed, then epoch, then the round."""
    state = _next(_next(seed & _MASK) ^ (epoch & _MASK))
    return [_next(state + number) for number in range(_ROUNDS)]


def _next(state: int) -> int:
    return int(_mixed(np.array([(state + 0x9E3779B97F4A7C15) & _MASK], dtype=np.uint64))[0])
