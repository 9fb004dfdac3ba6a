"""Packed experts in Triton: products of some rows with a vector, a tile of a weight as numbers for tensor cores, and
all of a stack as 16-bit numbers."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on
from armillary.kernels.moe.packed_stack import PackedStack
from armillary.kernels.quantized.packed_values_triton import fp4_number, fp4_pair, scale_number

# K inputs of a row, C chunks of 32 of them; codes of 4 bits come in words of eight columns or bytes of two

_ROWS, _COLUMNS = 8, 512  # of a program that dequantises


def stored(weight: Tensor | PackedStack) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(numbers or codes, scales, zeros)."""
    return weight[:3] if isinstance(weight, PackedStack) else (weight, None, None)


def packed_options(weight: Tensor | PackedStack) -> dict[str, Any]:
    """Compile-time options of kernels for a stack."""
    if not isinstance(weight, PackedStack):
        return {"KIND": "", "ZEROS": False, "SCALE_GROUP": 0}
    return {"KIND": weight.format.kind, "ZEROS": weight.format.zeros, "SCALE_GROUP": weight.group}


@triton.jit
def packed_products(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    row,
    x_ptr,
    norm_ptr,
    begin,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """[ROWS, DEPTH / 32] sums over chunks of 32 columns from `begin` on, for these rows [ROWS, 1] of all experts'. One
    thread has the four words of a chunk."""
    SUM: tl.constexpr = 16 if GROUP < 32 else 32  # columns with one scale
    if KIND == "int8" or KIND == "fp8":
        sums, inputs = _byte_products(codes_ptr, row, x_ptr, norm_ptr, begin, K, HAS_NORM, KIND, ROWS, DEPTH, SUM)
    else:
        sums, inputs = _word_products(codes_ptr, row, x_ptr, norm_ptr, begin, K, HAS_NORM, KIND, ROWS, DEPTH, SUM)
    column = begin + SUM * tl.arange(0, DEPTH // SUM)
    at, inside = row * ((K + GROUP - 1) // GROUP) + (column // GROUP)[None, :], (column < K)[None, :]
    if KIND == "int8" or KIND == "int4":
        if ZEROS:
            sums -= tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32) * inputs
        else:
            sums -= (128.0 if KIND == "int8" else 8.0) * inputs
    scale = scale_number(tl.load(scale_ptr + at, mask=inside, other=0), KIND)
    if KIND == "nvfp4":
        scale = scale / tl.load(zero_ptr + row)
    return tl.sum(tl.reshape(sums * scale, (ROWS, DEPTH // 32, 32 // SUM)), 2)


@triton.jit
def _word_products(
    codes_ptr,
    row,
    x_ptr,
    norm_ptr,
    begin,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SUM: tl.constexpr,
):
    """(sums of codes times inputs [ROWS, chunks], sums of inputs [1, chunks])."""
    word = begin // 8 + tl.arange(0, DEPTH // 8)
    inside = word < K // 8
    w = tl.load(
        codes_ptr.to(tl.pointer_type(tl.int32)) + row * (K // 8) + word[None, :],
        mask=inside[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    sums, inputs = tl.zeros([ROWS, DEPTH // 8], tl.float32), tl.zeros([1, DEPTH // 8], tl.float32)
    for j in tl.static_range(4):
        first = _input(x_ptr, norm_ptr, 8 * word + j, inside, HAS_NORM)[None, :]
        second = _input(x_ptr, norm_ptr, 8 * word + j + 4, inside, HAS_NORM)[None, :]
        if KIND == "int4":
            low, high = int4_pair(w, j)
            inputs += first + second
        else:
            low, high = fp4_pair(w, j)
        sums += low * first
        sums += high * second
    sums = tl.sum(tl.reshape(sums, (ROWS, DEPTH // SUM, SUM // 8)), 2)
    inputs = tl.sum(tl.reshape(inputs, (1, DEPTH // SUM, SUM // 8)), 2)
    if KIND == "int4":
        return sums - 128.0 * inputs, inputs
    else:
        return sums * 16384.0, inputs


@triton.jit
def _byte_products(
    codes_ptr,
    row,
    x_ptr,
    norm_ptr,
    begin,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    SUM: tl.constexpr,
):
    column = begin + tl.arange(0, DEPTH)
    inside = column < K
    w = tl.load(codes_ptr + row * K + column[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")
    x = _input(x_ptr, norm_ptr, column, inside, HAS_NORM)[None, :]
    numbers = (w.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else w).to(tl.float32)
    sums = tl.sum(tl.reshape(numbers * x, (ROWS, DEPTH // SUM, SUM)), 2)
    return sums, tl.sum(tl.reshape(x, (1, DEPTH // SUM, SUM)), 2)


@triton.jit
def int4_pair(w, J: tl.constexpr):
    """The codes at the nibbles J and J + 4 as fp32, plus 128: the last bits of two bf16 numbers."""
    both = ((w >> (4 * J)) & 0x000F000F) | 0x43004300
    return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _input(x_ptr, norm_ptr, column, inside, HAS_NORM: tl.constexpr):
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        x = x * tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def packed_tile(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    row,
    begin,
    K,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[ROWS, COLUMNS] numbers in fp32 from the column `begin` on, 0 past the last."""
    SUM: tl.constexpr = 16 if GROUP < 32 else 32
    column = begin + SUM * tl.arange(0, COLUMNS // SUM)
    at, inside = row * tl.cdiv(K, GROUP) + (column // GROUP)[None, :], (column < K)[None, :]
    scale = scale_number(tl.load(scale_ptr + at, mask=inside, other=0), KIND)
    if KIND == "nvfp4":
        scale = scale / tl.load(zero_ptr + row)
    numbers = tl.reshape(_tile_codes(codes_ptr, row, begin, K, KIND, ROWS, COLUMNS), (ROWS, COLUMNS // SUM, SUM))
    if KIND == "int8" or KIND == "int4":
        if ZEROS:
            numbers -= tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)[:, :, None]
        else:
            numbers -= 128.0 if KIND == "int8" else 8.0
    scale = tl.where(inside, scale, 0.0)
    return tl.reshape(numbers * scale[:, :, None], (ROWS, COLUMNS))


@triton.jit
def _tile_codes(codes_ptr, row, begin, K, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes as fp32, fp4 and fp8 as the numbers they are."""
    if KIND == "int8" or KIND == "fp8":
        column = begin + tl.arange(0, COLUMNS)
        w = tl.load(codes_ptr + row * K + column[None, :], mask=(column < K)[None, :], other=0)
        return (w.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else w).to(tl.float32)
    else:
        at = begin // 2 + tl.arange(0, COLUMNS // 2)
        w = tl.load(codes_ptr + row * (K // 2) + at[None, :], mask=(at < K // 2)[None, :], other=0).to(tl.int32)
        if KIND == "int4":
            return tl.reshape(tl.join((w & 15).to(tl.float32), (w >> 4).to(tl.float32)), (ROWS, COLUMNS))
        else:
            return tl.reshape(tl.join(fp4_number(w, 0), fp4_number(w, 1)), (ROWS, COLUMNS))


def dequantised(stack: PackedStack, template: Tensor) -> Tensor:
    """`packed_stack.reference` in one kernel."""
    codes, scale, zero, format = stack.contiguous()
    experts, N, K = stack.shape
    out = torch.empty(stack.shape, dtype=template.dtype, device=codes.device)
    with on(out):
        dequantise_kernel[(ceil_div(experts * N, _ROWS), ceil_div(K, _COLUMNS))](
            codes,
            scale,
            zero,
            out,
            experts * N,
            K,
            GROUP=stack.group,
            KIND=format.kind,
            ZEROS=format.zeros,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return out


@triton.jit
def dequantise_kernel(
    codes_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (rows, columns)."""
    n, begin = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    numbers = packed_tile(codes_ptr, scale_ptr, zero_ptr, row, begin, K, GROUP, KIND, ZEROS, ROWS, COLUMNS)
    column = (begin + tl.arange(0, COLUMNS))[None, :]
    tl.store(out_ptr + row * K + column, numbers.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (column < K))
