"""RMSNorm and LayerNorm over the last dim, alone or after adding a residual.

y = x̂·w + b with x̂ = x·rsqrt(mean(x²) + ε) (Zhang & Sennrich, arXiv 1910.07467) or (x − mean)·rsqrt(var + ε) (Ba et
al., arXiv 1607.06450); `plus_one` is Gemma's 1 + w. Statistics are at least fp32 for every dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import (
    Case,
    Op,
    OpWork,
    Version,
    compiled,
    in_liger,
    in_triton,
    refuses_fp64,
    rows_to_check,
)
from armillary.spec.arithmetic import non_gemm_ops


@dataclass(frozen=True, kw_only=True)
class NormCase(Case):
    """Rows to be normalised."""

    rows: int  # tokens, or tokens times heads
    columns: int
    kind: str = "rms"  # 'rms' or 'layer'
    weight: bool = True
    bias: bool = False
    plus_one: bool = False  # whether the weight is 1 + w


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    """The reference."""
    wide = widen(x)
    scale = None if weight is None else widen(weight) + 1.0 if plus_one else widen(weight)
    shift = None if bias is None else widen(bias)
    if kind == "layer":
        return F.layer_norm(wide, (x.shape[-1],), scale, shift, eps).to(x.dtype)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if scale is None else y * scale
    return (y if shift is None else y + shift).to(x.dtype)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str = "rms",
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), as between two sublayers of a block."""
    summed = x + residual
    return norm(summed, weight, bias, eps, kind, plus_one), summed


# --- for CPUs


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    """Fewer torch calls for a single row, whose 1/rms is a Python number."""
    if kind != "rms" or bias is not None or x.numel() != x.shape[-1]:
        return norm(x, weight, bias, eps, kind, plus_one)
    wide = widen(x).view(-1)
    y = wide * (float(wide.dot(wide)) / wide.numel() + eps) ** -0.5
    if weight is not None:
        y *= widen(weight) + 1.0 if plus_one else weight
    return y.to(x.dtype).view_as(x)


# --- by torch's fused kernels


def torch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    scale = weight + 1.0 if weight is not None and plus_one else weight
    if kind == "layer":
        return F.layer_norm(x, (x.shape[-1],), scale, bias, eps)
    y = F.rms_norm(x, (x.shape[-1],), scale, eps)
    return y if bias is None else y + bias


def _adding(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`add_norm` by this norm."""

    def add(x: Tensor, residual: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return norm(summed, *arguments), summed

    return add


row_add_norm, torch_add_norm = _adding(row_norm), _adding(torch_norm)


# --- the ops


def _inputs(case: NormCase, generator: torch.Generator) -> tuple[Any, ...]:
    randn = partial(case.normal, generator)
    weight = randn(case.columns) * 0.1 + (0.0 if case.plus_one else 1.0) if case.weight else None
    bias = randn(case.columns) if case.bias else None
    return randn(case.rows, case.columns), weight, bias, 1e-6, case.kind, case.plus_one


def _add_inputs(case: NormCase, generator: torch.Generator) -> tuple[Any, ...]:
    x, *rest = _inputs(case, generator)
    return (x, case.normal(generator, *x.shape), *rest)


def _work(case: NormCase, *, residual: bool = False) -> OpWork:
    sizes: dict[str, Any] = {"dtype": case.dtype, "kind": case.kind, "residual": residual}
    forward = non_gemm_ops.norm("norm", case.rows, case.columns, **sizes)
    return OpWork.of(forward, non_gemm_ops.norm_backward("norm", case.rows, case.columns, **sizes))


def _small(case: NormCase) -> NormCase:
    return replace(case, rows=rows_to_check(case, case.rows, case.columns))


def _not_pairs(case: NormCase) -> str | None:
    why = None if 2048 < case.columns <= 8192 else "pairs of rows are for 2,049 to 8,192 columns"
    return refuses_fp64(case) or why


def _not_liger(case: NormCase) -> str | None:
    is_layer = case.kind == "layer"
    alike = case.weight and case.bias == is_layer and not (case.plus_one and is_layer)
    return None if alike else "Liger has a weight always, and a bias in layer norms only"


def _not_liger_sum(case: NormCase) -> str | None:
    return "Liger adds a residual in RMS norms only" if case.kind == "layer" else _not_liger(case)


_CASES = {
    "llama-3-8b": NormCase(rows=16384, columns=4096),
    "llama-3-70b": NormCase(rows=8192, columns=8192),
    "gemma-2-27b": NormCase(rows=8192, columns=4608, plus_one=True),
    "gpt-3": NormCase(rows=8192, columns=12288, kind="layer", bias=True),
    "olmo-7b, no weight": NormCase(rows=16384, columns=4096, kind="layer", weight=False),
    "llama-3-405b": NormCase(rows=4096, columns=16384),
}
NORM = Op(
    name="norm",
    reference=norm,
    versions=(
        in_triton("norm.norm_triton", "norm"),
        in_triton("norm.norm_triton", "norm_pairs", name="triton, pairs", refuses=_not_pairs),
        compiled(norm),
        Version(name="torch", run=torch_norm),
        in_liger("norm", _not_liger),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0, 1, 2),
    cases={
        **_CASES,
        "opt-6.7b": NormCase(rows=16384, columns=4096, kind="layer", bias=True),
        "qwen3-14b": NormCase(rows=16384, columns=5120),
        "qwen3-8b, head norms": NormCase(rows=8192 * 40, columns=128),
    },
    small=_small,
)
ADD_NORM = Op(
    name="add_norm",
    reference=add_norm,
    versions=(
        in_triton("norm.norm_triton", "add_norm"),
        in_triton("norm.norm_triton", "add_norm_pairs", name="triton, pairs", refuses=_not_pairs),
        compiled(add_norm),
        Version(name="torch", run=torch_add_norm),
        in_liger("add_norm", _not_liger_sum),
    ),
    inputs=_add_inputs,
    work=lambda case: _work(case, residual=True),
    grads=(0, 1, 2, 3),
    cases=_CASES,
    small=_small,
)
