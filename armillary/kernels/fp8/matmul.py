"""A product with a weight that is in fp8 already: the activations are quantised on the way in, by what makes them.

A weight is quantised once and used many times: by every micro-batch of a step, and by every step of a server. The norm
or the SwiGLU ahead gives fp8 rows and their scales right away, so that their result is never written in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version
from armillary.kernels.fp8.linear import E4M3, quantised, rounded

# M tokens, K inputs of the product, N outputs


def reference(
    x: Tensor, weight_NK: Tensor, scale: Tensor, norm_K: Tensor | None = None, gated: bool = False, eps: float = 1e-6
) -> Tensor:
    """fp8(f(x)) @ (weight · scale)ᵀ in x's dtype, where f is an RMS norm, SwiGLU over alternating gate and up, or
    nothing. `scale` is a column for row-wise scaling, of activations too, or one number for all."""
    rows = produced(x, norm_K, gated, eps).flatten(0, -2)
    y = rounded(rows, E4M3, scaling_of(scale)) @ (weight_NK.to(scale.dtype) * scale).to(x.dtype).t()
    return y.unflatten(0, x.shape[:-1])


def produced(x: Tensor, norm_K: Tensor | None, gated: bool, eps: float) -> Tensor:
    """f(x)."""
    if norm_K is not None:
        wide = widen(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(norm_K)).to(x.dtype)
    if gated:
        gate, up = widen(x).unflatten(-1, (-1, 2)).unbind(-1)
        return (F.silu(gate) * up).to(x.dtype)
    return x


def scaling_of(scale: Tensor) -> str:
    return "row" if scale.dim() else "tensor"


@dataclass(frozen=True, kw_only=True)
class Fp8MatmulCase(Case):
    """Tokens through a weight in fp8."""

    tokens: int
    """rows of x"""
    outputs: int
    """rows of the weight"""
    inputs: int
    """columns of the weight"""
    scaling: str = "row"
    """'row' or 'tensor'"""
    norm: bool = False
    """an RMS norm before"""
    gated: bool = False
    """SwiGLU before"""


def inputs(case: Fp8MatmulCase, generator: torch.Generator) -> tuple[object, ...]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.torch_dtype)

    weight, scale = quantised(normal(case.outputs, case.inputs) * case.inputs**-0.5, E4M3, case.scaling)
    x = normal(case.tokens, case.inputs * (2 if case.gated else 1))
    return x, weight, scale, normal(case.inputs) if case.norm else None, case.gated


def work(case: Fp8MatmulCase) -> OpWork:
    """2·M·N·K; x and the weight read, the result written."""
    read = 2.0 * case.tokens * case.inputs * (2 if case.gated else 1) + case.outputs * case.inputs
    return OpWork(
        flops=2.0 * case.tokens * case.outputs * case.inputs,
        bytes=read + 2.0 * case.tokens * case.outputs,
        ceiling="fp8",
    )


def refuses(case: Fp8MatmulCase) -> str | None:
    """Why the library's fp8 product cannot do a case."""
    if case.dtype != "bf16":
        return "the library's fp8 products give bf16"
    if case.outputs % 16 or case.inputs % 16:
        return "the library's fp8 products want sizes that are multiples of 16"
    return None


def _small(case: Fp8MatmulCase) -> Fp8MatmulCase:
    """As it is; a CPU gets less of everything."""
    if case.device != "cpu":
        return case
    return replace(case, tokens=min(case.tokens, 128), outputs=min(case.outputs, 512), inputs=min(case.inputs, 1024))


def _version(name: str, function: str, *more: str) -> Version:
    run = LazyFunction("armillary.kernels.fp8.matmul_triton", function)
    return Version(name=name, run=run, needs=("triton", "fp8", *more))


FP8_MATMUL = Op(
    name="fp8_matmul",
    reference=reference,
    versions=(
        replace(_version("triton+cublas", "library_matmul"), refuses=refuses),
        _version("triton", "fp8_matmul", "tma"),
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
    small=_small,
)
"""for `choose()` and the bench"""
