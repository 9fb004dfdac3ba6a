"""Embedding and loss sharded along the vocabulary: no rank has all rows of the table or all logits of a token.

Each rank looks up, or scores, the ids of its own rows; an all-reduce gives the result. The cross entropy follows
Shoeybi et al. 2019 (Megatron-LM): log Σ exp is reduced over ranks, and the target's logit comes from its owner.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from armillary.kernels.core.dtype import widen
from armillary.model.transformer import Transformer
from armillary.parallel.collectives import Group, all_reduce, gather, scatter, share, summed

# M tokens (batch and time flattened), H hidden, v this rank's rows of the vocabulary
IGNORED = -100
"""a target that does not count"""


def first_row(vocab: int, group: Group) -> int:
    """Of this rank's rows; the last ranks have fewer where the vocabulary does not divide."""
    return min(group.rank * -(-vocab // group.size), vocab)


def look_up(tokens_BT: Tensor, table_vH: Tensor, first: int, group: Group, *, shard_tokens: bool) -> Tensor:
    """Embeddings of the tokens, [B, T, H] or sharded along T."""
    local_BT = tokens_BT - first
    elsewhere_BT = (local_BT < 0) | (local_BT >= len(table_vH))
    if len(table_vH):
        rows_BTH = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), table_vH)
        rows_BTH = rows_BTH.masked_fill(elsewhere_BT[..., None], 0.0)
    else:  # more ranks than rows: nothing of its own, yet it takes part in the sum and its empty gradient
        rows_BTH = table_vH.sum().expand(*tokens_BT.shape, table_vH.shape[1])
    return scatter(rows_BTH, group, dim=1) if shard_tokens else summed(rows_BTH, group)


def loss_sum(
    model: Transformer, hidden_BTH: Tensor, targets_BT: Tensor, *, chunk: int, group: Group, shard_tokens: bool
) -> Tensor:
    """Sum of the losses of all targets that count, the same on every rank; `chunk` tokens at a time (0: all)."""
    full_BTH = gather(hidden_BTH, group, dim=1) if shard_tokens else share(hidden_BTH, group)
    hidden_MH, targets_M = full_BTH.flatten(0, 1), targets_BT.flatten()
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
    logits_Mv = model.head(hidden_MH)
    counts_M = targets_M != IGNORED
    own_M = targets_M - first_row(model.config.vocab, group)
    is_own_M = counts_M & (own_M >= 0) & (own_M < logits_Mv.shape[-1])
    losses_M: Tensor = _CrossEntropy.apply(logits_Mv, own_M.where(is_own_M, 0), is_own_M, group)
    return losses_M.where(counts_M, 0.0).sum()


class _CrossEntropy(torch.autograd.Function):
    """Each token's loss from this rank's logits. Only exp(logit - max) is saved, and the gradient is computed from it
    in place: the backward pass can run once."""

    @staticmethod
    def forward(ctx: Any, logits_Mv: Tensor, own_M: Tensor, is_own_M: Tensor, group: Group) -> Tensor:
        wide_Mv, empty = widen(logits_Mv), not logits_Mv.shape[-1]
        best_M = wide_Mv.new_full((len(wide_Mv),), -torch.inf) if empty else wide_Mv.amax(dim=-1)
        best_M = all_reduce(best_M, group, "max")
        shifted_Mv = wide_Mv - best_M[:, None] if wide_Mv is logits_Mv else wide_Mv.sub_(best_M[:, None])
        target_M = best_M * 0 if empty else shifted_Mv.gather(-1, own_M[:, None])[:, 0].where(is_own_M, 0.0)
        exp_Mv = shifted_Mv.exp_()
        total_M, chosen_M = all_reduce(torch.stack((exp_Mv.sum(dim=-1), target_M)), group)
        ctx.save_for_backward(exp_Mv, total_M, own_M, is_own_M)
        ctx.dtype = logits_Mv.dtype
        return total_M.log() - chosen_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """(softmax - 1 at the target) · incoming gradient."""
        exp_Mv, total_M, own_M, is_own_M = ctx.saved_tensors
        (grad_M,) = grads
        grad_Mv = exp_Mv.mul_((grad_M / total_M)[:, None])
        if grad_Mv.shape[-1]:
            grad_Mv.scatter_add_(-1, own_M[:, None], -grad_M.where(is_own_M, 0.0)[:, None])
        return grad_Mv.to(ctx.dtype), None, None, None
