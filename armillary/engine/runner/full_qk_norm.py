"""RMS norm of queries and keys over all heads, applied before a kernel that has no norm across heads.

Only asynchronous torch operations, so that steps can be CUDA graphs; ranks that hold a shard of the heads add up their
sums of squares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.paged.qkv_to_cache import QkvOptions
from armillary.spec.model import ModelConfig

# T tokens, M numbers of this rank's heads

IntoCache = Callable[..., Any]
"""`armillary.kernels.paged.qkv_to_cache.qkv_cache`, or a quicker one"""


def full_qk_norm(
    run: IntoCache,
    config: ModelConfig,
    *,
    rank: int = 0,
    size: int = 1,
    add: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> IntoCache:
    """`run` with the norm before it, for the heads of `rank` of `size`; `add` all-reduces the sums of squares."""
    local, held, dim = config.heads // size, max(1, config.kv_heads // size), config.head_dim
    copies = max(1, size // config.kv_heads)

    def normed(x_TM: Tensor, weight: Tensor, first: int, total: int, repeats: int, eps: float) -> Tensor:
        wide = x_TM.float()
        squares = add(wide.square().sum(-1, keepdim=True)) / repeats
        local_weight = weight[first : first + x_TM.shape[1]].float()
        return (wide * torch.rsqrt(squares / total + eps) * local_weight).to(x_TM.dtype)

    def into_cache(qkv: Tensor, cache: Tensor, slots: Tensor, cos: Any, sin: Any, options: QkvOptions) -> Any:
        assert options.q_weight is not None and options.k_weight is not None and not options.plus_one
        grouped = qkv.unflatten(-1, (held, -1, dim))
        q, k, v = grouped[:, :, :-2].flatten(1), grouped[:, :, -2].flatten(1), grouped[:, :, -1:]
        q = normed(q, options.q_weight, rank * local * dim, config.heads * dim, 1, options.eps)
        first = rank * config.kv_heads // size * dim
        k = normed(k, options.k_weight, first, config.kv_heads * dim, copies, options.eps)
        queries, keys = q.unflatten(-1, (held, -1, dim)), k.unflatten(-1, (held, 1, dim))
        packed = torch.cat((queries, keys, v), dim=2).flatten(1)
        return run(packed, cache, slots, cos, sin, replace(options, norm="none", q_weight=None, k_weight=None))

    return into_cache
