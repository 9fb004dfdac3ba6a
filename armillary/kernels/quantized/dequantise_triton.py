"""A packed weight as 16-bit numbers, in one pass: for many tokens, whose GEMM takes far longer than that."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on
from armillary.kernels.quantized.packed_values_triton import (
    high_bits,
    k_pair,
    k_row,
    pair_of,
    scale_number,
    words_of_row,
)
from armillary.kernels.quantized.skinny_packed_triton import number_of_byte, number_of_nibble

# N rows, K columns, G scales per row

_ROWS, _COLUMNS = 8, 1024


def dequantise(
    codes: Tensor, scale: Tensor, zero: Tensor | None, kind: str, group: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """[N, columns] in `dtype`."""
    N = len(codes)
    out = torch.empty(N, columns, dtype=dtype, device=codes.device)
    with on(out):
        dequantise_kernel[(ceil_div(N, _ROWS), ceil_div(columns, _COLUMNS))](
            codes,
            scale,
            zero,
            out,
            N,
            columns,
            scale.shape[1],
            KIND=kind,
            ZEROS=zero is not None and kind not in ("nvfp4", "table"),
            GROUP=1 << 30 if scale.shape[1] == 1 else group,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return out


@triton.jit
def dequantise_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    N,
    K,
    G,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (rows, columns)."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    begin = tl.program_id(1) * COLUMNS
    if KIND == "int8" or KIND == "fp8":
        column = (begin + tl.arange(0, COLUMNS))[None, :]
        inside = (n[:, None] < N) & (column < K)
        w = tl.load(w_ptr + row * K + column, mask=inside, other=0)
        at = row * G + column // GROUP
        zero = tl.load(zero_ptr + at, mask=inside, other=0) if ZEROS else 0
        numbers = number_of_byte(w, zero, KIND, ZEROS) * tl.load(scale_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(out_ptr + row * K + column, numbers.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        words: tl.constexpr = COLUMNS // 8
        word = begin // 8 + tl.arange(0, words)
        inside = (n[:, None] < N) & (8 * word[None, :] < K)
        w_row = w_ptr + row * words_of_row(K // 8, KIND)
        w = tl.load(w_row + word[None, :], mask=inside, other=0)
        h = high_bits(w_row, word[None, :], K // 8, KIND)
        divisor = tl.load(zero_ptr + row) if KIND == "nvfp4" else 1.0
        both = begin // 8 + tl.arange(0, 2 * words) // 2
        half = tl.arange(0, 2 * words) % 2
        for j in tl.static_range(4):
            begins = 2 * pair_of(word, j, KIND)[None, :]
            if KIND == "q4_k" or KIND == "q5_k" or KIND == "q6_k":
                first, second = k_pair(w, h, k_row(scale_ptr, row, K, KIND), begins, K, j, KIND)
            else:
                at = row * G + begins // GROUP
                zero = zero_ptr if KIND == "table" else 0
                if ZEROS:
                    zero = tl.load(zero_ptr + at, mask=inside, other=0)
                scale = scale_number(tl.load(scale_ptr + at, mask=inside, other=0), KIND) / divisor
                first = number_of_nibble(w, zero, j, KIND, ZEROS) * scale
                second = number_of_nibble(w, zero, j + 4, KIND, ZEROS) * scale
            numbers = tl.reshape(tl.join(first, second), (ROWS, 2 * words)).to(out_ptr.dtype.element_ty)
            column = (2 * pair_of(both, j, KIND) + half)[None, :]
            tl.store(out_ptr + row * K + column, numbers, mask=(n[:, None] < N) & (column < K))
