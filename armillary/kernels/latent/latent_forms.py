"""Latent attention of a step, from queries to head outputs: absorbed for sequences of few queries, expanded for prefill
chunks, and both where a batch has both.

Per head, with rank C, P and R key dims without and with rotary positions, V value dims, Q queries over S keys:
absorbed 2·Q·S·(2·C + R) + 2·Q·C·(P + V) FLOPs, expanded 2·Q·S·(P + R + V) + 2·S·C·(P + V). For S ≫ Q the expanded form
takes fewer from Q = C·(P + V) / (2·C - P - V) on: 171 queries with DeepSeek's 512, 128 and 128.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from armillary.kernels.latent.latent_decode import latent_decode
from armillary.kernels.latent.latent_prefill import latent_prefill
from armillary.kernels.paged.paged_attention import PagedBatch

# T packed tokens, F of them in sequences of few queries, B sequences, N heads, C rank of the latent, P and R query dims
# without and with rotary positions, V value dims, U = P + V rows of a head's up-projection

FEW = 8  # queries of a sequence that stays absorbed beside prefill chunks: one token and what is drafted after it


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentBatch:
    """The sequences of a step by form: the same for all layers."""

    absorbed: PagedBatch  # tokens of these are numbered among themselves where `expanded` is given
    expanded: PagedBatch | None = None  # sequences of many queries; the others have length 0
    num_keys: int | None = None  # upper bound of the keys of all expanded sequences
    tokens_F: Tensor | None = None  # absorbed token -> its place in the batch
    places_T: Tensor | None = None  # the inverse; anything for tokens of expanded sequences
    is_absorbed_T: Tensor | None = None


def most_absorbed(rank: int, nope_dim: int, v_dim: int) -> int:
    """Queries up to which the absorbed form takes fewer FLOPs over a long context."""
    saved = 2 * rank - nope_dim - v_dim
    return rank * (nope_dim + v_dim) // saved if saved > 0 else 1 << 30


def latent_batch(batch: PagedBatch, num_tokens: int, most: int, num_keys: int | None = None) -> LatentBatch:
    """The batch by form, for `num_tokens` packed tokens and up to `most` (`most_absorbed`) queries in absorbed form.
    Nothing waits for the device; `num_keys` is an upper bound of all lengths together, where the caller has one."""
    if batch.max_query <= most:
        return LatentBatch(absorbed=batch)
    few, starts = min(FEW, most), batch.starts.long()
    counts_B = starts.diff()
    is_few_B = counts_B <= few
    few_counts_B = torch.where(is_few_B, counts_B, 0)
    few_starts = torch.cat((few_counts_B.new_zeros(1), few_counts_B.cumsum(0)))
    token_T = torch.arange(num_tokens, device=starts.device)
    row_T = torch.searchsorted(starts, token_T, right=True) - 1
    inside = (row_T >= 0) & (row_T < len(counts_B))
    row_T = row_T.clamp(0, len(counts_B) - 1)
    is_few_T = inside & is_few_B[row_T]
    most_few = min(num_tokens, few * len(counts_B))
    places_T = torch.where(is_few_T, few_starts[row_T] + token_T - starts[row_T], most_few)
    tokens_F = token_T.new_zeros(most_few + 1).scatter_(0, places_T, token_T)[:most_few]
    return LatentBatch(
        absorbed=replace(batch, starts=few_starts.int(), max_query=few),
        expanded=replace(batch, lengths_B=torch.where(is_few_B, 0, batch.lengths_B)),
        num_keys=num_keys,
        tokens_F=tokens_F,
        places_T=places_T.clamp(max=most_few - 1),
        is_absorbed_T=is_few_T,
    )


def latent_attention(
    q_TNP: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    up_NUC: Tensor,
    batch: LatentBatch,
    scale: float,
    *,
    decode: Callable[..., Tensor] = latent_decode,
    prefill: Callable[..., Tensor] = latent_prefill,
) -> Tensor:
    """[T, N, V], for queries whose second part is rotated, over a cache that holds this step's rows already
    (`latent_to_cache`). `decode` and `prefill` are versions of LATENT_DECODE and LATENT_PREFILL."""
    if batch.expanded is None:
        return _absorbed(q_TNP, q_TNR, cache, up_NUC, batch.absorbed, scale, decode)
    assert batch.tokens_F is not None and batch.places_T is not None and batch.is_absorbed_T is not None
    out_TNV = prefill(q_TNP, q_TNR, cache, up_NUC, batch.expanded, scale, batch.num_keys)
    few_FNP, few_FNR = q_TNP.index_select(0, batch.tokens_F), q_TNR.index_select(0, batch.tokens_F)
    few_FNV = _absorbed(few_FNP, few_FNR, cache, up_NUC, batch.absorbed, scale, decode)
    return torch.where(batch.is_absorbed_T[:, None, None], few_FNV.index_select(0, batch.places_T), out_TNV)


def _absorbed(
    q_TNP: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    up_NUC: Tensor,
    batch: PagedBatch,
    scale: float,
    decode: Callable[..., Tensor],
) -> Tensor:
    nope_dim = q_TNP.shape[-1]
    q_NTC = torch.bmm(q_TNP.transpose(0, 1), up_NUC[:, :nope_dim])
    out_TNC = decode(q_NTC.transpose(0, 1), q_TNR, cache, batch, scale)
    return torch.bmm(out_TNC.transpose(0, 1), up_NUC[:, nope_dim:].transpose(1, 2)).transpose(0, 1)
