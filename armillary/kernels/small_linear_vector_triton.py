"""A matrix times one vector in Triton: rows of the weight go straight into registers, a program a few rows.

For a single token tensor cores would multiply mostly zeros, and what they need of shared memory limits how much is on
its way. Many small programs a multiprocessor keep more loads in flight, and no sum is left for a second kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.launch import can_start_early, ceil_div, early_launch, on, power_of_two
from armillary.kernels.launch_triton import fetch
from armillary.kernels.small_linear_norm_triton import normed

_AT_ONCE = 132 * 8
"""programs that the chip they were measured on runs at a time"""


class VectorTiles(NamedTuple):
    """How the work for one token is cut."""

    rows: int
    """of the weight in a program, even"""
    depth: int
    """of the inner dim in a step"""
    warps: int
    """of a program"""
    early: bool
    """start before the kernel ahead has ended, where the chip can"""


def vector_plan(outputs: int, inputs: int) -> VectorTiles | None:
    """Sizes as measured on an H200, where rows are enough to fill the chip without splitting the inner dim. An early
    start pays where all programs run at once, and costs where they follow each other: what comes next takes their
    place."""
    if outputs < 2 * _AT_ONCE:
        return None
    rows, depth = 4 if outputs <= 4 * _AT_ONCE else 2, max(64, min(1024, power_of_two(inputs)))
    return VectorTiles(rows=rows, depth=depth, warps=max(1, depth // 256), early=rows == 4)


def run_vector(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool, tiles: VectorTiles
) -> Tensor:
    """One token, cut as `tiles` says."""
    flat, weight = x.reshape(1, x.shape[-1]).contiguous(), weight.contiguous()
    N, K = weight.shape
    out = x.new_empty(N // 2 if gated else N)
    residual = None if residual is None else residual.contiguous()
    early = can_start_early(x.device) and (tiles.early or norm is not None)
    with on(x):
        if norm is not None:
            flat = normed(flat, norm.contiguous(), eps, early)
        vector_kernel[(ceil_div(N, tiles.rows),)](
            flat, weight, residual, out, N, K, EARLY=early, HAS_RESIDUAL=residual is not None, GATED=gated,
            EVEN=K % tiles.depth == 0, ROWS=tiles.rows, DEPTH=tiles.depth, num_warps=tiles.warps,
            **early_launch(early),
        )  # fmt: skip
    return out.view(*x.shape[:-1], len(out))


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr, N, K, EARLY: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """ROWS of the weight times x; GATED: rows alternate between gate and up."""
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), N - 1).to(tl.int64)  # rows beyond the last are never stored
    depth = tl.arange(0, DEPTH)
    w_row = w_ptr + row[:, None] * K
    if EARLY:
        gdc_launch_dependents()
        line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
        fetch(w_row + tl.minimum(tl.arange(0, DEPTH // line) * line, K - 1)[None, :])
        gdc_wait()
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    for begin in range(0, K, DEPTH):
        k = begin + depth
        if EVEN:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + k)
        else:
            w = tl.load(w_row + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
    total = tl.sum(sums, 1)
    rows: tl.constexpr = ROWS // 2 if GATED else ROWS
    width = N
    if GATED:  # plain torch rounds the product before the activation; so does this
        width, first = N // 2, first // 2
        gate, up = tl.split(tl.reshape(total.to(out_ptr.dtype.element_ty).to(tl.float32), [rows, 2]))
        total = gate * tl.sigmoid(gate) * up
    at = first + tl.arange(0, rows)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
