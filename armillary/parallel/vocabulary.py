"""Embedding and loss cut along the vocabulary: no rank holds all rows of the table or all logits of a token.

Each rank looks up, or scores, the ids of its own rows; sums over the ranks make the whole. The cross entropy follows
Shoeybi et al. 2019 (Megatron-LM): log Σ exp is reduced over ranks, and the target's logit comes from its owner.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from armillary.model.dtype import widen
from armillary.model.transformer import Transformer
from armillary.parallel.collectives import Group, all_reduce, gather, scatter, share, summed

# M tokens (batch and time flattened), H hidden, v this rank's rows of the vocabulary
IGNORED = -100
"""a target that does not count"""


def first_row(vocab: int, group: Group) -> int:
    """Of this rank's rows; the last ranks have fewer where the vocabulary does not divide."""
    return min(group.rank * -(-vocab // group.size), vocab)


def look_up(tokens_BT: Tensor, table_vH: Tensor, first: int, group: Group, *, cut_tokens: bool) -> Tensor:
    """Embeddings of the tokens, whole [B, T, H] or cut along T."""
    local_BT = tokens_BT - first
    elsewhere_BT = (local_BT < 0) | (local_BT >= len(table_vH))
    if len(table_vH):
        found_BTH = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), table_vH)
        found_BTH = found_BTH.masked_fill(elsewhere_BT[..., None], 0.0)
    else:  # more ranks than rows: nothing of its own, yet it takes part in the sum and its empty gradient
        found_BTH = table_vH.sum().expand(*tokens_BT.shape, table_vH.shape[1])
    return scatter(found_BTH, group, dim=1) if cut_tokens else summed(found_BTH, group)


def loss_sum(
    model: Transformer, hidden_BTH: Tensor, targets_BT: Tensor, *, chunk: int, group: Group, cut_tokens: bool
) -> Tensor:
    """Sum of the losses of all targets that count, the same on every rank; `chunk` tokens at a time (0: all)."""
    whole_BTH = gather(hidden_BTH, group, dim=1) if cut_tokens else share(hidden_BTH, group)
    hidden_MH, targets_M = whole_BTH.flatten(0, 1), targets_BT.flatten()
    if not chunk or len(targets_M) <= chunk:
        return _sum(model, hidden_MH, targets_M, group)
    total = hidden_MH.new_zeros((), dtype=torch.promote_types(hidden_MH.dtype, torch.float32))
    for hidden_mH, targets_m in zip(hidden_MH.split(chunk), targets_M.split(chunk), strict=True):
        if torch.is_grad_enabled():
            part: Any = checkpoint(
                _sum, model, hidden_mH, targets_m, group, use_reentrant=False, preserve_rng_state=False
            )
        else:
            part = _sum(model, hidden_mH, targets_m, group)
        total = total + part
    return total


def _sum(model: Transformer, hidden_MH: Tensor, targets_M: Tensor, group: Group) -> Tensor:
    logits_Mv = widen(model.head(hidden_MH))
    counts_M = targets_M != IGNORED
    with torch.no_grad():
        best_M = logits_Mv.amax(dim=-1) if logits_Mv.shape[-1] else logits_Mv.new_full((len(logits_Mv),), -torch.inf)
        best_M = all_reduce(best_M, group, "max")
    shifted_Mv = logits_Mv - best_M[:, None]
    own_M = targets_M - first_row(model.config.vocab, group)
    is_own_M = counts_M & (own_M >= 0) & (own_M < logits_Mv.shape[-1])
    if logits_Mv.shape[-1]:
        target_M = shifted_Mv.gather(-1, own_M.where(is_own_M, 0)[:, None])[:, 0].where(is_own_M, 0.0)
    else:
        target_M = shifted_Mv.sum(dim=-1)
    total_M, chosen_M = summed(torch.stack((shifted_Mv.exp().sum(dim=-1), target_M)), group)
    return (total_M.log() - chosen_M).where(counts_M, 0.0).sum()
