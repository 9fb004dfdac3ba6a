"""Skinny GEMMs over packed weights in Triton, for 2 to 64 tokens: codes become 16-bit numbers in registers, and tensor
cores multiply them. The weight is the left operand; where its rows are too few tiles, the inner dim is split."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, fitting_stages, on, power_of_two
from armillary.kernels.gemm.skinny_triton import sum_kernel
from armillary.kernels.quantized.packed_values_triton import (
    fp4_number,
    high_bits,
    k_pair,
    k_row,
    moved,
    pair_of,
    scale_number,
    words_of_row,
)

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
            ZEROS=zero is not None and kind not in ("nvfp4", "table"),
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
    if KIND == "table":  # `zero` points to it
        return tl.load(zero + ((w >> (4 * PLACE)) & 15))
    elif KIND != "int4":
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
    k_quant: tl.constexpr = KIND == "q4_k" or KIND == "q5_k" or KIND == "q6_k"
    depth: tl.constexpr = 128 if four else BLOCK_K
    m, n = tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]  # rows past the last are never stored
    steps = K // depth
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(steps * split // splits, steps * (split + 1) // splits, num_stages=STAGES):
        begin = step * depth
        zero = zero_ptr if KIND == "table" else 0
        if four:
            word, w_row = step * 16 + tl.arange(0, 16)[None, :], w_ptr + row * words_of_row(K // 8, KIND)
            w = tl.load(w_row + word, eviction_policy="evict_first")
            h = high_bits(w_row, word, K // 8, KIND)
            part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(4):
                at = row * G + (begin + 32 * j) // GROUP
                if GROUP < 32:
                    at = at + (2 * tl.arange(0, 16) // GROUP)[None, :]
                if ZEROS:
                    zero = tl.load(zero_ptr + at)
                if k_quant:
                    column = 2 * pair_of(word, j, KIND)
                    first, second = k_pair(w, h, k_row(scale_ptr, row, K, KIND), column, K, j, KIND)
                else:
                    first = number_of_nibble(w, zero, j, KIND, ZEROS)
                    second = number_of_nibble(w, zero, j + 4, KIND, ZEROS)
                if GROUP < 32 and not k_quant:
                    scale = scale_number(tl.load(scale_ptr + at), KIND)
                    first, second = first * scale, second * scale
                numbers = tl.reshape(
                    tl.join(first.to(x_ptr.dtype.element_ty), second.to(x_ptr.dtype.element_ty)), (BLOCK_N, 32)
                )
                at_x = tl.arange(0, 32)
                at_x = begin + (at_x // 8 * 32 + 8 * j + at_x % 8 if k_quant else 32 * j + at_x)
                x = _inputs(x_ptr, m, at_x, M, K)
                part = tl.dot(numbers, x, part)
                if GROUP < 128 and GROUP >= 32 and not k_quant:
                    acc += part * scale_number(tl.load(scale_ptr + at), KIND)
                    part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            if BY_ROW or GROUP < 32 or k_quant:
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
