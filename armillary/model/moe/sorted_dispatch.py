"""Dropless dispatch: copies of tokens sorted by expert, all experts in one grouped product, results put back, summed.

Moving rows is a permutation and its inverse, forward and backward, so nothing is added atomically and nothing waits for
the device. A token's experts are summed in the order of their numbers, as the plain dispatch does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.compile import uncompiled
from armillary.kernels.gemm.grouped import grouped_linear
from armillary.model.moe.experts import Beside, Experts, Grouped

# M tokens, k choices of each, P = M·k copies, E experts, H hidden


class Sorted(NamedTuple):
    """The copies of tokens in the order of their experts."""

    source_P: Tensor
    """the token each sorted row is a copy of"""
    inverse_Mk: Tensor
    """where each token's copies are, by the number of their expert"""
    weights_P: Tensor
    """of the sorted rows"""
    experts_P: Tensor
    """of the sorted rows; E where a choice was dropped"""
    ends_E: Tensor
    """where the rows of each expert end"""


def sort_copies(weights_Mk: Tensor, experts_Mk: Tensor, num_experts: int) -> Sorted:
    """Stable: copies of one expert stay in the order of their tokens."""
    experts_Mk, slots_Mk = experts_Mk.sort(dim=-1)
    experts_P, order_P = experts_Mk.flatten().sort(stable=True)
    ends_E = torch.searchsorted(experts_P, torch.arange(num_experts, device=experts_P.device), right=True)
    k = experts_Mk.shape[1]
    source_P = order_P // k
    from_P = source_P * k + slots_Mk.flatten()[order_P]  # the choice each row is for
    weights_P = permuted(weights_Mk.flatten(), from_P, inverted(from_P))
    return Sorted(source_P, inverted(order_P).view(-1, k), weights_P, experts_P, ends_E.to(torch.int32))


def inverted(order_R: Tensor) -> Tensor:
    """Where each one went."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return inverse_R


def permuted(rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows in another order; gradients are put back rather than added up."""
    result: Tensor = _Permuted.apply(rows_RH, order_R, inverse_R)
    return result


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_RH.index_select(0, ctx.saved_tensors[0]), None, None


class SortedDispatch:
    """`MixtureOfExperts.dispatch` by one grouped product for all experts of a layer."""

    def __init__(self, grouped: Grouped = grouped_linear, *, drops: bool = False) -> None:
        """`drops` where choices may name no expert."""
        self.grouped, self.drops = grouped, drops

    @uncompiled  # kernels of its own, which no compiler makes better
    def __call__(
        self, experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, beside: Beside
    ) -> tuple[Tensor, Tensor | None]:
        found, rows_PH = sorted_rows(experts, x_MH, weights_Mk, experts_Mk)
        out_PH = experts(rows_PH, found.experts_P, found.ends_E, self.grouped, not self.drops)
        return collect(experts, out_PH, found).to(x_MH.dtype), beside()


def sorted_rows(experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor) -> tuple[Sorted, Tensor]:
    """The copies of all tokens in the order of their experts, ready to be multiplied."""
    found = sort_copies(weights_Mk, experts_Mk, experts.moe.num_experts)
    rows_PH = spread(multiplied_as(x_MH), found)
    if experts.moe.scale_input:
        rows_PH = rows_PH * found.weights_P[:, None].to(rows_PH.dtype)
    return found, rows_PH


def multiplied_as(x: Tensor) -> Tensor:
    """In the format that autocast multiplies in."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def spread(x_MH: Tensor, found: Sorted) -> Tensor:
    """Every token's copies, in the order of their experts."""
    rows_PH: Tensor = _Spread.apply(x_MH, found.source_P, found.inverse_Mk)
    return rows_PH


def collect(experts: Experts, out_PH: Tensor, found: Sorted) -> Tensor:
    """The weighted sum of each token's copies; those of nobody count as zero."""
    if not experts.moe.scale_input:
        out_PH = out_PH * found.weights_P[:, None].to(out_PH.dtype)
    if experts.down_bias_EH is not None:
        out_PH = out_PH.where(found.experts_P[:, None] < experts.moe.num_experts, 0.0)
    mixed_MH: Tensor = _Collect.apply(out_PH, found.source_P, found.inverse_Mk)
    return mixed_MH


def _gathered_sums(rows_PH: Tensor, inverse_Mk: Tensor) -> Tensor:
    first, *others = inverse_Mk.unbind(1)
    total = rows_PH.index_select(0, first)
    for at_M in others:
        total = total + rows_PH.index_select(0, at_M)
    return total


class _Spread(torch.autograd.Function):
    """Its gradient is what `_Collect` does, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, source_P: Tensor, inverse_Mk: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_Mk)
        return x_MH.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered_sums(grad_PH, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PH: Tensor, source_P: Tensor, inverse_Mk: Tensor) -> Tensor:
        ctx.save_for_backward(source_P)
        return _gathered_sums(rows_PH, inverse_Mk)

    @staticmethod
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_MH.index_select(0, ctx.saved_tensors[0]), None, None
