"""What training adds to an expert layer: the balance and z losses of its router, counts of its choices, and capacity.

The losses are sums over tokens and sequences divided by the step's totals, so they do not depend on how a step is split
into micro-batches and ranks. They are added to the gradient of the layer's output: the output stays the layer's only
result, and choices are counted once, in the backward pass, however often a forward pass is recomputed.

Capacity follows GShard (Lepikhin et al. 2020), within each sequence by itself: all first choices before all second
ones, and among equals the earlier position first. So what is dropped does not depend on how sequences are batched or
sharded; where ranks share a sequence, its choices are gathered first. A dropped choice adds nothing; the weights of the
others stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.torch_compat import uncompiled
from armillary.spec.model import MoE

Rule = Callable[[Tensor], Tensor]
# B sequences, T tokens of each, M = B·T, E experts, k choices per token


@dataclass(kw_only=True)
class RouterBalance:
    """Losses and capacity of one layer's router, and where its counts go."""

    aux_weight: float  # of the balance loss, over layers and tokens of a step
    z_weight: float  # of the z-loss, over layers and tokens of a step
    capacity: float | None
    """capacity of an expert per sequence, as a multiple of the fair share; None: unlimited"""
    scale: Tensor
    tally: Tensor  # [2E + 3]: see `Counts`
    copies: int = 1
    """ranks that route the same tokens, all of whose gradients are summed"""
    over_ranks: Callable[[Tensor], Tensor] | None = None
    """sums counts over ranks that hold other parts of the same sequences"""
    over_rows: Callable[[Rule, Tensor], Tensor] | None = None
    """applies a rule to the choices [B, T, k] of complete sequences, of which this rank has a part, and returns that
    part"""

    def within_capacity(self, chosen_Mk: Tensor, sequences: int, moe: MoE) -> Tensor:
        """The choices, where those beyond the capacity name no expert."""
        if (capacity := self.capacity) is None:
            return chosen_Mk

        def rule(chosen_BTk: Tensor) -> Tensor:
            return drop_beyond(chosen_BTk.flatten(0, 1), sequences, moe, capacity).view_as(chosen_BTk)

        chosen_BTk = chosen_Mk.unflatten(0, (sequences, -1))
        return (rule(chosen_BTk) if self.over_rows is None else self.over_rows(rule, chosen_BTk)).flatten(0, 1)


class Counts:
    """The columns of a tally."""

    def __init__(self, num_experts: int) -> None:
        self.load = slice(0, num_experts)  # choices of each expert, dropped ones too
        self.probability = slice(num_experts, 2 * num_experts)  # sum over tokens of the router's probabilities
        self.aux, self.z, self.dropped = (2 * num_experts + i for i in range(3))
        """both losses before their weights; choices that were dropped"""
        self.size = 2 * num_experts + 3


@uncompiled  # counts are kept outside the graph
def with_router_losses(
    out_BTH: Tensor,
    logits_ME: Tensor,
    probability_ME: Tensor,
    chosen_Mk: Tensor,
    kept_Mk: Tensor,
    balance: RouterBalance,
) -> Tensor:
    """The layer's output unchanged; its backward pass adds the gradients of the router's losses, and counts.

    Balance loss of a sequence (Fedus et al. 2021, per sequence as in DeepSeek-V3): E/k · Σ_e f_e · P_e, f_e the choices
    of expert e and P_e its mean probability, both over the sequence's tokens; 1 where the load is even. z-loss (Zoph et
    al. 2022): the squared log-sum-exp of a token's logits.
    """
    sequences, (_, num_experts) = len(out_BTH), logits_ME.shape
    tokens = len(logits_ME) // sequences
    chosen_ME = (chosen_Mk[..., None] == torch.arange(num_experts, device=chosen_Mk.device)).sum(dim=1)
    load_BE = chosen_ME.view(sequences, tokens, num_experts).sum(dim=1).to(logits_ME.dtype)
    total_BE = load_BE if balance.over_ranks is None else balance.over_ranks(load_BE)
    share_BE = total_BE / total_BE.sum(dim=-1, keepdim=True)  # of the k·T choices of a complete sequence
    aux = num_experts * (share_BE * probability_ME.view(sequences, tokens, num_experts).sum(dim=1)).sum()
    z = logits_ME.logsumexp(dim=-1).square().sum()
    added = (balance.aux_weight * aux + balance.z_weight * z) / balance.copies
    dropped = (kept_Mk == num_experts).sum()
    sums = (load_BE.sum(dim=0), probability_ME.sum(dim=0), torch.stack((aux, z)), dropped[None])
    counted = torch.cat([part.detach().to(balance.tally.dtype) for part in sums])
    return _WithRouterLosses.apply(out_BTH, added, counted, balance)  # type: ignore[no-any-return]


class _WithRouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, added: Tensor, counted: Tensor, balance: RouterBalance) -> Tensor:
        ctx.balance, ctx.dtype = balance, added.dtype
        ctx.save_for_backward(counted)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        balance = ctx.balance
        balance.tally += ctx.saved_tensors[0]
        return grad, balance.scale.to(ctx.dtype) if ctx.needs_input_grad[1] else None, None, None


# B sequences, T tokens of each, M = B·T, E experts, k choices per token


def capacity_per_sequence(tokens: int, moe: MoE, capacity: float) -> int:
    """⌈capacity · T · k / E⌉: the fair share of a sequence of T tokens, times `capacity`."""
    return ceil(capacity * tokens * moe.top_k / moe.num_experts - 1e-9)  # 1.1 · 10 is slightly above 11


def drop_beyond(experts_Mk: Tensor, sequences: int, moe: MoE, capacity: float) -> Tensor:
    """The choices (the likeliest first) of complete sequences, where those beyond the capacity name no expert (E)."""
    tokens = len(experts_Mk) // sequences
    taken_Mk = _queue_positions(experts_Mk, sequences, moe.num_experts)
    return experts_Mk.masked_fill(taken_Mk >= capacity_per_sequence(tokens, moe, capacity), moe.num_experts)


def _queue_positions(experts_Mk: Tensor, sequences: int, num_experts: int) -> Tensor:
    """How many earlier choices of the same sequence each choice has at its expert."""
    tokens, k = len(experts_Mk) // sequences, experts_Mk.shape[1]
    by_rank_BkT = experts_Mk.view(sequences, tokens, k).transpose(1, 2)
    row_B11 = torch.arange(sequences, device=experts_Mk.device)[:, None, None]
    queues = (by_rank_BkT + row_B11 * num_experts).flatten()
    ordered, order = queues.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)  # where each queue begins
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device) - first
    return positions.view(sequences, k, tokens).transpose(1, 2).reshape(-1, k)
