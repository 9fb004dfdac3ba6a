"""Mixture of experts: a router, a top-k choice, and stacked experts [E, 2F, H], [E, H, F].

`plain_dispatch` gathers tokens expert by expert: the slow twin of the sorted and the all-to-all dispatch.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.kernels.core.dtype import widen
from armillary.kernels.moe.expert_choice import choose_experts
from armillary.kernels.moe.expert_load import ExpertLoad, count_choices
from armillary.kernels.moe.moe import MoEWeights
from armillary.model.layers.mlp import MLP, activate
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.moe.router_losses import RouterBalance, with_router_losses
from armillary.spec.model import ModelConfig, MoE

# M tokens (batch and time flattened), E experts, F expert inner size, H hidden, k experts per token
Grouped = Callable[..., Tensor]
"""grouped(x_PK, weight_ENK, ends_E, full) -> y_PN: a version of `kernels.gemm.grouped.grouped_linear`"""
Overlapped = Callable[[], Tensor | None]
"""work that does not depend on the routed experts, done while they are waited for"""
Dispatch = Callable[["Experts", Tensor, Tensor, Tensor, Overlapped], tuple[Tensor, Tensor | None]]
"""dispatch(experts, x_MH, weights_Mk, experts_Mk, overlapped) -> (sum of the chosen experts_MH, overlapped())"""


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
        return self.choose(self.logits(x_MH))

    def logits(self, x_MH: Tensor) -> Tensor:
        """[M, E], in fp32 or wider."""
        return widen(F.linear(x_MH, self.weight, self.bias))

    def probabilities(self, logits_ME: Tensor) -> Tensor:
        """Over all experts, each row summing to 1."""
        if self.moe.score != "sigmoid":
            return logits_ME.softmax(dim=-1)
        scores_ME = logits_ME.sigmoid()
        return scores_ME / scores_ME.sum(dim=-1, keepdim=True).clamp_min(1e-20)

    def choose(self, logits_ME: Tensor) -> tuple[Tensor, Tensor]:
        """(weights_Mk, experts_Mk), the likeliest first."""
        return choose_experts(logits_ME, self.moe, self.selection_bias)


class Experts(nn.Module):
    """All routed experts of a layer, stacked."""

    def __init__(self, hidden: int, moe: MoE, activation: str) -> None:
        super().__init__()
        self.moe, self.activation = moe, activation
        self.chosen: Callable[..., Tensor] | None = None
        self.weights_16bit: Weights16Bit | None = None
        self.parts = 1  # shards of the sums over F: each adds its part of the bias
        self.up_E2FH = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.ffn, hidden))
        self.down_EHF = nn.Parameter(torch.empty(moe.num_experts, hidden, moe.ffn))
        self.up_bias_E2F = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.ffn)) if moe.expert_bias else None
        self.down_bias_EH = nn.Parameter(torch.empty(moe.num_experts, hidden)) if moe.expert_bias else None

    def forward(self, rows_PH: Tensor, experts_P: Tensor, ends_E: Tensor, grouped: Grouped, full: bool) -> Tensor:
        """Rows sorted by expert, each through its own; `ends_E` is where the rows of each expert end, and `full` says
        that all rows have an expert."""
        up_E2FH, down_EHF = self.weights(rows_PH.dtype)
        inner_P2F = grouped(rows_PH, up_E2FH, ends_E, full)
        if self.up_bias_E2F is not None:
            inner_P2F = inner_P2F + _bias_of_row(self.up_bias_E2F, experts_P, inner_P2F.dtype)
        out_PH = grouped(self.activate(inner_P2F), down_EHF, ends_E, full)
        if self.down_bias_EH is not None:
            out_PH = out_PH + _bias_of_row(self.down_bias_EH / self.parts, experts_P, out_PH.dtype)
        return out_PH

    def single(self, x_MH: Tensor, expert: int) -> Tensor:
        up_bias = None if self.up_bias_E2F is None else self.up_bias_E2F[expert]
        down_bias = None if self.down_bias_EH is None else self.down_bias_EH[expert]
        inner = self.activate(F.linear(x_MH, self.up_E2FH[expert], up_bias))
        return F.linear(inner, self.down_EHF[expert], down_bias)

    def weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(up_E2FH, down_EHF) in the dtype of the GEMM: cast, or the 16-bit copies."""
        up, down = self.up_E2FH, self.down_EHF
        if self.weights_16bit is not None and self.weights_16bit.dtype == dtype and isinstance(up, nn.Parameter):
            return self.weights_16bit(up), self.weights_16bit(down)
        return up.to(dtype), down.to(dtype)

    def activate(self, inner_M2F: Tensor) -> Tensor:
        if self.chosen is not None:
            return self.chosen(inner_M2F, self.activation, True)
        return activate(inner_M2F, self.activation, gated=True)


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
        self.dispatch: Dispatch = plain_dispatch
        self.balance: RouterBalance | None = None  # router losses and counts of training; inactive without gradients
        self.copies = 1  # ranks that route the same tokens

    def fused(self, run: Callable[..., Tensor], x_MH: Tensor, load: ExpertLoad | None = None) -> Tensor:
        """By a version of `kernels.moe.moe.moe_layer`, without gradients."""
        return run(x_MH, self.weights(), self.moe, self.experts.activation, None, self.shared_part(x_MH), load=load)

    def weights(self) -> MoEWeights:
        experts, router = self.experts, self.router
        return MoEWeights(
            router_EH=router.weight,
            up_E2FH=experts.up_E2FH,
            down_EHF=experts.down_EHF,
            router_bias_E=router.bias,
            selection_bias_E=router.selection_bias,
            up_bias_E2F=experts.up_bias_E2F,
            down_bias_EH=experts.down_bias_EH,
        )

    def forward(self, x_BTH: Tensor, load: ExpertLoad | None = None) -> Tensor:
        x_MH = x_BTH.flatten(0, 1)
        logits_ME = self.router.logits(x_MH)
        weights_Mk, chosen_Mk = self.router.choose(logits_ME)
        if load is not None:
            count_choices(load, chosen_Mk)
        balance = self.balance if torch.is_grad_enabled() else None
        experts_Mk = chosen_Mk if balance is None else balance.within_capacity(chosen_Mk, len(x_BTH), self.moe)
        mixed_MH, shared_MH = self.dispatch(
            self.experts, x_MH, weights_Mk.to(x_MH.dtype), experts_Mk, lambda: self.shared_part(x_MH)
        )
        mixed_BTH = (mixed_MH if shared_MH is None else mixed_MH + shared_MH).view_as(x_BTH)
        if balance is None:
            return mixed_BTH
        return with_router_losses(
            mixed_BTH, logits_ME, self.router.probabilities(logits_ME), chosen_Mk, experts_Mk, balance
        )

    def shared_part(self, x_MH: Tensor) -> Tensor | None:
        """The shared expert's part, which every token has."""
        if self.shared is None:
            return None
        shared_MH: Tensor = self.shared(x_MH)
        return shared_MH if self.shared_gate is None else torch.sigmoid(self.shared_gate(x_MH)) * shared_MH


def _bias_of_row(bias_EN: Tensor, experts_P: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias of each row's expert; rows of no expert get the last one's, and are discarded."""
    return _BiasOfRow.apply(bias_EN.to(dtype), experts_P)  # type: ignore[no-any-return]


class _BiasOfRow(torch.autograd.Function):
    """Gradients are summed by a GEMM, in fp32: adding rows one by one in a 16-bit dtype loses digits."""

    @staticmethod
    def forward(ctx: Any, bias_EN: Tensor, experts_P: Tensor) -> Tensor:
        ctx.save_for_backward(experts_P)
        ctx.experts = len(bias_EN)
        return bias_EN[experts_P.clamp(max=len(bias_EN) - 1)]

    @staticmethod
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (experts_P,) = ctx.saved_tensors
        is_its_EP = torch.arange(ctx.experts, device=experts_P.device)[:, None] == experts_P
        return is_its_EP.to(grad_PN.dtype) @ grad_PN, None


def plain_dispatch(
    experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
) -> tuple[Tensor, Tensor | None]:
    """Expert by expert; a dropped choice (which names no expert) is skipped."""
    mixed_MH = torch.zeros_like(x_MH)
    for expert in range(experts.moe.num_experts):
        tokens, slots = torch.where(experts_Mk == expert)
        weights_m1 = weights_Mk[tokens, slots, None]
        if experts.moe.scale_input:
            out = experts.single(x_MH[tokens] * weights_m1, expert)
        else:
            out = experts.single(x_MH[tokens], expert) * weights_m1
        mixed_MH = mixed_MH.index_add(0, tokens, out.to(mixed_MH.dtype))
    return mixed_MH, overlapped()
