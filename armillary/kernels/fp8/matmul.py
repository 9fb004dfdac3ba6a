"""A GEMM with a weight that is already in fp8; the norm or activation before it quantises the activations.

A weight is quantised once and used many times: by every micro-batch of a step, and by every step of a server. The norm
or the SwiGLU before the GEMM writes fp8 rows and their scales directly, so that its result is never written in bf16.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.core.op import Op, OpWork, in_triton, takes_all
from armillary.kernels.fp8.linear import E4M3, Fp8LinearCase, quantised, refuses, rounded, small
from armillary.kernels.norm.norm import norm
from armillary.kernels.pointwise.activation import activate

# M tokens, K inputs of the GEMM, N outputs


def reference(
    x: Tensor, weight_NK: Tensor, scale: Tensor, norm_K: Tensor | None = None, gated: bool = False, eps: float = 1e-6
) -> Tensor:
    """fp8(f(x)) @ (weight · scale)ᵀ in x's dtype, where f is an RMS norm, SwiGLU over alternating gate and up, or
    nothing. `scale` is a column for row-wise scaling, of activations too, or one number for all."""
    rows = produced(x, norm_K, gated, eps).flatten(0, -2)
    y = rounded(rows, E4M3, "row" if scale.dim() else "tensor") @ (weight_NK.to(scale.dtype) * scale).to(x.dtype).t()
    return y.unflatten(0, x.shape[:-1])


def produced(x: Tensor, norm_K: Tensor | None, gated: bool, eps: float) -> Tensor:
    """f(x)."""
    if norm_K is not None:
        return norm(x, norm_K, None, eps)
    return activate(x, "silu", gated=True) if gated else x


@dataclass(frozen=True, kw_only=True)
class Fp8MatmulCase(Fp8LinearCase):
    """The same where the weight is already in fp8."""

    norm: bool = False  # an RMS norm before
    gated: bool = False  # SwiGLU before


def inputs(case: Fp8MatmulCase, generator: torch.Generator) -> tuple[object, ...]:
    weight, scale = quantised(case.normal(generator, case.outputs, case.inputs) * case.inputs**-0.5, E4M3, case.scaling)
    x = case.normal(generator, case.tokens, case.inputs * (2 if case.gated else 1))
    return x, weight, scale, case.normal(generator, case.inputs) if case.norm else None, case.gated


def work(case: Fp8MatmulCase) -> OpWork:
    """2·M·N·K FLOPs; x and the weight are read, the result is written."""
    read = 2.0 * case.tokens * case.inputs * (2 if case.gated else 1) + case.outputs * case.inputs
    return OpWork(
        flops=2.0 * case.tokens * case.outputs * case.inputs,
        bytes=read + 2.0 * case.tokens * case.outputs,
        ceiling="fp8",
    )


FP8_MATMUL = Op(
    name="fp8_matmul",
    reference=reference,
    versions=(
        in_triton("fp8.matmul_triton", "library_matmul", name="triton+cublas", refuses=refuses, needs=("fp8",)),
        in_triton("fp8.matmul_triton", "fp8_matmul", refuses=takes_all, needs=("fp8", "tma")),
    ),
    inputs=inputs,
    work=work,
    tolerance={"bf16": 2e-2, "fp16": 2e-2, "fp32": 2e-2},
    cases={
        "8192³ row": Fp8MatmulCase(tokens=8192, outputs=8192, inputs=8192),
        "8192³ tensor": Fp8MatmulCase(tokens=8192, outputs=8192, inputs=8192, scaling="tensor"),
        "llama-3-8b, norm, gate and up": Fp8MatmulCase(tokens=8192, outputs=28672, inputs=4096, norm=True),
        "llama-3-8b, swiglu, down": Fp8MatmulCase(tokens=8192, outputs=4096, inputs=14336, gated=True),
    },
    small=small,
)
