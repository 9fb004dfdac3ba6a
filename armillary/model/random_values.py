"""Random values of weights as a function of (seed, tensor name, position in the tensor).

No value depends on another, so any part of a tensor is drawn alone and equals that part of the full tensor bit for
bit. A position is hashed with splitmix64's mixing function (Steele et al. 2014, doi 10.1145/2660193.2660195). Normal
values are read from a table of quantiles with linear interpolation: additions and multiplications only, which round
alike on every CPU, where logarithms and cosines do not.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from statistics import NormalDist
from threading import local
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Bits: TypeAlias = Any
"""array of uint64"""
Floats: TypeAlias = Any
"""array of float32"""
_STEP, _MIX_1, _MIX_2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LOW_24 = np.uint64(0xFFFFFF)
_CELLS, _TAIL = 1 << 16, 1 << 12
"""cells of equal probability in the table; values in each of the two outermost"""
_AT_ONCE, _PIECE = 1 << 22, 1 << 14
"""values that are drawn before they are copied into a tensor; values of a thread at a time, which stay in its cache"""


class Part(NamedTuple):
    """The part of a tensor that this process holds, and where it begins in the full one."""

    local: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the full tensor


PartOf = Callable[[Tensor], Part]


def all_of(parameter: Tensor) -> Part:
    """The part of a process that holds the full tensor."""
    return Part(parameter, (0,) * parameter.ndim, tuple(parameter.shape))


@torch.no_grad()
def fill_normal(part: Part, *, seed: int, name: str, std: float) -> None:
    """Normal values with mean 0; none is beyond 5.9 standard deviations."""
    _fill(part, _Draw(seed, name, scale=std, values=_normal))


@torch.no_grad()
def fill_uniform(part: Part, *, seed: int, name: str, bound: float) -> None:
    """Uniform values between -bound and bound."""
    _fill(part, _Draw(seed, name, scale=bound, values=_uniform))


class _Scratch(local):
    """Buffers of a thread: memory that is allocated for each piece would cost more than the values."""

    def __init__(self) -> None:
        self.bits: Bits = np.empty(_PIECE, dtype=np.uint64)
        self.other: Bits = np.empty(_PIECE, dtype=np.uint64)
        self.floats: Floats = np.empty(_PIECE, dtype=np.float32)
        self.fractions: Floats = np.empty(_PIECE, dtype=np.float32)


_SCRATCH = _Scratch()
Values = Callable[[_Scratch, int], Floats]
"""the first so many `bits` of the buffers as values"""


class _Draw:
    """Draws the values of one tensor at given positions."""

    def __init__(self, seed: int, name: str, *, scale: float, values: Values) -> None:
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        self.key, self.scale, self.values = np.uint64(int.from_bytes(digest, "little")), np.float32(scale), values

    def into(self, out: Floats, rows: Bits, columns: Bits) -> None:
        """`out` [rows, columns], not more than _PIECE values, at the positions row + column."""
        count = out.size
        np.add(rows[:, None], columns, out=_SCRATCH.bits[:count].reshape(out.shape))
        _mix(_SCRATCH.bits[:count], _SCRATCH.other[:count], self.key)
        np.multiply(self.values(_SCRATCH, count).reshape(out.shape), self.scale, out=out)


def _fill(part: Part, draw: _Draw) -> None:
    if not part.local.numel():
        return
    rows, columns = _positions(part)
    target = part.local.view(len(rows), len(columns))
    step = max(1, _AT_ONCE // len(columns))
    drawn: Floats = np.empty((min(step, len(rows)), len(columns)), dtype=np.float32)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            _draw_rows(pool, draw, drawn[: len(some)], some, columns)
            target[begin : begin + step].copy_(torch.from_numpy(drawn[: len(some)]))


def _positions(part: Part) -> tuple[Bits, Bits]:
    """Of this part's rows (all dims but the last) in the full tensor, flattened, and of its columns."""
    shape, offsets, sizes = part.shape or (1,), part.offsets or (0,), tuple(part.local.shape) or (1,)
    rows: Bits = np.zeros(1, dtype=np.uint64)
    for size, offset, count in zip(shape[:-1], offsets[:-1], sizes[:-1], strict=True):
        own = np.arange(offset, offset + count, dtype=np.uint64)
        rows = (rows[:, None] * np.uint64(size) + own).ravel()
    columns = np.arange(offsets[-1], offsets[-1] + sizes[-1], dtype=np.uint64)
    return rows * np.uint64(shape[-1]), columns


def _draw_rows(pool: ThreadPoolExecutor, draw: _Draw, out: Floats, rows: Bits, columns: Bits) -> None:
    """A piece for each thread at a time."""
    height, width = max(1, _PIECE // len(columns)), _PIECE

    def work(place: tuple[int, int]) -> None:
        some, other = slice(place[0], place[0] + height), slice(place[1], place[1] + width)
        draw.into(out[some, other], rows[some], columns[other])

    places = [(row, column) for row in range(0, len(rows), height) for column in range(0, len(columns), width)]
    for _ in pool.map(work, places) if len(places) > 1 else map(work, places):
        pass


def _mix(z: Bits, other: Bits, key: np.uint64) -> None:
    """Positions to 64 random bits each, in place."""
    z *= _STEP
    z += key
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(z, np.uint64(shift), out=other)
        z ^= other
        z *= factor
    np.right_shift(z, np.uint64(31), out=other)
    z ^= other


def _fractions(scratch: _Scratch, count: int) -> Floats:
    """Of the 24 bits in the middle, in (0, 1)."""
    other, fractions = scratch.other[:count], scratch.fractions[:count]
    np.right_shift(scratch.bits[:count], np.uint64(24), out=other)
    other &= _LOW_24
    fractions[:] = other.view(np.int64)
    fractions += np.float32(0.5)
    fractions *= np.float32(2.0**-24)
    return fractions


def _uniform(scratch: _Scratch, count: int) -> Floats:
    values = _fractions(scratch, count)
    values *= np.float32(2)
    values -= np.float32(1)
    return values


def _normal(scratch: _Scratch, count: int) -> Floats:
    """The 16 highest bits choose a cell of the table, the fraction a value in it."""
    begins, widths, low_tail = _quantiles()
    values, fractions, cells = scratch.floats[:count], _fractions(scratch, count), scratch.other[:count]
    np.right_shift(scratch.bits[:count], np.uint64(48), out=cells)
    np.take(widths, cells.view(np.int64), out=values, mode="clip")
    fractions *= values
    np.take(begins, cells.view(np.int64), out=values, mode="clip")
    values += fractions
    (outer,) = np.nonzero(np.isnan(values))
    if len(outer):
        sign = np.where(cells[outer] == 0, np.float32(1), np.float32(-1))
        numbers = (scratch.bits[outer] >> np.uint64(36)) & np.uint64(_TAIL - 1)
        values[outer] = low_tail[numbers.astype(np.intp)] * sign
    return values


@cache
def _quantiles() -> tuple[Floats, Floats, Floats]:
    """Of the standard normal distribution: where each cell begins, how wide it is, and the values in the lowest cell,
    which the highest mirrors. In the table those two are not numbers."""
    quantile = NormalDist().inv_cdf
    below = [quantile(cell / _CELLS) for cell in range(1, _CELLS // 2)]
    edges = _float32([np.nan, *below, 0.0, *(-value for value in reversed(below)), np.nan])
    tail = _float32([quantile((number + 0.5) / _TAIL / _CELLS) for number in range(_TAIL)])
    return edges[:-1], edges[1:] - edges[:-1], tail


def _float32(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64).astype(np.float32)
