"""MLP activations: act(gate)·up where gate and up alternate, as in our fused weight, or act(x) alone.

SwiGLU and GeGLU are Shazeer's (arXiv 2002.05202); 'swiglu_clamped' is GPT-OSS's (up + 1)·gate·sigmoid(α·gate) on
clamped gate and up. The arithmetic is at least fp32, the result is rounded once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, compiled, in_liger, in_triton, rows_to_check
from armillary.spec.arithmetic import non_gemm_ops

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "none": lambda x: x,
}
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702


@dataclass(frozen=True, kw_only=True)
class ActivationCase(Case):
    """The output of an MLP's first GEMM."""

    rows: int
    ffn: int  # elements per token after the activation
    activation: str = "silu"  # see ACTIVATIONS, and 'swiglu_clamped'
    gated: bool = True  # whether the input alternates gate and up


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """The reference: […, 2F] with gate and up alternating -> […, F], or […, F] -> […, F] when not gated."""
    wide = widen(x)
    if not gated:
        return ACTIVATIONS[activation](wide).to(x.dtype)
    gate, up = wide.unflatten(-1, (-1, 2)).unbind(-1)
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return ((up + 1) * gate * torch.sigmoid(CLAMP_ALPHA * gate)).to(x.dtype)
    return (ACTIVATIONS[activation](gate) * up).to(x.dtype)


def _inputs(case: ActivationCase, generator: torch.Generator) -> tuple[Any, ...]:
    columns = case.ffn * (2 if case.gated else 1)
    x = torch.randn(case.rows, columns, generator=generator, device=case.device) * 3
    return x.to(case.torch_dtype), case.activation, case.gated


def _work(case: ActivationCase) -> OpWork:
    sizes: dict[str, Any] = {"dtype": case.dtype, "function": case.activation, "gated": case.gated}
    forward = non_gemm_ops.activation("activate", case.rows, case.ffn, **sizes)
    return OpWork.of(forward, non_gemm_ops.activation_backward("activate", case.rows, case.ffn, **sizes))


def _not_liger(case: ActivationCase) -> str | None:
    known = case.gated and case.activation in ("silu", "gelu_tanh")
    return None if known else f"Liger has no {'gated' if case.gated else 'plain'} {case.activation}"


ACTIVATE = Op(
    name="activate",
    reference=activate,
    versions=(
        in_triton("pointwise.activation_triton", "activate"),
        compiled(activate),
        in_liger("activate", _not_liger),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0,),
    cases={
        "llama-3-8b": ActivationCase(rows=16384, ffn=14336),
        "llama-3-70b": ActivationCase(rows=8192, ffn=28672),
        "gemma-2-27b": ActivationCase(rows=8192, ffn=36864, activation="gelu_tanh"),
        "gpt-oss-120b": ActivationCase(rows=32768, ffn=2880, activation="swiglu_clamped"),
        "gpt-3": ActivationCase(rows=8192, ffn=49152, activation="gelu", gated=False),
        "nemotron-4-15b": ActivationCase(rows=8192, ffn=24576, activation="relu2", gated=False),
    },
    small=lambda case: replace(case, rows=rows_to_check(case, case.rows, 2 * case.ffn)),
)
