"""Grouped GEMMs in Triton: tiles of rows that never cross an expert, loaded by TMA or by plain pointers.

By TMA the weights are one tall matrix. From compute capability 8.0 on, and for rows that are no multiple of 16 bytes,
the same kernels load by plain pointers. Programs compute on the device which rows they have, so launches depend on
shapes only, and CUDA graphs can hold them. By TMA a tile may read rows of the next expert, which it does not store, and
sums over rows (weight gradients) mask them in their last step; by pointers they are masked when they are loaded.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import ceil_div, first_fitting, on, power_of_two
from armillary.machine.accelerator import accelerator_of

# P rows (copies of tokens), E experts, K inputs, N outputs, R the summed dim
_GROUP = 8
_MANY = 2048  # rows per expert from which a partly empty last tile hardly matters


class GroupedTile(NamedTuple):
    """Tile sizes and launch options of a grouped GEMM."""

    rows: int
    columns: int
    step: int  # summed elements per step of the loop
    warps: int
    stages: int  # steps whose operands are in shared memory

    def shared_bytes(self, itemsize: int) -> int:
        """Of both operands, all stages; the result is written through the same memory."""
        return self.stages * (self.rows + self.columns) * self.step * itemsize


_INTERPRETED = GroupedTile(32, 32, 32, warps=4, stages=1)
# best first, as timed on an H200 (benchmarks/experts_h200.md); the others are for less shared memory and were not timed
_WIDE = (
    GroupedTile(128, 256, 64, 8, 4),
    GroupedTile(128, 256, 64, 8, 3),
    GroupedTile(128, 128, 64, 8, 3),
    GroupedTile(128, 128, 32, 8, 3),
)
_TALL = (GroupedTile(256, 128, 64, 8, 3), *_WIDE[2:])  # for forward GEMMs with many rows per expert
_FP32 = (GroupedTile(64, 64, 32, 8, 3),)  # twice the shared memory, and no tensor cores to feed
# largest number of rows per expert -> tiles: the time is that of reading the weights. By pointers only, so that TMA's
# tiles stay as they were timed.
_FEW = {
    16: (GroupedTile(16, 128, 64, 4, 4), GroupedTile(16, 128, 64, 4, 3)),
    64: (GroupedTile(64, 128, 64, 4, 3), GroupedTile(64, 128, 32, 4, 3)),
}


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True, *, tma: bool = True) -> Tensor:
    """`armillary.kernels.gemm.grouped.grouped_linear`; whether all rows have an expert makes no difference here.
    Without TMA: rows of any length, on GPUs of compute capability 8.0 and more."""
    return _grouped_linear(x_PK, weight_ENK, ends_E, tma)


grouped_linear_pointers = partial(grouped_linear, tma=False)


@torch.library.custom_op(
    "armillary::grouped_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends, bool tma) -> Tensor"
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, tma: bool) -> Tensor:
    return _grouped_gemm(x, weight, ends, transposed=True, tma=tma)


@_grouped_linear.register_fake
def _empty(x: Tensor, weight: Tensor, ends: Tensor, tma: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "armillary::grouped_linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor ends, bool dx, bool dweight, bool tma) -> (Tensor, Tensor)",
)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool, tma: bool
) -> tuple[Tensor, Tensor]:
    """A gradient that is not needed is returned empty."""
    dy = dy.contiguous()
    back = _grouped_gemm(dy, weight, ends, transposed=False, tma=tma) if dx else x.new_empty(0)
    return back, _row_sums(dy, x, ends, len(weight), tma=tma) if dweight else weight.new_empty(0)


@_backward.register_fake
def _empty_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool, tma: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if dx else 0), weight.new_empty(weight.shape if dweight else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.tma = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x_wanted, weight_wanted, *_ = ctx.needs_input_grad
    dx, dweight = _backward(dy, *ctx.saved_tensors, x_wanted, weight_wanted, ctx.tma)
    return dx if x_wanted else None, dweight if weight_wanted else None, None, None


_grouped_linear.register_autograd(_gradients, setup_context=_setup_context)


# --- launches


def _grouped_gemm(a: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool, tma: bool) -> Tensor:
    """a @ weight[e]ᵀ ([E, columns, R]) or a @ weight[e] ([E, R, columns]) for the rows of each e."""
    a, weight = a.contiguous(), weight.contiguous()
    (P, R), experts = a.shape, len(weight)
    columns = weight.shape[1] if transposed else weight.shape[2]
    out = a.new_empty(P, columns)
    if not out.numel():
        return out
    tile = _tile(a, P // experts, forward=transposed, tma=tma)
    sources: tuple[Any, Any] = a, weight
    if tma:
        shape = [tile.columns, tile.step] if transposed else [tile.step, tile.columns]
        sources = (
            TensorDescriptor.from_tensor(a, [tile.rows, tile.step]),
            TensorDescriptor.from_tensor(weight.flatten(0, 1), shape),
        )
    down = ceil_div(P, tile.rows) + experts  # every group but the first may begin one more tile
    with on(a):
        grouped_gemm_kernel[(down * ceil_div(columns, tile.columns),)](
            *sources,
            out,
            ends,
            down,
            P,
            columns,
            R,
            E=experts,
            SLOTS=power_of_two(experts + 1),
            TRANSPOSED=transposed,
            **_options(tile, a, tma),
        )
    return out


def _row_sums(dy: Tensor, x: Tensor, ends: Tensor, experts: int, *, tma: bool) -> Tensor:
    """dy[rows of e]ᵀ @ x[rows of e]: [E, N, K]."""
    x = x.contiguous()
    (P, N), K = dy.shape, x.shape[1]
    if not P:
        return dy.new_zeros(experts, N, K)
    out = dy.new_empty(experts, N, K)
    tile = _tile(dy, _MANY, forward=False, tma=tma)
    grid = (experts * ceil_div(N, tile.rows) * ceil_div(K, tile.columns),)
    sources: tuple[Any, Any] = dy, x
    if tma:
        sources = (
            TensorDescriptor.from_tensor(dy, [tile.step, tile.rows]),
            TensorDescriptor.from_tensor(x, [tile.step, tile.columns]),
        )
    with on(dy):
        row_sums_kernel[grid](*sources, out, ends, N, K, **_options(tile, dy, tma))
    return out


def _tile(a: Tensor, rows: int, *, forward: bool, tma: bool) -> GroupedTile:
    """The tile for `rows` per expert that fits the GPU's shared memory."""
    if accelerator_of(a.device) is None:
        return _INTERPRETED
    few = None if tma else next((tiles for most, tiles in _FEW.items() if rows <= most), None)
    tiles = _FP32 if a.dtype == torch.float32 else few or (_TALL if forward and rows >= _MANY else _WIDE)
    return first_fitting(a.device, tiles, lambda tile: tile.shared_bytes(a.element_size()))


def _options(tile: GroupedTile, a: Tensor, tma: bool) -> dict[str, Any]:
    """Compile-time options of both kernels; fp32 inputs are multiplied as fp32, not as tf32."""
    return {
        "EXACT": "ieee" if a.dtype == torch.float32 else "tf32",
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "GROUP": _GROUP,
        "TMA": tma,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


# --- kernels


@triton.jit
def _matrix_tile(ptr, row, column, row_end, column_end, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """[HEIGHT, WIDTH] at (row, column) of a matrix with `stride` elements per row; zeros past either end."""
    at_row, at_column = row + tl.arange(0, HEIGHT), column + tl.arange(0, WIDTH)
    inside = (at_row[:, None] < row_end) & (at_column[None, :] < column_end)
    return tl.load(ptr + at_row.to(tl.int64)[:, None] * stride + at_column[None, :], mask=inside, other=0.0)


@triton.jit
def grouped_gemm_kernel(
    a_src,
    weight_src,
    out_ptr,
    ends_ptr,
    down,
    P,
    columns,
    R,
    E: tl.constexpr,
    SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of one expert's rows. Rows after the last expert's are one more group, which is written as zeros."""
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = first + within % height, within // height * COLUMNS
    slot = tl.arange(0, SLOTS)
    ends = tl.load(ends_ptr + slot, mask=slot < E, other=0)
    ends = tl.where(slot < E, ends, P)
    starts = tl.load(ends_ptr + slot - 1, mask=(slot > 0) & (slot <= E), other=0)
    starts = tl.where(slot <= E, starts, P)
    lasts = tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0)  # tiles up to and including each group
    expert = tl.sum((lasts <= tile).to(tl.int32), 0)
    if expert <= E:
        is_expert = slot == expert
        start, end = tl.sum(tl.where(is_expert, starts, 0), 0), tl.sum(tl.where(is_expert, ends, 0), 0)
        before = tl.sum(tl.where(slot == expert - 1, lasts, 0), 0)
        row = start + (tile - before) * ROWS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        steps = tl.where(expert < E, tl.cdiv(R, STEP), 0)
        for step in tl.range(0, steps):
            if TMA:
                a = a_src.load([row, step * STEP])
                if TRANSPOSED:
                    b = tl.trans(weight_src.load([expert * columns + column, step * STEP]))
                else:  # columns of a past R are zeros, whatever the next expert's weight has there
                    b = weight_src.load([expert * R + step * STEP, column])
            else:
                a = _matrix_tile(a_src, row, step * STEP, end, R, R, ROWS, STEP)
                weight = weight_src + expert.to(tl.int64) * columns * R
                if TRANSPOSED:
                    b = tl.trans(_matrix_tile(weight, column, step * STEP, columns, R, R, COLUMNS, STEP))
                else:
                    b = _matrix_tile(weight, step * STEP, column, R, columns, columns, STEP, COLUMNS)
            acc = tl.dot(a, b, acc, input_precision=EXACT)
        m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = m.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < columns))


@triton.jit
def row_sums_kernel(
    dy_src,
    x_src,
    out_ptr,
    ends_ptr,
    N,
    K,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
):
    """One tile of one expert's weight gradient: a sum over its rows."""
    down, across = tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    pid = tl.program_id(0) % (down * across)
    first = pid // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    n0, k0 = (first + within % height) * ROWS, within // height * COLUMNS
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if TMA:
        full_steps = (end - start) // STEP
        for step in tl.range(0, full_steps):
            dy = dy_src.load([start + step * STEP, n0])
            acc = tl.dot(tl.trans(dy), x_src.load([start + step * STEP, k0]), acc, input_precision=EXACT)
        row = start + full_steps * STEP
        if row < end:
            owned = row + tl.arange(0, STEP) < end
            dy, x = dy_src.load([row, n0]), x_src.load([row, k0])
            dy, x = tl.where(owned[:, None], dy, 0.0), tl.where(owned[:, None], x, 0.0)
            acc = tl.dot(tl.trans(dy), x.to(dy.dtype), acc, input_precision=EXACT)
    else:
        for row in tl.range(start, end, STEP):
            dy = _matrix_tile(dy_src, row, n0, end, N, N, STEP, ROWS)
            x = _matrix_tile(x_src, row, k0, end, K, K, STEP, COLUMNS)
            acc = tl.dot(tl.trans(dy), x, acc, input_precision=EXACT)
    n, k = n0 + tl.arange(0, ROWS), k0 + tl.arange(0, COLUMNS)
    at = expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))
