"""dropout(act(x + bias)) with a mask that is a pure function of the seed: nothing is stored for the backward but x.

The seed is a tensor on the device, so that a CUDA graph replayed with another seed drops other elements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.compile import compiled
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, Work, in_triton, rows_to_check
from armillary.kernels.core.philox import keep_scale, kept
from armillary.kernels.pointwise.activation import ACTIVATIONS
from armillary.spec.arithmetic.ops import elementwise


@dataclass(frozen=True, kw_only=True)
class DropoutCase(Case):
    """What comes out of a product."""

    rows: int
    """tokens"""
    columns: int
    """numbers a token"""
    activation: str = "gelu"
    """see gated.ACTIVATIONS; 'none' for a plain dropout"""
    p: float = 0.1
    """share that is dropped"""
    bias: bool = True
    """whether a bias is added first"""


def bias_act_dropout(x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float) -> Tensor:
    """The reference; `seed` is an int64 tensor with one element, on x's device."""
    wide = widen(x) if bias is None else widen(x) + widen(bias)
    y = ACTIVATIONS[activation](wide)
    if p > 0:
        y = y * (kept(seed, x.numel(), p).view(x.shape) * keep_scale(p))
    return y.to(x.dtype)


def torch_dropout(x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float) -> Tensor:
    """The same with torch's own generator: other bits, so it is timed beside but never chosen."""
    return F.dropout(ACTIVATIONS[activation](x if bias is None else x + bias), p)


def _inputs(case: DropoutCase, generator: torch.Generator) -> tuple[Any, ...]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device).to(case.torch_dtype)

    seed = torch.randint(0, 2**62, (1,), generator=generator, device=case.device)
    return randn(case.rows, case.columns), randn(case.columns) if case.bias else None, seed, case.activation, case.p


def _work(case: DropoutCase) -> Work:
    """Forward: x in, y out. Backward: dy in, dx out, and x in where there is an activation; the mask is drawn again."""
    count, read = case.rows * case.columns, 1 if case.activation == "none" else 2
    forward = elementwise("bias_act_dropout", count, dtype=case.dtype, flops_each=8)
    return Work.of(forward, elementwise("bias_act_dropout", count, dtype=case.dtype, inputs=read, flops_each=14))


BIAS_ACT_DROPOUT = Op(
    name="bias_act_dropout",
    reference=bias_act_dropout,
    versions=(
        in_triton("pointwise.bias_act_dropout_triton", "bias_act_dropout"),
        compiled(bias_act_dropout),
    ),
    rivals=(replace(compiled(torch_dropout), name="compile, torch's bits"),),
    inputs=_inputs,
    work=_work,
    grads=(0, 1),
    cases={
        "gpt-3, up": DropoutCase(rows=4096, columns=49152),
        "gpt-3, residual": DropoutCase(rows=16384, columns=12288, activation="none"),
        "opt-6.7b, up": DropoutCase(rows=16384, columns=16384, activation="relu"),
        "gpt-2-xl, up": DropoutCase(rows=32768, columns=6400, activation="gelu_tanh"),
    },
    small=lambda case: replace(case, rows=rows_to_check(case, case.rows, 2 * case.columns)),
)
