"""A linear layer for training whose three GEMMs run in fp8: E4M3 for x and the weight, E5M2 for gradients.

Each operand is scaled so that its largest value becomes the dtype's largest. 'tensor': one scale per tensor. 'row': one
scale per row along the dim that is summed over. 'token': one scale per token, a power of two; a weight then has per-row
scales, and a GEMM that sums over tokens takes the largest scale of all tokens. The reference rounds to fp8 and
multiplies the rounded numbers in the inputs' dtype.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from armillary.errors import BadInput
from armillary.kernels.core.op import Case, Op, OpWork, compiled, in_triton, takes_all

# M tokens, K inputs, N outputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALINGS = ("row", "tensor", "token")
TINY = 1e-12  # smallest amax that is distinguished from zero


def reference(x_MK: Tensor, weight_NK: Tensor, scaling: str = "row") -> Tensor:
    """x @ weightᵀ of the rounded operands; gradients from rounded operands too."""
    check_scaling(scaling)
    return _Rounded.apply(x_MK.flatten(0, -2), weight_NK, scaling).unflatten(0, x_MK.shape[:-1])


def check_scaling(scaling: str) -> None:
    if scaling not in SCALINGS:
        raise BadInput(f"fp8 scaling '{scaling}' is not known; choose {' or '.join(SCALINGS)}")


def weight_scaling(scaling: str) -> str:
    """Of a weight: where tokens have scales of their own, its rows have."""
    return "row" if scaling == "token" else scaling


class _Rounded(torch.autograd.Function):
    """The three GEMMs, each operand rounded along the dim that is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return rounded(x, E4M3, scaling) @ rounded(weight, E4M3, weight_scaling(scaling)).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), scaling = ctx.saved_tensors, ctx.scaling
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = rounded(dy, E5M2, scaling) @ rounded(weight, E4M3, weight_scaling(scaling), dim=0)
        if ctx.needs_input_grad[1]:
            dw = _over_tokens(dy, E5M2, scaling).t() @ _over_tokens(x, E4M3, scaling)
        return dx, dw, None


def _over_tokens(x: Tensor, dtype: torch.dtype, scaling: str) -> Tensor:
    """x rounded for a sum over tokens. Per-token scales become the largest of them: they are powers of two, so only
    exponents change, until numbers are too small for the dtype."""
    if scaling != "token":
        return rounded(x, dtype, scaling, dim=0)
    values, scale = quantised(x, dtype, "token")
    top = scale.max() if scale.numel() else scale.new_ones(())
    return ((values.to(scale.dtype) * (scale / top)).to(dtype).to(scale.dtype) * top).to(x.dtype)


def rounded(x: Tensor, dtype: torch.dtype, scaling: str, dim: int = 1) -> Tensor:
    """x rounded to fp8, with scales for a sum over `dim`."""
    values, scale = quantised(x, dtype, scaling, dim)
    return (values.to(scale.dtype) * scale).to(x.dtype)


def quantised(x: Tensor, dtype: torch.dtype, scaling: str, dim: int = 1) -> tuple[Tensor, Tensor]:
    """fp8 values and their scales (a column, a row with `dim` 0, or one number), so that values · scales ≈ x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if not x.numel():
        size = () if scaling == "tensor" else (len(x), 1) if dim == 1 else (1, x.shape[1])
        return x.to(dtype), wide.new_full(size, TINY / torch.finfo(dtype).max)
    amax = wide.abs().amax() if scaling == "tensor" else wide.abs().amax(dim, keepdim=True)
    amax = amax.clamp(min=TINY)
    largest = torch.finfo(dtype).max
    if scaling == "token":
        scale = _power_above(amax / largest)
        return (wide / scale).clamp(-largest, largest).to(dtype), scale
    # with a Python number on either side a GPU multiplies by a reciprocal, which rounds twice and changes ties
    most = torch.full_like(amax, largest)
    return (wide * (most / amax)).clamp(-largest, largest).to(dtype), amax / most


def _power_above(x: Tensor) -> Tensor:
    """The smallest power of two at or above a positive number; NaN and infinity stay."""
    fraction, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).to(exponent.dtype))
    return torch.where(x.isfinite(), power, x)


@dataclass(frozen=True, kw_only=True)
class Fp8LinearCase(Case):
    """Tokens through a weight, in fp8."""

    tokens: int
    outputs: int
    inputs: int
    scaling: str = "row"  # 'row' or 'tensor'


def inputs(case: Fp8LinearCase, generator: torch.Generator) -> tuple[object, ...]:
    x, weight = case.normal(generator, case.tokens, case.inputs), case.normal(generator, case.outputs, case.inputs)
    return x, weight * case.inputs**-0.5, case.scaling


def work(case: Fp8LinearCase) -> OpWork:
    """2·M·N·K FLOPs forward and twice that backward; bytes of fp8 operands and a bf16 result."""
    flops = 2.0 * case.tokens * case.outputs * case.inputs
    moved = (case.tokens + case.outputs) * case.inputs + 2.0 * case.tokens * case.outputs
    return OpWork(flops=flops, bytes=moved, backward_flops=2 * flops, backward_bytes=2 * moved, ceiling="fp8")


def refuses(case: Any) -> str | None:
    """Why the library's fp8 GEMM cannot do a case of fp8_linear or fp8_matmul."""
    if case.dtype != "bf16":
        return "the library's fp8 GEMMs return bf16"
    aligned = case.outputs % 16 == 0 and case.inputs % 16 == 0
    return None if aligned else "the library's fp8 GEMMs need sizes that are multiples of 16"


def small(case: Any) -> Any:
    """The same case; smaller sizes on a CPU."""
    if case.device != "cpu":
        return case
    return replace(case, tokens=min(case.tokens, 128), outputs=min(case.outputs, 512), inputs=min(case.inputs, 1024))


FP8_LINEAR = Op(
    name="fp8_linear",
    reference=reference,
    versions=(
        in_triton("fp8.linear_triton", "library_linear", name="triton+cublas", refuses=refuses, needs=("fp8",)),
        in_triton("fp8.linear_triton", "fp8_linear", refuses=takes_all, needs=("fp8", "tma")),
        compiled(reference),
    ),
    inputs=inputs,
    work=work,
    grads=(0, 1),
    tolerance={"bf16": 2e-2, "fp16": 2e-2, "fp32": 2e-2},
    cases={
        "8192³ row": Fp8LinearCase(tokens=8192, outputs=8192, inputs=8192),
        "8192³ tensor": Fp8LinearCase(tokens=8192, outputs=8192, inputs=8192, scaling="tensor"),
    },
    small=small,
)
