"""Skinny GEMMs over packed weights in Triton, for 2 to 64 tokens: codes become 16-bit numbers in registers, and tensor
cores multiply them. The weight is the left operand; where its rows are too few tiles, the inner dim is split."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, fitting_stages, on, power_of_two
from armillary.kernels.gemm.skinny_triton import sum_kernel
from armillary.kernels.quantized.packed_values_triton import fp4_number, moved, scale_number

# M tokens, K inputs, N rows of the weight, G scales per row


@dataclass(frozen=True, kw_only=True)
class PackedSkinnyTiles:
    """Tile sizes of a skinny GEMM over packed weights."""

    rows: int = 64  # of the weight per program
    splits: int = 1  # programs that share the inner dim of the same rows
    stages: int = 4  # steps in flight
    warps: int = 4


def run_skinny(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int, tiles: PackedSkinnyTiles
) -> Tensor:
    """x [M, K] through codes [N, …]; the result is [M, N]."""
    (M, K), N = x.shape, len(codes)
    out, block_m = x.new_empty(M, N), max(16, power_of_two(M))
    parts = torch.empty(tiles.splits, N, block_m, dtype=torch.float32, device=x.device) if tiles.splits > 1 else out
    by_row = scale.shape[1] == 1
    with on(x):
        packed_kernel[(ceil_div(N, tiles.rows), tiles.splits)](
            x,
            codes,
            scale,
            zero,
            parts,
            M,
            N,
            K,
            scale.shape[1],
            KIND=kind,
            ZEROS=zero is not None and kind != "nvfp4",
            BY_ROW=by_row,
            GROUP=K if by_row else group,
            SPLIT=tiles.splits > 1,
            BLOCK_M=block_m,
            BLOCK_N=tiles.rows,
            BLOCK_K=128 if by_row else min(128, max(32, group)),
            STAGES=fitting_stages(x, 128 * (tiles.rows + 2 * block_m), tiles.stages),
            num_warps=tiles.warps,
        )
        if tiles.splits > 1:
            sum_kernel[(ceil_div(N, 32),)](
                parts,
                None,
                None,
                out,
                M,
                N,
                EARLY=False,
                HAS_BIAS=False,
                HAS_RESIDUAL=False,
                GATED=False,
                SPLITS=tiles.splits,
                BLOCK_M=block_m,
                BLOCK_N=32,
                num_warps=4,
            )
    return out


@triton.jit
def number_of_nibble(w, zero, PLACE: tl.constexpr, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """The nibble at PLACE of words, less its zero, in fp32: put into the mantissa of 128."""
    if KIND != "int4":
        return fp4_number(w, PLACE)
    else:
        number = ((moved(w, 16 - 4 * PLACE) & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)
        return number - (zero.to(tl.float32) + 128.0 if ZEROS else 136.0)


@triton.jit
def number_of_byte(w, zero, KIND: tl.constexpr, ZEROS: tl.constexpr):
    """Codes less their zero."""
    if KIND == "fp8":
        return w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return w.to(tl.float32) - (zero.to(tl.float32) if ZEROS else 128.0)


@triton.jit
def _inputs(x_ptr, m, k, M, K):
    return tl.load(x_ptr + m[None, :] * K + k[:, None], mask=m[None, :] < M, other=0.0)


@triton.jit
def packed_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    M,
    N,
    K,
    G,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    BY_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of the weight times all tokens, over one range of the inner dim."""
    tile, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    four: tl.constexpr = KIND != "int8" and KIND != "fp8"
    depth: tl.constexpr = 128 if four else BLOCK_K
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]  # rows past the last are never stored
    steps = K // depth
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(steps * split // splits, steps * (split + 1) // splits, num_stages=STAGES):
        begin = step * depth
        zero = 0
        if four:
            w = tl.load(w_ptr + row * (K // 8) + step * 16 + tl.arange(0, 16)[None, :], eviction_policy="evict_first")
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(4):
                at = row * G + (begin + 32 * j) // GROUP
                if GROUP < 32:
                    at = at + (2 * tl.arange(0, 16) // GROUP)[None, :]
                if ZEROS:
                    zero = tl.load(zero_ptr + at)
                first = number_of_nibble(w, zero, j, KIND, ZEROS)
                second = number_of_nibble(w, zero, j + 4, KIND, ZEROS)
                if GROUP < 32:
                    scale = scale_number(tl.load(scale_ptr + at), KIND)
                    first, second = first * scale, second * scale
                numbers = tl.reshape(
                    tl.join(first.to(x_ptr.dtype.element_ty), second.to(x_ptr.dtype.element_ty)), (BLOCK_N, 32)
                )
                x = _inputs(x_ptr, m, begin + 32 * j + tl.arange(0, 32), M, K)
                part = tl.dot(numbers, x, part)
                if GROUP < 128 and GROUP >= 32:
                    acc += part * scale_number(tl.load(scale_ptr + at), KIND)
                    part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if BY_ROW or GROUP < 32:
                acc += part
            elif GROUP >= 128:
                acc += part * scale_number(tl.load(scale_ptr + row * G + begin // GROUP), KIND)
        else:
            w = tl.load(w_ptr + row * K + begin + tl.arange(0, BLOCK_K)[None, :], eviction_policy="evict_first")
            at = row * G + (0 if BY_ROW else begin // GROUP)
            if ZEROS:
                zero = tl.load(zero_ptr + at)
            x = _inputs(x_ptr, m, begin + tl.arange(0, BLOCK_K), M, K)
            numbers = number_of_byte(w, zero, KIND, ZEROS).to(x_ptr.dtype.element_ty)
            if BY_ROW:
                acc = tl.dot(numbers, x, acc)
            else:
                acc += tl.dot(numbers, x) * tl.load(scale_ptr + at).to(tl.float32)
    if BY_ROW:
        acc *= scale_number(tl.load(scale_ptr + row), KIND)
    if KIND == "nvfp4":
        acc /= tl.load(zero_ptr + row)
    if SPLIT:
        at = (split.to(tl.int64) * N + n.to(tl.int64)[:, None]) * BLOCK_M + m[None, :]
        tl.store(out_ptr + at, acc, mask=n[:, None] < N)
    else:
        at = m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (m[None, :] < M))
