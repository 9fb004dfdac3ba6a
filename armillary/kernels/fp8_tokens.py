"""Operands of fp8 products with a power of two as scale of every token, in one pass: see fp8_tokens_triton.py.

Products along a token take the rows and their scales; where tokens are summed, for a weight's gradient, one scale is
for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.kernels.fp8_operands import ALIGN, Operand, Scaled, Source
from armillary.kernels.launch import ceil_div, on, power_of_two

# M rows (tokens), K columns

_NUMBERS, _A_WARP = 8192, 1024
"""numbers that a program makes where rows are shorter, and that a warp takes"""
_TURN = (128, 128, 8)
"""rows, columns and warps of a tile that is transposed"""


def token_operand(
    source: Source, dtype: torch.dtype, *, rows: bool = True, turned: bool = True
) -> Operand:
    """Both ways, or one. A norm's statistics are made on the way, into the source's mean and rstd."""
    from armillary.kernels.fp8_tokens_triton import rows_kernel

    M, K = source.shape
    q = torch.empty(M, K, dtype=dtype, device=source.x.device)
    scale = torch.empty(M, 1, dtype=torch.float32, device=q.device)
    top = torch.zeros((), dtype=torch.float32, device=q.device)
    if q.numel():
        block = power_of_two(K)
        held = max(1, _NUMBERS // block)
        tensors, flags = source.tensors(), source.flags()
        x, dy = tensors[:2]
        assert x is not None and dy is not None
        with on(q):
            rows_kernel[(ceil_div(M, held),)](
                *tensors, q, scale, top, M, K, x.stride(0), dy.stride(0), source.eps, **flags,
                LARGEST=torch.finfo(dtype).max, HELD=held, BLOCK=block,
                num_warps=max(4, min(32, held * block // _A_WARP)),
            )  # fmt: skip
    made = Scaled(q, scale)
    return Operand(rows=made if rows else None, turned=turn(made, top) if turned else None, amax=(top, top))


def turn(rows: Scaled, top: Tensor) -> Scaled:
    """The rows transposed, at the largest of their scales."""
    from armillary.kernels.fp8_tokens_triton import turn_kernel

    (M, K), dtype = rows.values.shape, rows.values.dtype
    padded = ceil_div(M, ALIGN) * ALIGN
    turned = torch.empty(K, padded, dtype=dtype, device=rows.values.device)
    block_m, block_k, warps = _TURN
    if turned.numel():
        with on(turned):
            turn_kernel[(ceil_div(padded, block_m) * ceil_div(K, block_k),)](
                rows.values, rows.scale, top, turned, M, K, padded, LARGEST=torch.finfo(dtype).max, BLOCK_M=block_m,
                BLOCK_K=block_k, num_warps=warps,
            )  # fmt: skip
    return Scaled(turned, top)
