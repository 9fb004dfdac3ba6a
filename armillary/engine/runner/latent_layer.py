"""Latent attention as the engine runs it, over a paged cache of latents (`kernels.latent`).

One GEMM gives the queries, or their latent, and the KV latent together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn, linear_fn
from armillary.kernels.gemm.skinny import MAX_TOKENS
from armillary.kernels.latent.latent_forms import LatentBatch, latent_attention
from armillary.model.layers.latent_attention import LatentAttention
from armillary.model.layers.norm import Norm
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.spec.model import MLA

# T tokens, N heads of this rank, P head dim without positions, R rotary dims, V head dim of values, C latent rank,
# L = C + R, U = P + V


@dataclass(kw_only=True)
class LatentLayer:
    """What a layer with latent attention has besides its first and last GEMM."""

    mla: MLA
    query_size: int  # outputs of the first GEMM that are queries, or their latent
    q: LinearFn | None  # queries from their latent; none: the first GEMM gives them
    q_norm: Norm | None
    kv_norm: Norm
    up_NUC: Tensor  # keys and values from latents
    interleaved: bool
    scale: float


class Joined:
    """Two linear functions of one input, for weights that cannot be joined."""

    def __init__(self, first: LinearFn, second: LinearFn) -> None:
        self.parts = first, second

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self.parts], dim=-1)

    def replaced(self, make: Callable[[LinearFn], LinearFn]) -> "Joined":
        """The same of other linear functions."""
        first, second = self.parts
        return Joined(make(first), make(second))


def make_latent_layer(attention: LatentAttention) -> LatentLayer:
    mla, dim = attention.mla, attention.mla.nope_dim + attention.mla.rope_dim
    up_NUC = attention.kv_up.weight.detach().unflatten(0, (-1, mla.nope_dim + mla.v_dim))
    return LatentLayer(
        mla=mla,
        query_size=mla.q_rank or len(up_NUC) * dim,
        q=linear_fn(attention.q) if mla.q_rank is not None else None,
        q_norm=attention.q_norm,
        kv_norm=attention.kv_norm,
        up_NUC=up_NUC,
        interleaved=attention.interleaved,
        scale=attention.scale,
    )


def first_linear(attention: LatentAttention) -> LinearFn:
    """Queries (or their latent) and the KV latent by one GEMM; the model's weights become views of the joined one."""
    first = attention.q if attention.q_down is None else attention.q_down
    second = attention.kv_down
    if isinstance(first, PackedLinear) or isinstance(second, PackedLinear):
        return Joined(linear_fn(first), linear_fn(second))
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.cat((first.weight, second.weight))
        bias = None
        if second.bias is not None:
            without = first.weight.new_zeros(len(first.weight))
            bias = torch.cat((without if first.bias is None else first.bias, second.bias))
        first.weight.data, second.weight.data = weight.split([len(first.weight), len(second.weight)])
    return Dense(weight, bias)


def latent_linears(attention: LatentAttention) -> list[nn.Linear]:
    """The linear layers whose weights a `LatentLayer` holds."""
    linears = [attention.q_down, attention.q, attention.kv_down, attention.kv_up, attention.out]
    return [linear for linear in linears if linear is not None]


def _projected_queries(q: LinearFn, norm: Norm, latent_TC: Tensor, kernels: EngineKernels) -> Tensor:
    if kernels.small is not None and len(latent_TC) <= MAX_TOKENS and isinstance(q, Dense):
        return kernels.small(latent_TC, q.weight, norm.weight, None, norm.eps)  # type: ignore[no-any-return]
    return q(kernels.norm(latent_TC, norm.weight, None, norm.eps, norm.kind, False))


def attend_latents(
    latent: LatentLayer,
    projected: Tensor,
    cache: Tensor,
    batch: LatentBatch,
    slots_T: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    kernels: EngineKernels,
) -> Tensor:
    """[T, N·V]: attention of the tokens whose first GEMM gave `projected`, after their latents are written."""
    mla, norm, q_norm = latent.mla, latent.kv_norm, latent.q_norm
    queries, kv_TL = projected.split([latent.query_size, mla.kv_rank + mla.rope_dim], dim=-1)
    if latent.q is not None:
        assert q_norm is not None
        queries = _projected_queries(latent.q, q_norm, queries.contiguous(), kernels)
    q_TNP, q_TNR = queries.unflatten(-1, (-1, mla.nope_dim + mla.rope_dim)).split([mla.nope_dim, mla.rope_dim], dim=-1)
    q_TNR, _ = kernels.latent_cache(kv_TL, q_TNR, cache, slots_T, *cos_sin, norm.weight, norm.eps, latent.interleaved)
    forms = {"decode": kernels.latent_decode, "prefill": kernels.latent_prefill}
    return latent_attention(q_TNP, q_TNR, cache, latent.up_NUC, batch, latent.scale, **forms).flatten(1)
