"""Liger's kernels with our signatures, for machines that have liger_kernel; they compete like any other version.

Its activation and rotary kernels want gate and up, q and k as tensors of their own, so that taking our packed layouts
apart is counted with them.
"""

import torch
from liger_kernel.transformers import functional as liger
from torch import Tensor


def norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str = "rms", plus_one: bool = False
) -> Tensor:
    if kind == "layer":
        return liger.liger_layer_norm(x, weight, bias, eps)
    return liger.liger_rms_norm(x, weight, eps, float(plus_one), _mode(plus_one), False)


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str = "rms",
    plus_one: bool = False,
) -> tuple[Tensor, Tensor]:
    y, summed = liger.liger_fused_add_rms_norm(x, residual, weight, eps, float(plus_one), _mode(plus_one), False)
    return y, summed


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """gated.activate by Liger, on copies of gate and up."""
    gate, up = (half.contiguous() for half in x.unflatten(-1, (-1, 2)).unbind(-1))
    return liger.liger_swiglu(gate, up) if activation == "silu" else liger.liger_geglu(gate, up)


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """rope.rope by Liger, which takes [B, N, T, D] and needs cos and sin for both halves."""
    grouped = qkv.unflatten(-1, (-1, group + 2, head_dim))
    q, k, v = grouped[..., :group, :].flatten(-3, -2), grouped[..., group, :], grouped[..., group + 1, :]
    tables = (torch.cat((table, table), -1).squeeze(-2) for table in (cos, sin))
    q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), *tables)
    return q.transpose(1, 2), k.transpose(1, 2), v.contiguous()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """linear_cross_entropy.reference by Liger, in chunks of its own."""
    x = x.flatten(0, -2) if scale == 1.0 else x.flatten(0, -2) * scale
    return liger.liger_fused_linear_cross_entropy(
        x, weight, targets.flatten(), ignore_index=ignore_index, reduction=reduction, softcap=softcap or None
    )


def _mode(plus_one: bool) -> str:
    return "gemma" if plus_one else "llama"
