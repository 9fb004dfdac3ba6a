"""Rotary positions applied to a packed QKV projection, which is split into q, k and v by the same kernel.

Rows of the fused weight are grouped per KV head as [q…, k, v]; the results q, k and v are contiguous, as attention
needs them, and in q and k the first 2·R dims of every head are rotated (Su et al., arXiv 2104.09864).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, compiled, in_liger, in_triton, rows_to_check
from armillary.spec.arithmetic.ops import FP32_BYTES, size_of

# B batch, T tokens, N query heads, K KV heads, D head dim, R rotated dims / 2


@dataclass(frozen=True, kw_only=True)
class RopeCase(Case):
    """The QKV projection of some tokens."""

    tokens: int  # batch times sequence
    heads: int
    kv_heads: int
    head_dim: int = 128
    rotary_dim: int = 128  # rotated dims, 2·R
    interleaved: bool = False  # whether neighbouring dims are rotated together, or the two halves


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: qkv [B, T, K·(group + 2)·D], cos and sin [B, T, 1, R] -> q [B, T, N, D], k and v [B, T, K, D]."""
    grouped = qkv.unflatten(-1, (-1, group + 2, head_dim))
    q, k, v = grouped[..., :group, :].flatten(-3, -2), grouped[..., group, :], grouped[..., group + 1, :]
    q, k = (rotate(x, cos, sin, interleaved=interleaved) for x in (q, k))
    return q, k, v.contiguous()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2·R dims of each head [..., D]; the others are unchanged. The arithmetic is at least fp32."""
    size = 2 * cos.shape[-1]
    part = widen(x[..., :size])
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    both = both.to(x.dtype)
    return both if size == x.shape[-1] else torch.cat((both, x[..., size:]), dim=-1)


def _inputs(case: RopeCase, generator: torch.Generator) -> tuple[Any, ...]:
    group = case.heads // case.kv_heads
    columns = case.kv_heads * (group + 2) * case.head_dim
    qkv = torch.randn(1, case.tokens, columns, generator=generator, device=case.device).to(case.torch_dtype)
    angles = torch.randn(1, case.tokens, 1, case.rotary_dim // 2, generator=generator, device=case.device) * 100
    return qkv, angles.cos(), angles.sin(), group, case.head_dim, case.interleaved


def _work(case: RopeCase) -> OpWork:
    """Every element is read and written once, v too, because attention needs it contiguous; cos and sin are fp32."""
    rotated = case.tokens * (case.heads + case.kv_heads) * case.rotary_dim
    packed = case.tokens * (case.heads + 2 * case.kv_heads) * case.head_dim
    moved = 2 * packed * size_of(case.dtype) + case.tokens * case.rotary_dim * FP32_BYTES
    return OpWork(flops=3 * rotated, bytes=moved, backward_flops=3 * rotated, backward_bytes=moved)


def _not_liger(case: RopeCase) -> str | None:
    plain = not case.interleaved and case.rotary_dim == case.head_dim
    return None if plain else "Liger rotates whole heads, by halves"


ROPE = Op(
    name="rope",
    reference=rope,
    versions=(
        in_triton("pointwise.rope_triton", "rope"),
        compiled(rope),
        in_liger("rope", _not_liger),
    ),
    inputs=_inputs,
    work=_work,
    grads=(0,),
    cases={
        "llama-3-8b": RopeCase(tokens=16384, heads=32, kv_heads=8),
        "llama-3-70b": RopeCase(tokens=8192, heads=64, kv_heads=8),
        "llama-2-7b": RopeCase(tokens=16384, heads=32, kv_heads=32),
        "glm-4-9b": RopeCase(tokens=16384, heads=32, kv_heads=2, rotary_dim=64, interleaved=True),
        "gpt-neox-20b": RopeCase(tokens=8192, heads=64, kv_heads=64, head_dim=96, rotary_dim=24),
    },
    small=lambda case: replace(
        case, tokens=rows_to_check(case, case.tokens, (case.heads + 2 * case.kv_heads) * case.head_dim)
    ),
)
