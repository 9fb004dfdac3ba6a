"""A linear layer for many tokens, with what follows it in one kernel: bias, activation, residual.

cuBLAS does the product alone; our persistent GEMM for Hopper does all of it. Which is faster depends on the shape.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, compiled, in_triton
from armillary.kernels.pointwise.activation import ACTIVATIONS

# M tokens, K inputs, N rows of the weight


def reference(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """act(x @ weightᵀ + bias) + residual; each part only where it is given."""
    y = ACTIVATIONS[activation](F.linear(x, weight_NK, bias_N))
    return y if residual is None else y + residual


@dataclass(frozen=True, kw_only=True)
class LargeLinearCase(Case):
    """Many tokens through a weight."""

    tokens: int
    outputs: int
    inputs: int
    bias: bool = False
    activation: str = ""  # "" for none
    residual: bool = False


OWN_ACTIVATIONS = ("relu", "silu", "gelu_tanh")


def inputs(case: LargeLinearCase, generator: torch.Generator) -> tuple[object, ...]:
    x = case.normal(generator, case.tokens, case.inputs)
    weight = case.normal(generator, case.outputs, case.inputs) * case.inputs**-0.5
    bias = case.normal(generator, case.outputs) if case.bias else None
    residual = case.normal(generator, case.tokens, case.outputs) if case.residual else None
    return x, weight, bias, case.activation or "none", residual


def work(case: LargeLinearCase) -> OpWork:
    """Each operand is read once, and the result is written once."""
    parts = case.tokens * case.inputs + case.outputs * case.inputs
    parts += case.tokens * case.outputs * (2 if case.residual else 1)
    flops = 2.0 * case.tokens * case.outputs * case.inputs
    return OpWork(flops=flops, bytes=float(case.torch_dtype.itemsize * parts), ceiling="gemm")


def refuses(case: LargeLinearCase) -> str | None:
    if case.dtype not in ("bf16", "fp16"):
        return "it is for 16-bit dtypes"
    if case.activation not in ("", *OWN_ACTIVATIONS):
        return f"it has no {case.activation}"
    return "rows are not multiples of 16 bytes" if case.inputs % 8 or case.outputs % 8 else None


SHAPES = {
    "4096³": (4096, 4096, 4096),
    "8192³": (8192, 8192, 8192),
    "8k tokens, up and gate": (8192, 28672, 4096),
    "32k tokens, down": (32768, 4096, 14336),
    "odd": (5000, 7000, 3000),
}
"""rows, columns, inputs"""

LARGE_LINEAR = Op(
    name="large_linear",
    reference=reference,
    versions=(
        in_triton(
            "gemm.large_linear_wgmma", "large_linear", name="triton, persistent", refuses=refuses, needs=("wgmma",)
        ),
        compiled(reference),
    ),
    inputs=inputs,
    work=work,
    cases={
        **{
            name: LargeLinearCase(tokens=tokens, outputs=outputs, inputs=width)
            for name, (tokens, outputs, width) in SHAPES.items()
        },
        "bias, silu, residual": LargeLinearCase(
            tokens=8192, outputs=8192, inputs=4096, bias=True, activation="silu", residual=True
        ),
    },
)
