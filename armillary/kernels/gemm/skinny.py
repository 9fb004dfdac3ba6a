"""A linear layer for a few tokens, as decoding has it: the time is that of reading the weight once.

What stands before and after it is fused: an RMS norm of the input, SwiGLU over alternating gate and up rows, a
residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.compile import compiled
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version

# M tokens, K inputs, N rows of the weight (outputs, or twice the outputs when gated)

MOST_TOKENS = 64


def reference(
    x_MK: Tensor,
    weight_NK: Tensor,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
) -> Tensor:
    """residual + act(norm(x) @ weightᵀ); each part only where it is given."""
    if norm_K is not None:
        wide = widen(x_MK)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        x_MK = (wide * widen(norm_K)).to(x_MK.dtype)
    y = F.linear(x_MK, weight_NK)
    if gated:
        gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


@dataclass(frozen=True, kw_only=True)
class SmallLinearCase(Case):
    """A few tokens through a weight."""

    tokens: int
    """rows of x"""
    outputs: int
    """rows of the weight"""
    inputs: int
    """columns of x and of the weight"""
    norm: bool = False
    """an RMS norm before"""
    gated: bool = False
    """SwiGLU after"""
    residual: bool = False
    """a residual after"""


def inputs(case: SmallLinearCase, generator: torch.Generator) -> tuple[object, ...]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.torch_dtype)

    x, weight = normal(case.tokens, case.inputs), normal(case.outputs, case.inputs) * case.inputs**-0.5
    norm = normal(case.inputs) if case.norm else None
    width = case.outputs // 2 if case.gated else case.outputs
    residual = normal(case.tokens, width) if case.residual else None
    return x, weight, norm, residual, 1e-6, case.gated


def work(case: SmallLinearCase) -> OpWork:
    """The weight is read once; so are x and the residual, and the result is written once."""
    size, width = case.torch_dtype.itemsize, case.outputs // 2 if case.gated else case.outputs
    moved = case.outputs * case.inputs + case.tokens * (case.inputs + width * (2 if case.residual else 1))
    return OpWork(flops=2.0 * case.tokens * case.outputs * case.inputs, bytes=float(size * moved), ceiling="read")


def refuses(case: SmallLinearCase) -> str | None:
    """Why the Triton version cannot do a case."""
    if case.tokens > MOST_TOKENS:
        return f"it is for up to {MOST_TOKENS} tokens"
    if case.dtype == "fp64":
        return "it sums in fp32"
    return None


def _cases() -> dict[str, SmallLinearCase]:
    cases: dict[str, SmallLinearCase] = {}
    for tokens in (1, 8, 32):
        cases[f"up {tokens}"] = SmallLinearCase(tokens=tokens, outputs=14336, inputs=4096)
        cases[f"down {tokens}"] = SmallLinearCase(tokens=tokens, outputs=4096, inputs=14336)
    cases["norm, swiglu 8"] = SmallLinearCase(tokens=8, outputs=28672, inputs=4096, norm=True, gated=True)
    cases["residual 8"] = SmallLinearCase(tokens=8, outputs=4096, inputs=14336, residual=True)
    return cases


SMALL_LINEAR = Op(
    name="small_linear",
    reference=reference,
    versions=(
        Version(
            name="triton",
            run=LazyFunction("armillary.kernels.gemm.skinny_triton", "small_linear"),
            refuses=refuses,
            needs=("triton",),
        ),
        compiled(reference),
    ),
    inputs=inputs,
    work=work,
    cases=_cases(),
)
