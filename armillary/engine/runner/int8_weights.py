"""Weights and activations in 8 bits on a CPU: a scale for every row of a weight and for every token, sums in int32.

Scales are of a token alone, so an answer does not depend on what stands beside it in the batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


class Int8Dense:
    """x @ weightᵀ + bias with both factors rounded to 8 bits."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None = None) -> None:
        wide = weight_NK.detach().float()
        self.scale_N = wide.abs().amax(dim=1).clamp_min(1e-12) / 127
        rounded_NK = (wide / self.scale_N[:, None]).round().to(torch.int8)
        self._ops: Any = torch.ops.onednn if has_onednn() and onednn_is_exact() else None
        if self._ops is not None:
            self._packed = self._ops.qlinear_prepack(rounded_NK, None)
            self._zeros_N = torch.zeros(len(rounded_NK), dtype=torch.int32)
        else:
            self._weight_KN = rounded_NK.t()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale_T1 = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / 127
        y = self._product((wide / scale_T1).round().to(torch.int8)) * scale_T1
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _product(self, rounded_TK: Tensor) -> Tensor:
        """Sums in int32, times the weight's scales, in fp32."""
        if self._ops is None:
            return int_product(rounded_TK, self._weight_KN) * self.scale_N
        return _onednn_product(self._ops, rounded_TK, self._packed, self.scale_N, self._zeros_N)


def _onednn_product(ops: Any, rounded_TK: Tensor, packed: Tensor, scale_N: Tensor, zeros_N: Tensor) -> Tensor:
    return ops.qlinear_pointwise(  # type: ignore[no-any-return]
        rounded_TK, 1.0, 0, packed, scale_N, zeros_N, None, 1.0, 0, torch.float32, "none", [], ""
    )


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's products of whole numbers."""
    ops: Any = torch.ops.onednn
    return torch.backends.mkldnn.is_available() and hasattr(ops, "qlinear_pointwise")


def int_product(a_TK: Tensor, b_KN: Tensor) -> Tensor:
    """Sums of products of 8-bit numbers, as fp32; by fp32 where the CPU's own would saturate."""
    return torch._int_mm(a_TK, b_KN).float() if int_mm_is_exact() else a_TK.float() @ b_KN.float()


@cache
def int_mm_is_exact() -> bool:
    """Whether torch's int8 GEMM sums in int32 on this CPU, shown by the largest numbers there are."""
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 127 * 127 * 64).all())


@cache
def onednn_is_exact() -> bool:
    """Whether oneDNN sums these products in int32. Without VNNI, AVX2 adds pairs in 16 bits, where large ones saturate:
    shown by the largest numbers there are."""
    ops: Any = torch.ops.onednn
    rows, columns, depth = 4, 16, 64
    x_TK, weight_NK = (torch.full((size, depth), 127, dtype=torch.int8) for size in (rows, columns))
    scale_N, zeros_N = torch.ones(columns), torch.zeros(columns, dtype=torch.int32)
    sums = _onednn_product(ops, x_TK, ops.qlinear_prepack(weight_NK, None), scale_N, zeros_N)
    return bool((sums == 127 * 127 * depth).all())
