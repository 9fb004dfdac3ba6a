"""From the latent projection to the cache: RMS norm of the latent, rotary positions of the shared key part and of the
queries, and the cache write.

A row of the projection is [latent C, key part R]; the cache is that of `latent_decode`: [pages, page size, C + R].
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.pointwise.rope import rotate

# T tokens, N heads, C rank of the latent, R dims with rotary positions, A = R / 2 angles


def latent_to_cache(
    kv_TE: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TA: Tensor,
    sin_TA: Tensor,
    weight_C: Tensor,
    eps: float,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """The rotated query parts [T, N, R], and the cache, in which row t is now at slot slots[t] (page number · page size
    + place in the page; negative: not written). `interleaved`: neighbouring dims are rotated together (DeepSeek), else
    the two halves."""
    rank = weight_C.shape[0]
    latent_TC = widen(kv_TE[:, :rank])
    normed_TC = latent_TC * torch.rsqrt(latent_TC.pow(2).mean(-1, keepdim=True) + eps) * widen(weight_C)
    key_TR = rotate(widen(kv_TE[:, rank:]), cos_TA, sin_TA, interleaved=interleaved)
    valid = slots_T >= 0
    slots = slots_T[valid].long()
    rows_TE = torch.cat((normed_TC, key_TR), dim=-1)[valid]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows_TE.to(cache.dtype)
    q_TNR = rotate(widen(q_TNR), cos_TA[:, None], sin_TA[:, None], interleaved=interleaved).to(q_TNR.dtype)
    return q_TNR, cache


@dataclass(frozen=True, kw_only=True)
class LatentCacheCase(Case):
    """The latents of some tokens."""

    tokens: int
    heads: int = 16
    rank: int = 512
    rope_dim: int = 64
    page: int = 64
    interleaved: bool = True


def _inputs(case: LatentCacheCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, normal, width = generator.device, partial(case.normal, generator), case.rank + case.rope_dim
    pages = -(-case.tokens // case.page) + 1
    slots = torch.randperm(pages * case.page, generator=generator, device=device)[: case.tokens]
    angles = torch.randn(case.tokens, case.rope_dim // 2, generator=generator, device=device) * 100
    return (
        normal(case.tokens, width),
        normal(case.tokens, case.heads, case.rope_dim),
        torch.zeros(pages, case.page, width, dtype=case.torch_dtype, device=device),
        slots,
        angles.cos(),
        angles.sin(),
        1 + 0.1 * normal(case.rank),
        1e-6,
        case.interleaved,
    )


def _work(case: LatentCacheCase) -> OpWork:
    """Every row and query part is read and written once, cos and sin are read."""
    values = case.tokens * (case.rank + case.rope_dim * (1 + case.heads))
    moved = 2 * values * case.torch_dtype.itemsize + case.tokens * case.rope_dim * 4
    return OpWork(flops=6.0 * values, bytes=float(moved), ceiling="copy")


LATENT_TO_CACHE = Op(
    name="latent_to_cache",
    reference=latent_to_cache,
    versions=(in_triton("latent.latent_to_cache_triton", "latent_to_cache"),),
    inputs=_inputs,
    work=_work,
    writes=(2,),
    cases={
        "DeepSeek-V2-Lite, 8k tokens": LatentCacheCase(tokens=8192),
        "DeepSeek-V3, 8k tokens": LatentCacheCase(tokens=8192, heads=128),
        "DeepSeek-V2-Lite, 64 decoding": LatentCacheCase(tokens=64),
        "DeepSeek-V2-Lite, 1 decoding": LatentCacheCase(tokens=1),
    },
)
