"""Which experts a token goes to, and with which weights: top-k of the router's scores."""

import torch
from torch import Tensor

from armillary.spec.model import MoE

# M tokens, E experts, k experts per token, G groups of experts


def choose_experts(logits_ME: Tensor, moe: MoE, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights_Mk, experts_Mk), the likeliest first; `logits` are fp32 or wider."""
    if moe.score == "softmax_topk":
        top_Mk, experts_Mk = logits_ME.topk(moe.top_k, dim=-1)
        return top_Mk.softmax(dim=-1), experts_Mk
    scores_ME = logits_ME.softmax(dim=-1) if moe.score == "softmax" else logits_ME.sigmoid()
    choice_ME = scores_ME if selection_bias is None else scores_ME + selection_bias
    if moe.groups > 1:
        choice_ME = _limit_groups(choice_ME, moe)
    experts_Mk = choice_ME.topk(moe.top_k, dim=-1).indices
    weights_Mk = scores_ME.gather(-1, experts_Mk)
    if moe.normalize:
        weights_Mk = weights_Mk / weights_Mk.sum(dim=-1, keepdim=True).clamp_min(1e-20)
    return weights_Mk * moe.routed_scale, experts_Mk


def _limit_groups(choice_ME: Tensor, moe: MoE) -> Tensor:
    """Keep only the experts of the best groups; a group's score is that of its best (or two best) experts."""
    grouped_MGe = choice_ME.unflatten(-1, (moe.groups, -1))
    best = 2 if moe.selection_bias else 1
    group_scores_MG = grouped_MGe.topk(best, dim=-1).values.sum(dim=-1)
    kept_Mg = group_scores_MG.topk(moe.top_groups, dim=-1).indices
    keep_MG = torch.zeros_like(group_scores_MG, dtype=torch.bool).scatter(-1, kept_Mg, True)
    return grouped_MGe.masked_fill(~keep_MG[..., None], -torch.inf).flatten(1)
