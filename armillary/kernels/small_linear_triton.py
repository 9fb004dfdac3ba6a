"""Small matmuls in Triton: programs stream disjoint tiles of the weight, all of them resident at once.

The weight is the left operand of the tensor cores (64 rows and more), the tokens the right one (16 to 64 columns).
Where its rows alone are too few tiles, the inner dim is split too, and a second kernel adds the parts in a fixed order.
Kernels start before the one ahead has ended (programmatic dependent launch): they fetch the first of their weights into
L2, which no kernel ahead writes, and only then wait for their input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.launch import ceil_div, on
from armillary.kernels.small_linear import MOST_TOKENS, reference

# M tokens, K inputs, N rows of the weight


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the work is cut."""

    rows: int
    """of the weight in a program"""
    depth: int
    """of the inner dim in a step"""
    splits: int
    """programs that share the inner dim of the same rows"""
    stages: int
    """steps in flight"""
    warps: int = 4
    """of a program"""
    early: bool = True
    """start before the kernel ahead has ended, where the chip can"""


def small_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
) -> Tensor:
    """The reference's result in one or two kernels; more tokens than they are made for go to the reference."""
    return _run(x_MK, weight_NK, norm_K, residual, eps, gated, early=True)


def waiting_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
) -> Tensor:
    """The same, but each kernel starts when the one ahead has ended."""
    return _run(x_MK, weight_NK, norm_K, residual, eps, gated, early=False)


def _run(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool, *, early: bool
) -> Tensor:
    tokens = x.numel() // max(1, x.shape[-1])
    if tokens > MOST_TOKENS or x.dtype == torch.float64 or not x.numel():
        return reference(x, weight, norm, residual, eps, gated)
    return _op(x, weight, norm, residual, eps, gated, early)


@torch.library.custom_op(
    "armillary::small_linear", mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? norm, Tensor? residual, float eps, bool gated, bool early) -> Tensor",
)  # fmt: skip
def _op(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool, early: bool
) -> Tensor:
    tiles = plan(x.numel() // x.shape[-1], len(weight), weight.shape[1], x.element_size())
    return run_tiles(x, weight, norm, residual, eps, gated, replace(tiles, early=tiles.early and early))


@_op.register_fake
def _(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool, early: bool
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) // 2 if gated else len(weight))


def plan(tokens: int, outputs: int, inputs: int, itemsize: int = 2) -> Tiles:
    """Tiles as measured on an H200 (benchmarks/) to be the quickest that are all resident at once. Where the inner dim
    is split, an early start hides the second kernel; where it is not, it only takes bandwidth from the kernel ahead."""
    tiles, depth = ceil_div(outputs, 64), 256 // itemsize
    splits = max(1, min(264 // tiles, inputs // 512))
    if splits == 1:
        return Tiles(rows=64 if tiles <= 396 else 128, depth=depth, splits=1, stages=3, early=False)
    if tokens <= 16:
        return Tiles(rows=64, depth=depth, splits=splits, stages=4)
    return Tiles(rows=128, depth=depth, splits=max(1, min(132 // ceil_div(outputs, 128), inputs // 512)), stages=3)


def run_tiles(
    x: Tensor, weight: Tensor, norm: Tensor | None, residual: Tensor | None, eps: float, gated: bool, tiles: Tiles
) -> Tensor:
    """The kernels, cut as `tiles` says."""
    flat, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    (M, K), N = flat.shape, len(weight)
    width = N // 2 if gated else N
    out = x.new_empty(M, width)
    residual = None if residual is None else residual.reshape(M, width).contiguous()
    block_m = max(16, triton.next_power_of_2(M))
    parts = None
    if tiles.splits > 1:
        # the last row of each part holds sums of squares, for the norm
        parts = torch.empty(tiles.splits, N + 1, block_m, dtype=torch.float32, device=x.device)
    early = tiles.early and x.is_cuda and _can_start_early(x.device)
    options = {
        "EARLY": early, "HAS_NORM": norm is not None, "HAS_RESIDUAL": residual is not None, "GATED": gated,
        "BLOCK_M": block_m,
    }  # fmt: skip
    launch: dict[str, Any] = {"launch_pdl": True} if early else {}
    with on(x):
        linear_kernel[(triton.cdiv(N, tiles.rows), tiles.splits)](
            flat, weight, norm, residual, out, parts, M, N, K, eps,
            **options, SPLIT=parts is not None, EVEN=K % tiles.depth == 0, FP32=x.dtype == torch.float32,
            BLOCK_N=tiles.rows, BLOCK_K=tiles.depth, STAGES=tiles.stages, num_warps=tiles.warps, **launch,
        )  # fmt: skip
        if parts is not None:
            sum_kernel[(triton.cdiv(N, 32),)](
                parts, residual, out, M, N, K, eps, **options, SPLITS=tiles.splits, BLOCK_N=32, num_warps=4, **launch
            )
    return out.view(*x.shape[:-1], width)


@cache
def _can_start_early(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _finish(
    acc, squares, residual_ptr, out_ptr, first, M, N, K, eps,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sums [N, M] of rows from `first` on become results: norm, activation, residual."""
    if HAS_NORM:
        acc *= tl.rsqrt(squares / K + eps)[None, :]
    rows: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N
    if GATED:
        width = N // 2
        first = first // 2
        # plain torch rounds the product before the activation; so does this
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(acc, (rows, 2, BLOCK_M)), (0, 2, 1)))
        acc = gate * tl.sigmoid(gate) * up
    m = tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, rows)
    at = m[None, :].to(tl.int64) * width + n[:, None]
    inside = (n[:, None] < width) & (m[None, :] < M)
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _fetch(pointers):
    """Lines into L2, nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, norm_ptr, residual_ptr, out_ptr, part_ptr, M, N, K, eps,
    EARLY: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, FP32: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of the weight times all tokens, over one stretch of the inner dim."""
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K  # rows beyond the last are never stored
    steps = tl.cdiv(K, BLOCK_K)
    if EARLY:
        gdc_launch_dependents()
        line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
        ahead = steps * split // splits * BLOCK_K + tl.arange(0, 4 * BLOCK_K // line) * line
        _fetch(w_row + tl.minimum(ahead, K - 1)[None, :])
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for step in tl.range(steps * split // splits, steps * (split + 1) // splits, num_stages=STAGES):
        k = step * BLOCK_K + depth
        if EVEN:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=m[None, :] < M, other=0.0)
        else:
            w = tl.load(w_row + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        if HAS_NORM:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            scale = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x = (wide * scale[:, None]).to(x.dtype)
        acc = tl.dot(w, x, acc, input_precision="tf32x3" if FP32 else "tf32")
    if SPLIT:
        part_ptr += split.to(tl.int64) * (N + 1) * BLOCK_M
        tl.store(part_ptr + n.to(tl.int64)[:, None] * BLOCK_M + m[None, :], acc, mask=n[:, None] < N)
        if HAS_NORM and tile == 0:
            tl.store(part_ptr + tl.cast(N, tl.int64) * BLOCK_M + m, squares)
    else:
        _finish(acc, squares, residual_ptr, out_ptr, tile * BLOCK_N, M, N, K, eps,
                HAS_NORM, HAS_RESIDUAL, GATED, BLOCK_M, BLOCK_N)  # fmt: skip


@triton.jit
def sum_kernel(
    part_ptr, residual_ptr, out_ptr, M, N, K, eps,
    EARLY: tl.constexpr, HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the parts, always in the same order, and finishes."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = n.to(tl.int64)[:, None] * BLOCK_M + m[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    part = (N + 1) * BLOCK_M
    for split in tl.static_range(SPLITS):
        acc += tl.load(part_ptr + split * part + at, mask=n[:, None] < N, other=0.0)
        if HAS_NORM:
            squares += tl.load(part_ptr + split * part + N * BLOCK_M + m)
    _finish(acc, squares, residual_ptr, out_ptr, tl.program_id(0) * BLOCK_N, M, N, K, eps,
            HAS_NORM, HAS_RESIDUAL, GATED, BLOCK_M, BLOCK_N)  # fmt: skip
