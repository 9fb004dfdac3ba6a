"""Mixture of experts: a router that scores, a choice of top-k, and stacked experts [E, 2F, H], [E, H, F].

This is the plain dispatch that others are held against: tokens are gathered expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.dtype import widen
from armillary.model.mlp import MLP, activate
from armillary.spec.model import ModelConfig, MoE

# M tokens (batch and time flattened), E experts, F expert inner size, H hidden, k experts a token


class Router(nn.Module):
    """Scores experts for each token and chooses the top k."""

    selection_bias: Tensor | None

    def __init__(self, hidden: int, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden))
        self.bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.router_bias else None
        self.register_buffer("selection_bias", torch.zeros(moe.num_experts) if moe.selection_bias else None)

    def reset(self) -> None:
        if self.selection_bias is not None:
            self.selection_bias = torch.zeros(self.moe.num_experts, device=self.weight.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.selection_bias is not None:  # small steps of balancing would vanish below fp32
            self.selection_bias = self.selection_bias.float()
        return self

    def forward(self, x_MH: Tensor) -> tuple[Tensor, Tensor]:
        """(weights_Mk in fp32 or wider, experts_Mk)."""
        logits_ME = widen(F.linear(x_MH, self.weight, self.bias))
        if self.moe.score == "softmax_topk":
            top_Mk, experts_Mk = logits_ME.topk(self.moe.top_k, dim=-1)
            return top_Mk.softmax(dim=-1), experts_Mk
        scores_ME = logits_ME.softmax(dim=-1) if self.moe.score == "softmax" else logits_ME.sigmoid()
        experts_Mk = self._choose(scores_ME)
        weights_Mk = scores_ME.gather(-1, experts_Mk)
        if self.moe.normalize:
            weights_Mk = weights_Mk / weights_Mk.sum(dim=-1, keepdim=True).clamp_min(1e-20)
        return weights_Mk * self.moe.routed_scale, experts_Mk

    def _choose(self, scores_ME: Tensor) -> Tensor:
        choice_ME = scores_ME if self.selection_bias is None else scores_ME + self.selection_bias
        if self.moe.groups > 1:
            choice_ME = self._limit_groups(choice_ME)
        return choice_ME.topk(self.moe.top_k, dim=-1).indices

    def _limit_groups(self, choice_ME: Tensor) -> Tensor:
        """Only the experts of the best groups stay; a group is as good as its best (or two best) experts."""
        grouped_MGe = choice_ME.unflatten(-1, (self.moe.groups, -1))
        best = 2 if self.moe.selection_bias else 1
        group_scores_MG = grouped_MGe.topk(best, dim=-1).values.sum(dim=-1)
        kept_Mg = group_scores_MG.topk(self.moe.top_groups, dim=-1).indices
        keep_MG = torch.zeros_like(group_scores_MG, dtype=torch.bool).scatter(-1, kept_Mg, True)
        return grouped_MGe.masked_fill(~keep_MG[..., None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, hidden: int, moe: MoE, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.chosen: Callable[..., Tensor] | None = None
        self.up_E2FH = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.ffn, hidden))
        self.down_EHF = nn.Parameter(torch.empty(moe.num_experts, hidden, moe.ffn))
        self.up_bias_E2F = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.ffn)) if moe.expert_bias else None
        self.down_bias_EH = nn.Parameter(torch.empty(moe.num_experts, hidden)) if moe.expert_bias else None

    def forward(self, x_MH: Tensor, expert: int) -> Tensor:
        """One expert on the tokens it was given."""
        up_bias = None if self.up_bias_E2F is None else self.up_bias_E2F[expert]
        down_bias = None if self.down_bias_EH is None else self.down_bias_EH[expert]
        inner = F.linear(x_MH, self.up_E2FH[expert], up_bias)
        if self.chosen is not None:
            inner = self.chosen(inner, self.activation, True)
        else:
            inner = activate(inner, self.activation, gated=True)
        return F.linear(inner, self.down_EHF[expert], down_bias)


class MixtureOfExperts(nn.Module):
    """Router, experts, and the shared expert where there is one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.moe = moe
        self.router = Router(config.hidden, moe)
        self.experts = Experts(config.hidden, moe, config.activation)
        self.shared = self.shared_gate = None
        if moe.shared_ffn:
            self.shared = MLP(config.hidden, moe.shared_ffn, activation=config.activation, gated=True, bias=False)
        if moe.shared_gate:
            self.shared_gate = nn.Linear(config.hidden, 1, bias=False)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_MH = x_BTH.flatten(0, 1)
        weights_Mk, experts_Mk = self.router(x_MH)
        mixed_MH = self._dispatch(x_MH, weights_Mk.to(x_MH.dtype), experts_Mk)
        if self.shared is not None:
            shared_MH = self.shared(x_MH)
            gate = 1.0 if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_MH))
            mixed_MH = mixed_MH + gate * shared_MH
        return mixed_MH.view_as(x_BTH)

    def _dispatch(self, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor) -> Tensor:
        mixed_MH = torch.zeros_like(x_MH)
        for expert in range(self.moe.num_experts):
            tokens, slots = torch.where(experts_Mk == expert)
            weights_m1 = weights_Mk[tokens, slots, None]
            if self.moe.scale_input:
                out = self.experts(x_MH[tokens] * weights_m1, expert)
            else:
                out = self.experts(x_MH[tokens], expert) * weights_m1
            mixed_MH = mixed_MH.index_add(0, tokens, out.to(mixed_MH.dtype))
        return mixed_MH
