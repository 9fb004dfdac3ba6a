"""Products of fp8 operands for training: by cuBLASLt where torch has it, which also adds on the way and sums in fp32,
or by torch; on a CPU by multiplying what the rounded operands stand for.

Forward products keep sums in the tensor cores' own format, those of gradients, which add up many more and smaller
numbers, are carried over into fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.requirements import note_once
from armillary.kernels.fp8.operands import ScaledTensor
from armillary.kernels.gemm.cublaslt import CublasLtFp8Gemm

# R rows of the result, C its columns, S what is summed over

Made = Callable[[ScaledTensor, ScaledTensor, Tensor | None, Tensor | None], Tensor]
"""takes both operands, what is added, and where the result goes"""


class Fp8Gemm:
    """a_RS·b_CSᵀ by the algorithm that cuBLASLt proposes first: timed on a hot chip, others gain 1 % at most, and for
    scales a row there is no other."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Made] = {}

    def __call__(
        self,
        a: ScaledTensor,
        b: ScaledTensor,
        dtype: torch.dtype,
        *,
        fast: bool,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """In `dtype`, plus `add` where it is given, which may be `out` itself."""
        if not a.values.is_cuda or not a.values.numel() or not b.values.numel():
            return _plain(a, b, dtype, add, out)
        shape = len(a.values), len(b.values), a.values.shape[1]
        by_row = a.scale.dim() == 2
        at = (*shape, a.values.dtype, b.values.dtype, dtype, by_row, fast)
        if at not in self._made:
            self._made[at] = self._make(*at)
        return self._made[at](a, b, add, out)

    def _make(
        self, R: int, C: int, S: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, by_row: bool, fast: bool
    ) -> Made:
        try:
            product = CublasLtFp8Gemm(R, C, S, a=a, b=b, out=out, by_row=by_row, fast=fast)
        except (OSError, RuntimeError, AttributeError) as error:
            note_once(f"fp8 products go through torch: {error}")
            return _by_torch(out, fast)
        if not product.proposed:
            note_once("fp8 products go through torch: cuBLASLt proposes none")
            return _by_torch(out, fast)
        algorithm = product.proposed[0]
        return lambda a, b, add, out: product.scaled(a, b, algorithm, add, out)


def _by_torch(dtype: torch.dtype, fast: bool) -> Made:
    def run(a: ScaledTensor, b: ScaledTensor, add: Tensor | None, out: Tensor | None) -> Tensor:
        half = torch._scaled_mm(
            a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return _put(half, dtype, add, out)

    return run


def _plain(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, add: Tensor | None, out: Tensor | None) -> Tensor:
    wide = [each.values.to(torch.float32) * each.scale for each in (a, b)]
    return _put(wide[0] @ wide[1].t(), dtype, add, out)


def _put(made: Tensor, dtype: torch.dtype, add: Tensor | None, out: Tensor | None) -> Tensor:
    if add is not None:
        made = made.to(torch.float32) + add
    return made.to(dtype) if out is None else out.copy_(made)
