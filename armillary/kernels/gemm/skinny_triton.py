"""Skinny GEMMs in Triton: programs stream disjoint tiles of the weight, all of them resident at once.

The weight is the left operand of the tensor cores (64 rows and more), the tokens the right one (16 to 64 columns).
Where its rows alone are too few tiles, the inner dim is split too, and a second kernel adds the parts in a fixed order.
A norm is a small kernel before it. Kernels start before the previous one has ended (programmatic dependent launch):
they prefetch the first of their weights into L2, which no previous kernel writes, and only then wait for their input,
so that norm and sum cost next to nothing. One token has its own kernel (gemv_triton.py).
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import (
    can_start_early,
    ceil_div,
    dense,
    early_launch,
    fitting_stages,
    is_bare,
    on,
    power_of_two,
)
from armillary.kernels.core.prefetch_triton import fetch
from armillary.kernels.gemm.gemv_triton import run_vector, vector_plan
from armillary.kernels.gemm.skinny import MAX_TOKENS, reference

# M tokens, K inputs, N rows of the weight

_PROGRAMS = 132  # multiprocessors of the GPU that tiles were measured on


@dataclass(frozen=True, kw_only=True)
class SkinnyTiles:
    """Tile sizes of a skinny GEMM."""

    rows: int  # of the weight per program
    depth: int  # of the inner dim per step
    splits: int  # programs that share the inner dim of the same rows
    stages: int  # steps in flight
    warps: int = 4
    early: bool = True  # start before the previous kernel has ended, where the GPU can


def small_linear(
    x_MK: Tensor,
    weight_NK: Tensor,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The reference's result in one to three kernels; more tokens than MAX_TOKENS go to the reference."""
    tokens = x_MK.numel() // max(1, x_MK.shape[-1])
    if tokens > MAX_TOKENS or x_MK.dtype == torch.float64 or not x_MK.numel():
        return reference(x_MK, weight_NK, norm_K, residual, eps, gated, bias_N)
    return (_launched if is_bare(x_MK) else _op)(x_MK, weight_NK, norm_K, residual, eps, gated, bias_N)


def _launched(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    bias: Tensor | None = None,
) -> Tensor:
    tokens, (outputs, inputs) = x.numel() // x.shape[-1], weight.shape
    vector = vector_plan(outputs, inputs, x.element_size()) if tokens == 1 else None
    if vector is not None:
        return run_vector(x, weight, norm, residual, eps, gated, vector, bias)
    return run_tiles(x, weight, norm, residual, eps, gated, plan(tokens, outputs, inputs, x.element_size()), bias)


_op = torch.library.custom_op("armillary::small_linear", _launched, mutates_args=())


@_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    bias: Tensor | None = None,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) // 2 if gated else len(weight))


def plan(tokens: int, outputs: int, inputs: int, itemsize: int = 2) -> SkinnyTiles:
    """Tiles measured to be the fastest on an H200 (benchmarks/). Each multiprocessor gets one program with its shared
    memory full of loads in flight, and the inner dim is split until there are as many programs; an early start then
    hides the second kernel. Only where there are more rows than that, programs share a multiprocessor or follow each
    other."""
    depth, most = 256 // itemsize, 8 if tokens <= 16 else 6
    narrow = SkinnyTiles(rows=64, depth=depth, splits=_splits(64, outputs, inputs), stages=most)
    wide = SkinnyTiles(rows=128, depth=depth, splits=_splits(128, outputs, inputs), stages=4)
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * _PROGRAMS and tokens <= 16:
        return replace(narrow, stages=4, early=False)
    if tiles > _PROGRAMS:
        return replace(wide, early=False)
    programs, wide_programs = tiles * narrow.splits, ceil_div(outputs, 128) * wide.splits
    unsplit = narrow.splits == 1 and programs < 0.9 * _PROGRAMS  # then parts, which start early, are faster
    return wide if wide_programs > programs or (wide_programs == programs and unsplit) else narrow


def _splits(rows: int, outputs: int, inputs: int) -> int:
    """Splits of the inner dim, so that there are about as many programs as multiprocessors."""
    return max(1, min(_PROGRAMS // ceil_div(outputs, rows), inputs // 512))


def run_tiles(
    x: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    residual: Tensor | None,
    eps: float,
    gated: bool,
    tiles: SkinnyTiles,
    bias: Tensor | None = None,
) -> Tensor:
    flat, weight = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
    (M, K), N = flat.shape, len(weight)
    width, block_m = N // 2 if gated else N, max(16, power_of_two(M))
    out = x.new_empty(M, width)
    residual, bias = None if residual is None else residual.reshape(M, width).contiguous(), dense(bias)
    parts = torch.empty(tiles.splits, N, block_m, dtype=torch.float32, device=x.device) if tiles.splits > 1 else None
    stages = fitting_stages(x, (tiles.rows + block_m) * tiles.depth * x.element_size(), tiles.stages)
    can = can_start_early(x.device)
    early = can and (tiles.early or norm is not None)
    options = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "GATED": gated, "BLOCK_M": block_m}
    with on(x):
        if norm is not None:
            flat = normed(flat, norm.contiguous(), eps, early)
        linear_kernel[(ceil_div(N, tiles.rows), tiles.splits)](
            flat,
            weight,
            bias,
            residual,
            out,
            parts,
            M,
            N,
            K,
            **options,
            EARLY=early,
            SPLIT=parts is not None,
            EVEN=K % tiles.depth == 0,
            FP32=x.dtype == torch.float32,
            BLOCK_N=tiles.rows,
            BLOCK_K=tiles.depth,
            STAGES=stages,
            num_warps=tiles.warps,
            **early_launch(early),
        )
        if parts is not None:
            early = can and tiles.early
            sum_kernel[(ceil_div(N, 32),)](
                parts,
                bias,
                residual,
                out,
                M,
                N,
                **options,
                EARLY=early,
                SPLITS=tiles.splits,
                BLOCK_N=32,
                num_warps=4,
                **early_launch(early),
            )
    return out.view(*x.shape[:-1], width)


@triton.jit
def _finish(
    acc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    first,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Apply bias, activation and residual to the sums [N, M] of rows from `first` on, and store them."""
    rows: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N
    if HAS_BIAS:
        row = first + tl.arange(0, BLOCK_N)
        acc += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        width = N // 2
        first = first // 2
        # plain torch rounds the GEMM's result before the activation; so does this
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
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    M,
    N,
    K,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    FP32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of the weight times all tokens, over one range of the inner dim."""
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    m = tl.arange(0, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K  # rows past the last are never stored
    steps = tl.cdiv(K, BLOCK_K)
    if EARLY:
        gdc_launch_dependents()
        line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
        ahead = steps * split // splits * BLOCK_K + tl.arange(0, 8) * line
        fetch(w_row + tl.minimum(ahead, K - 1)[None, :])
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(steps * split // splits, steps * (split + 1) // splits, num_stages=STAGES):
        k = step * BLOCK_K + depth
        if EVEN:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=m[None, :] < M, other=0.0)
        else:
            w = tl.load(w_row + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + m[None, :] * K + k[:, None], mask=(m[None, :] < M) & (k[:, None] < K), other=0.0)
        acc = tl.dot(w, x, acc, input_precision="tf32x3" if FP32 else "tf32")
    if SPLIT:
        part_ptr += split.to(tl.int64) * N * BLOCK_M
        tl.store(part_ptr + n.to(tl.int64)[:, None] * BLOCK_M + m[None, :], acc, mask=n[:, None] < N)
    else:
        _finish(
            acc, bias_ptr, residual_ptr, out_ptr, tile * BLOCK_N, M, N, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK_M, BLOCK_N
        )


@triton.jit
def sum_kernel(
    part_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the parts, always in the same order, and finish."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = n.to(tl.int64)[:, None] * BLOCK_M + m[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    part = tl.cast(N, tl.int64) * BLOCK_M
    for split in tl.static_range(SPLITS):
        acc += tl.load(part_ptr + split * part + at, mask=n[:, None] < N, other=0.0)
    first = tl.program_id(0) * BLOCK_N
    _finish(acc, bias_ptr, residual_ptr, out_ptr, first, M, N, HAS_BIAS, HAS_RESIDUAL, GATED, BLOCK_M, BLOCK_N)


def normed(x: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
    """The RMS norm of rows; the next kernel may start before it ends, but it starts after the previous one ended."""
    out, block = torch.empty_like(x), min(8192, power_of_two(x.shape[1]))
    norm_kernel[(len(x),)](
        x, weight, out, x.shape[1], eps, EARLY=early, BLOCK=block, num_warps=max(1, min(8, block // 512))
    )
    return out


@triton.jit
def norm_kernel(x_ptr, weight_ptr, out_ptr, K, eps, EARLY: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row): x / √(mean x² + eps) · weight."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * K
    at = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, K, BLOCK):
        x = tl.load(x_ptr + row + begin + at, mask=begin + at < K, other=0.0).to(tl.float32)
        squares += x * x
    inverse = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    for begin in range(0, K, BLOCK):
        inside = begin + at < K
        x = tl.load(x_ptr + row + begin + at, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + begin + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row + begin + at, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)
