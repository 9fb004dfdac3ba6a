"""Attention of prefill chunks over a paged cache of latents, in expanded form: the latents of a sequence are multiplied
by the up-projection of every head, and its queries see ordinary keys of nope + rope dims and values of v dims.

For many queries this takes fewer FLOPs than the absorbed form of `latent_decode`, which needs no up-projection but has
wider keys and values; `latent_attention` has the arithmetic.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions, reference
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Op, OpWork, in_triton
from armillary.kernels.latent.latent_decode import LatentCase, latent_rows, random_batch, random_cache, small_batch
from armillary.kernels.paged.paged_attention import PagedBatch

# T packed tokens, N heads, C rank of the latent, P and R query and key dims without and with rotary positions, V value
# dims, U = P + V rows of a head's up-projection, S keys


def latent_prefill(
    q_TNP: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    up_NUC: Tensor,
    batch: PagedBatch,
    scale: float,
    num_keys: int | None = None,
) -> Tensor:
    """[T, N, V]; each query sees the keys of its sequence up to its own, those before this chunk from the cache as
    well. Tokens after the last sequence, and of sequences of length 0, give zeros.

    `num_keys` is an upper bound of all lengths together, by which a kernel chooses its workspace; without it the kernel
    reads the lengths, which waits for the device.
    """
    nope_dim = q_TNP.shape[-1]
    out = q_TNP.new_zeros(*q_TNP.shape[:2], up_NUC.shape[1] - nope_dim)
    for b, (begin, end, length) in enumerate(replace(batch).spans):
        if begin < end and length:
            rows_SE = latent_rows(cache, batch.tables_BP[b], length)
            k_SND, v_SNV = expanded(rows_SE, up_NUC, nope_dim)
            q_TND = torch.cat((q_TNP[begin:end], q_TNR[begin:end]), dim=-1)
            q, k, v = (widen(x)[None] for x in (q_TND, k_SND, v_SNV))
            out[begin:end] = reference(q, k, v, AttentionOptions(scale=scale))[0].to(out.dtype)
    return out


def expanded(rows_SE: Tensor, up_NUC: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [S, N, P + R] and values [S, N, V] of cached rows."""
    rank = up_NUC.shape[2]
    kv_SNU = torch.einsum("sc,nuc->snu", rows_SE[:, :rank], up_NUC.to(rows_SE.dtype))
    shared_SNR = rows_SE[:, None, rank:].expand(-1, len(up_NUC), -1)
    return torch.cat((kv_SNU[..., :nope_dim], shared_SNR), dim=-1), kv_SNU[..., nope_dim:]


@dataclass(frozen=True, kw_only=True)
class LatentPrefillCase(LatentCase):
    """Prefill chunks over a cache of latents."""

    nope_dim: int = 128
    v_dim: int = 128


def _inputs(case: LatentPrefillCase, generator: torch.Generator) -> tuple[Any, ...]:
    normal = partial(case.normal, generator)
    tokens, keys = case.batch * case.queries, sum(case.lengths())
    up_NUC = normal(case.heads, case.nope_dim + case.v_dim, case.rank) * case.rank**-0.5
    q_TNP, q_TNR = normal(tokens, case.heads, case.nope_dim), normal(tokens, case.heads, case.rope_dim)
    scale = (case.nope_dim + case.rope_dim) ** -0.5
    return q_TNP, q_TNR, random_cache(case, generator), up_NUC, random_batch(case, generator), scale, keys


def _work(case: LatentPrefillCase) -> OpWork:
    """The up-projection of every key, and attention of the visible pairs."""
    size, keys, per_head = case.torch_dtype.itemsize, sum(case.lengths()), case.nope_dim + case.v_dim
    expand = 2.0 * keys * case.heads * per_head * case.rank
    attend = 2.0 * case.heads * (per_head + case.rope_dim) * case.visible_keys()
    tokens = case.batch * case.queries * case.heads * (per_head + case.rope_dim)
    moved = size * (keys * (case.rank + case.rope_dim) + case.heads * per_head * case.rank + tokens)
    return OpWork(flops=expand + attend, bytes=float(moved), ceiling="gemm")


def refuses(case: LatentPrefillCase) -> str | None:
    if max(case.nope_dim, case.rope_dim, case.v_dim) > 256:
        return f"head dims {case.nope_dim}, {case.rope_dim} and {case.v_dim} are beyond 256"
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"no kernel for {case.dtype}"


LATENT_PREFILL = Op(
    name="latent_prefill",
    reference=latent_prefill,
    versions=(in_triton("latent.latent_prefill_triton", "latent_prefill", refuses=refuses),),
    inputs=_inputs,
    work=_work,
    small=small_batch,
    cases={
        "16 heads, chunk of 2k at 16k": LatentPrefillCase(batch=1, context=16384, queries=2048),
        "128 heads, chunk of 2k at 8k": LatentPrefillCase(batch=1, context=8192, queries=2048, heads=128),
        "16 heads, 8 prompts of 2k": LatentPrefillCase(batch=8, context=2048, queries=2048),
    },
)
