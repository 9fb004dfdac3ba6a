"""Adapters of many rows in two Triton kernels: A·x of every row, then B times that, added to y.

Rows of one adapter are a tile: its A and B are read once for up to 16 rows. The inner dim of A is divided among several
programs, whose sums the second kernel adds, in order. Programs find their rows on the device, so launches depend on
shapes only, and CUDA graphs can hold them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on, power_of_two
from armillary.kernels.lora.grouped_lora import LoraRows
from armillary.machine.accelerator import accelerator_of

# T rows, K inputs, N outputs, S slots, r rank, P matrices A of a projection, R = P·r


class LoraTile(NamedTuple):
    """Tile sizes of both kernels. docs/adapters.md has their figures on an H200; `chunks` and the splits of long inputs
    are not timed."""

    rows: int = 16
    step: int = 128  # most inputs per step of the first
    columns: int = 128  # outputs at a time of the second
    splits: int = 4  # programs that share the inputs of the first
    chunks: int = 1  # of columns that a program of the second visits, one after the other


_STAGES = 3
_SHARED_BYTES = 98_304
"""of x and A in shared memory, all stages: what the smallest chips have"""
_MANY = 1024  # rows from which tiles are taller: prefill
_TALL = LoraTile(rows=64, splits=1)
_LONG = 8192  # inputs or outputs from which programs of a decode would have too much or too little to do


def tile_of(tokens: int, inputs: int, outputs: int) -> LoraTile:
    """For so many rows of a projection. A decode's programs wait for loads that depend on each other, so long inputs
    are shared out among more of them, and a program that has found its rows goes on over several tiles of outputs."""
    if tokens >= _MANY:
        return _TALL
    return LoraTile(splits=4 if inputs < _LONG else 16, chunks=1 if outputs < _LONG else 4)


def add_lora(
    y_TN: Tensor,
    x_TK: Tensor,
    a_SRK: Tensor,
    b_SNr: Tensor,
    part_N: Tensor,
    rows: LoraRows,
    tile: LoraTile | None = None,
) -> Tensor:
    """`armillary.kernels.lora.grouped_lora.add_lora`"""
    (T, K), N, (S, R, _), rank = x_TK.shape, y_TN.shape[1], a_SRK.shape, b_SNr.shape[2]
    if not T or not S:
        return y_TN
    tile = tile or tile_of(T, K, N)
    assert y_TN.is_contiguous() and x_TK.stride(1) == 1
    inner = torch.empty(tile.splits, T, R, dtype=torch.float32, device=x_TK.device)
    down = ceil_div(T, tile.rows) + S  # every adapter but the first may begin one more tile
    exact = "ieee" if x_TK.dtype == torch.float32 or accelerator_of(x_TK.device) is None else "tf32"
    width = max(16, power_of_two(R))
    fitting = _SHARED_BYTES // (_STAGES * (tile.rows + width) * x_TK.element_size())
    step = max(16, min(tile.step, power_of_two(fitting + 1) // 2))
    common = {"S": S, "SLOTS": power_of_two(S + 1), "ROWS": tile.rows, "EXACT": exact, "num_warps": 4}
    with on(x_TK):
        shrink_kernel[(down, tile.splits)](
            x_TK, a_SRK, inner, rows.order_T, rows.ends_S, T, K, R, x_TK.stride(0),
            WIDTH=width, STEP=step, SPLITS=tile.splits, num_stages=_STAGES, **common,
        )  # fmt: skip
        expand_kernel[(down, ceil_div(N, tile.columns * tile.chunks))](
            y_TN, inner, b_SNr, part_N, rows.order_T, rows.ends_S, T, N, R, rank,
            PARTS=R // rank, RANK=max(16, power_of_two(rank)), COLUMNS=tile.columns, CHUNKS=tile.chunks,
            SPLITS=tile.splits, num_stages=2, **common,
        )  # fmt: skip
    return y_TN


@triton.jit
def _own_rows(ends_ptr, tile, S: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """(adapter of a tile, its first row in sorted order, where the adapter's rows end); S: the tile is empty."""
    slot = tl.arange(0, SLOTS)
    ends = tl.load(ends_ptr + slot, mask=slot < S, other=0)
    starts = tl.load(ends_ptr + slot - 1, mask=(slot > 0) & (slot < S), other=0)
    tiles = tl.where(slot < S, (ends - starts + ROWS - 1) // ROWS, 0)
    lasts = tl.cumsum(tiles, 0)  # tiles up to and including each adapter
    own = tl.sum(((lasts <= tile) & (slot < S)).to(tl.int32), 0)
    is_own = slot == own
    start, end = tl.sum(tl.where(is_own, starts, 0), 0), tl.sum(tl.where(is_own, ends, 0), 0)
    before = tl.sum(tl.where(is_own, lasts - tiles, 0), 0)
    return own, start + (tile - before) * ROWS, end


@triton.jit
def shrink_kernel(
    x_ptr,
    a_ptr,
    inner_ptr,
    order_ptr,
    ends_ptr,
    T,
    K,
    R,
    x_stride,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A·x of the rows of one tile over one share of the inputs."""
    slot, first, end = _own_rows(ends_ptr, tl.program_id(0), S, SLOTS, ROWS)
    if slot < S:
        place = first + tl.arange(0, ROWS)
        row = tl.load(order_ptr + place, mask=place < end, other=0)
        r = tl.arange(0, WIDTH)
        a_begin = a_ptr + slot.to(tl.int64) * R * K
        share = tl.cdiv(tl.cdiv(K, STEP), SPLITS) * STEP
        begin = tl.program_id(1) * share
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        for k0 in tl.range(begin, tl.minimum(begin + share, K), STEP):
            k = k0 + tl.arange(0, STEP)
            x = tl.load(
                x_ptr + row[:, None] * x_stride + k[None, :], mask=(place[:, None] < end) & (k[None, :] < K), other=0.0
            )
            a = tl.load(a_begin + r[None, :] * K + k[:, None], mask=(r[None, :] < R) & (k[:, None] < K), other=0.0)
            acc = tl.dot(x, a, acc, input_precision=EXACT)
        at = tl.program_id(1).to(tl.int64) * T * R + row[:, None] * R + r[None, :]
        tl.store(inner_ptr + at, acc, mask=(place[:, None] < end) & (r[None, :] < R))


@triton.jit
def expand_kernel(
    y_ptr,
    inner_ptr,
    b_ptr,
    part_ptr,
    order_ptr,
    ends_ptr,
    T,
    N,
    R,
    rank,
    S: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Adds B times the inner sums to CHUNKS tiles of y."""
    slot, first, end = _own_rows(ends_ptr, tl.program_id(0), S, SLOTS, ROWS)
    if slot < S:
        place = first + tl.arange(0, ROWS)
        row = tl.load(order_ptr + place, mask=place < end, other=0)
        r, b_begin = tl.arange(0, RANK), b_ptr + slot.to(tl.int64) * N * rank
        for chunk in tl.range(CHUNKS):
            n = (tl.program_id(1) * CHUNKS + chunk) * COLUMNS + tl.arange(0, COLUMNS)
            b_mask = (n[None, :] < N) & (r[:, None] < rank)
            b = tl.load(b_begin + n[None, :] * rank + r[:, None], mask=b_mask, other=0.0)
            part = tl.load(part_ptr + n, mask=n < N, other=-1)
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            for p in tl.static_range(PARTS):
                own = part == p
                if tl.max(own.to(tl.int32), 0) > 0:  # most tiles of QKV are of one part
                    inner = tl.zeros((ROWS, RANK), tl.float32)
                    for split in tl.static_range(SPLITS):
                        at = (tl.full([], split, tl.int64) * T + row[:, None]) * R + p * rank + r[None, :]
                        inner += tl.load(inner_ptr + at, mask=(place[:, None] < end) & (r[None, :] < rank), other=0.0)
                    added = tl.dot(inner.to(b.dtype), b, input_precision=EXACT)
                    acc += tl.where(own[None, :], added, 0.0)
            at = row[:, None] * N + n[None, :]
            mask = (place[:, None] < end) & (n[None, :] < N)
            y = tl.load(y_ptr + at, mask=mask, other=0.0)
            tl.store(y_ptr + at, (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=mask)
