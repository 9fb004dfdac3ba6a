"""Matrix-vector product in Triton: rows of the weight go straight into registers, a few rows per program.

For a single token tensor cores would multiply mostly zeros, and their need for shared memory limits the loads in
flight. A program's first loads, all of them where rows are short, are issued before it waits for the previous kernel,
which never writes weights; a norm is part of the sum, so that no separate kernel comes before it.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, dense, early_launch, on, power_of_two
from armillary.kernels.core.row_loads_triton import load_rows, load_vector

_LEAST_ROWS = 4 * 132  # fewest rows of a weight that fill the GPU without splitting the inner dim
_WHOLE_BYTES = 8192  # largest row that is loaded at once


class GemvTiles(NamedTuple):
    """Tile sizes for one token."""

    rows: int  # of the weight per program, even
    depth: int  # of the inner dim per step
    warps: int
    early: bool = True  # start before the previous kernel has ended, where the GPU can


def vector_plan(outputs: int, inputs: int, itemsize: int = 2) -> GemvTiles | None:
    """Sizes measured on an H200 (benchmarks/) in a chain of layers: whole rows at once where they are short."""
    if outputs < _LEAST_ROWS:
        return None
    padded = max(64, power_of_two(inputs))
    if padded * itemsize <= _WHOLE_BYTES:
        return GemvTiles(rows=2, depth=padded, warps=max(1, padded * itemsize // 1024))
    return GemvTiles(rows=4, depth=2048 // itemsize, warps=4)


def run_vector(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    tiles: GemvTiles,
    bias: Tensor | None = None,
) -> Tensor:
    flat, weight = x.reshape(-1).contiguous(), weight.contiguous()
    N, K = weight.shape
    out = x.new_empty(N // 2 if gated else N)
    norm, residual, bias = (dense(each) for each in (norm, residual, bias))
    early = can_start_early(x.device) and tiles.early
    with on(x):
        vector_kernel[(ceil_div(N, tiles.rows),)](
            flat,
            weight,
            norm,
            bias,
            residual,
            out,
            N,
            K,
            eps,
            EARLY=early,
            HAS_NORM=norm is not None,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            GATED=gated,
            EVEN=K % tiles.depth == 0,
            ONCE=tiles.depth >= K,
            ROWS=tiles.rows,
            DEPTH=tiles.depth,
            num_warps=tiles.warps,
            **early_launch(early),
        )
    return out.view(*x.shape[:-1], len(out))


@triton.jit
def _added(sums, squares, w, x, norm, HAS_NORM: tl.constexpr):
    """Sums of products and of squares with one more step."""
    wide = x.to(tl.float32)
    if HAS_NORM:
        squares += wide * wide
        wide = wide * norm.to(tl.float32)
    return sums + w.to(tl.float32) * wide[None, :], squares


@triton.jit
def vector_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    K,
    eps,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of the weight times x; GATED: rows alternate between gate and up. Each step's loads begin one step ahead."""
    if EARLY:
        gdc_launch_dependents()
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), N - 1).to(tl.int64)  # rows past the last are never stored
    k = tl.arange(0, DEPTH)
    w_row = w_ptr + row[:, None] * K
    rows: tl.constexpr = ROWS // 2 if GATED else ROWS
    width = N
    if GATED:
        width, first = N // 2, first // 2
    at = first + tl.arange(0, rows)
    w = load_rows(w_row, k, K, EVEN)
    norm = load_vector(norm_ptr, k, K, EVEN) if HAS_NORM else 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    if EARLY:
        gdc_wait()
    x = load_vector(x_ptr, k, K, EVEN)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=at < width, other=0.0)
    sums, squares = tl.zeros([ROWS, DEPTH], tl.float32), tl.zeros([DEPTH], tl.float32)
    if not ONCE:
        for begin in range(DEPTH, K, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            next_w, next_x = load_rows(w_row, k, K, EVEN), load_vector(x_ptr, k, K, EVEN)
            sums, squares = _added(sums, squares, w, x, norm, HAS_NORM)
            w, x = next_w, next_x
            if HAS_NORM:
                norm = load_vector(norm_ptr, k, K, EVEN)
    sums, squares = _added(sums, squares, w, x, norm, HAS_NORM)
    total = tl.sum(sums, 1)
    if HAS_NORM:
        total = total * tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if HAS_BIAS:
        total += bias
    if GATED:  # plain torch rounds the GEMM's result before the activation; so does this
        gate, up = tl.split(tl.reshape(total.to(out_ptr.dtype.element_ty).to(tl.float32), [rows, 2]))
        total = gate * tl.sigmoid(gate) * up
    if HAS_RESIDUAL:
        total += residual.to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
