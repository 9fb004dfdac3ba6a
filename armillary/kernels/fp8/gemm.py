"""GEMMs of fp8 operands for training: by cuBLASLt where torch has it, which also adds inside the GEMM and accumulates
in fp32, or by torch; on a CPU by a GEMM of the dequantised operands.

Forward GEMMs keep sums in the tensor cores' own accumulators; GEMMs for gradients, which add up many more and smaller
numbers, promote them to fp32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.requirements import note_once
from armillary.kernels.fp8.operands import ScaledTensor
from armillary.kernels.gemm.cublaslt import CublasLtFp8Gemm

# R rows of the result, C its columns, S what is summed over

# takes both operands, the addend, and the output
RunGemm = Callable[[ScaledTensor, ScaledTensor, Tensor | None, Tensor | None], Tensor]


class Fp8Gemm:
    """a_RS·b_CSᵀ by the algorithm that cuBLASLt proposes first: timed on a hot GPU, others gain 1 % at most, and for
    per-row scales there is no other."""

    def __init__(self) -> None:
        self._cache: dict[tuple[Any, ...], RunGemm] = {}

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
        """The result in `dtype`, plus `add` where it is given, which may be `out` itself."""
        if not a.values.is_cuda or not a.values.numel() or not b.values.numel():
            return _plain(a, b, dtype, add, out)
        shape = len(a.values), len(b.values), a.values.shape[1]
        by_row = a.scale.dim() == 2
        key = (*shape, a.values.dtype, b.values.dtype, dtype, by_row, fast)
        if key not in self._cache:
            self._cache[key] = _make(*key)
        return self._cache[key](a, b, add, out)


def _make(
    R: int, C: int, S: int, a: torch.dtype, b: torch.dtype, out: torch.dtype, by_row: bool, fast: bool
) -> RunGemm:
    try:
        gemm = CublasLtFp8Gemm(R, C, S, a=a, b=b, out=out, by_row=by_row, fast=fast)
        if not gemm.proposed:
            raise RuntimeError("cuBLASLt proposes none")
    except (OSError, RuntimeError, AttributeError) as error:
        note_once(f"fp8 GEMMs go through torch: {error}")
        return partial(_by_torch, out, fast)
    algorithm = gemm.proposed[0]
    return lambda a, b, add, out: gemm.scaled(a, b, algorithm, add, out)


def _by_torch(
    dtype: torch.dtype, fast: bool, a: ScaledTensor, b: ScaledTensor, add: Tensor | None, out: Tensor | None
) -> Tensor:
    y = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return _finish(y, dtype, add, out)


def _plain(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, add: Tensor | None, out: Tensor | None) -> Tensor:
    wide = [each.values.to(torch.float32) * each.scale for each in (a, b)]
    return _finish(wide[0] @ wide[1].t(), dtype, add, out)


def _finish(y: Tensor, dtype: torch.dtype, add: Tensor | None, out: Tensor | None) -> Tensor:
    if add is not None:
        y = y.to(torch.float32) + add
    return y.to(dtype) if out is None else out.copy_(y)
