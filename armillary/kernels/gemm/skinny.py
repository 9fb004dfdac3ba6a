"""A linear layer for a few tokens (skinny GEMM), as decoding has it: its time is that of reading the weight once.

The operations around it are fused: an RMS norm of the input, a bias, SwiGLU over alternating gate and up rows, a
residual.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, compiled, in_triton
from armillary.kernels.norm.norm import norm

# M tokens, K inputs, N rows of the weight (outputs, or twice the outputs when gated)

MAX_TOKENS = 64


def reference(
    x_MK: Tensor,
    weight_NK: Tensor,
    norm_K: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    gated: bool = False,
    bias_N: Tensor | None = None,
) -> Tensor:
    """residual + act(norm(x) @ weightᵀ + bias); each part only where it is given."""
    if norm_K is not None:
        x_MK = norm(x_MK, norm_K, None, eps)
    return finished(F.linear(x_MK, weight_NK, bias_N), residual, gated)


def finished(y: Tensor, residual: Tensor | None, gated: bool) -> Tensor:
    """What comes after the product."""
    if gated:
        gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)
        y = F.silu(gate) * up
    return y if residual is None else y + residual


@dataclass(frozen=True, kw_only=True)
class SmallLinearCase(Case):
    """A few tokens through a weight."""

    tokens: int
    outputs: int  # rows of the weight
    inputs: int
    norm: bool = False  # an RMS norm before
    gated: bool = False  # SwiGLU after
    residual: bool = False  # a residual after
    bias: bool = False


def inputs(case: SmallLinearCase, generator: torch.Generator) -> tuple[object, ...]:
    x = case.normal(generator, case.tokens, case.inputs)
    weight = case.normal(generator, case.outputs, case.inputs) * case.inputs**-0.5
    norm_weight = case.normal(generator, case.inputs) if case.norm else None
    width = case.outputs // 2 if case.gated else case.outputs
    residual = case.normal(generator, case.tokens, width) if case.residual else None
    bias = case.normal(generator, case.outputs) if case.bias else None
    return x, weight, norm_weight, residual, 1e-6, case.gated, bias


def work(case: SmallLinearCase) -> OpWork:
    """The weight, x and the residual are read once, and the result is written once."""
    size, width = case.torch_dtype.itemsize, case.outputs // 2 if case.gated else case.outputs
    moved = case.outputs * case.inputs + case.tokens * (case.inputs + width * (2 if case.residual else 1))
    return OpWork(flops=2.0 * case.tokens * case.outputs * case.inputs, bytes=float(size * moved), ceiling="read")


def refuses(case: SmallLinearCase) -> str | None:
    if case.tokens > MAX_TOKENS:
        return f"it is for up to {MAX_TOKENS} tokens"
    return "it sums in fp32" if case.dtype == "fp64" else None


SMALL_LINEAR = Op(
    name="small_linear",
    reference=reference,
    versions=(
        in_triton("gemm.skinny_triton", "small_linear", refuses=refuses),
        compiled(reference),
    ),
    inputs=inputs,
    work=work,
    cases={
        **{
            f"{name} {tokens}": SmallLinearCase(tokens=tokens, outputs=outputs, inputs=width)
            for tokens in (1, 8, 32)
            for name, outputs, width in (("up", 14336, 4096), ("down", 4096, 14336))
        },
        "norm, swiglu 8": SmallLinearCase(tokens=8, outputs=28672, inputs=4096, norm=True, gated=True),
        "gpt-oss-20b qkv 1": SmallLinearCase(tokens=1, outputs=5120, inputs=2880, norm=True, bias=True),
        "residual 8": SmallLinearCase(tokens=8, outputs=4096, inputs=14336, residual=True),
    },
)
