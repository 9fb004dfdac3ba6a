"""Capacity: how many places an expert gives to each sequence, and which choices go without one.

A place is taken by the rule of GShard (Lepikhin et al. 2020), within each sequence by itself: all first choices before
all second ones, and among equals the earlier position first. So what is dropped does not depend on how sequences are
put into batches or over ranks; where ranks share one, its choices are gathered first. A dropped choice adds nothing;
the weights of the others stay as they are.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from armillary.spec.model import MoE

# B sequences, T tokens of each, M = B·T, E experts, k choices a token


def places(tokens: int, moe: MoE, capacity: float) -> int:
    """⌈capacity · T · k / E⌉: the fair share of a sequence of T tokens, times `capacity`."""
    return ceil(capacity * tokens * moe.top_k / moe.num_experts - 1e-9)  # 1.1 · 10 is a hair above 11


def drop_beyond(experts_Mk: Tensor, sequences: int, moe: MoE, capacity: float) -> Tensor:
    """The choices (the likeliest first) of whole sequences, where those without a place name no expert (E)."""
    tokens = len(experts_Mk) // sequences
    taken_Mk = _turns(experts_Mk, sequences, moe.num_experts)
    return experts_Mk.masked_fill(taken_Mk >= places(tokens, moe, capacity), moe.num_experts)


def _turns(experts_Mk: Tensor, sequences: int, num_experts: int) -> Tensor:
    """How many choices of the same sequence stand before each one at its expert."""
    tokens, k = len(experts_Mk) // sequences, experts_Mk.shape[1]
    by_rank_BkT = experts_Mk.view(sequences, tokens, k).transpose(1, 2)
    row_B11 = torch.arange(sequences, device=experts_Mk.device)[:, None, None]
    queues = (by_rank_BkT + row_B11 * num_experts).flatten()
    ordered, order = queues.sort(stable=True)
    first = torch.searchsorted(ordered, ordered)  # where each one's queue begins
    turns = torch.empty_like(order)
    turns[order] = torch.arange(len(order), device=order.device) - first
    return turns.view(sequences, k, tokens).transpose(1, 2).reshape(-1, k)
