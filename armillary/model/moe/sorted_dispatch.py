"""Dropless dispatch: copies of tokens sorted by expert, one grouped GEMM for all experts, results unsorted and summed.

Moving rows is a permutation and its inverse, forward and backward, so there are no atomics and nothing waits for the
device. A token's experts are summed in the order of their numbers, as in the plain dispatch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.torch_compat import uncompiled
from armillary.kernels.gemm.grouped import grouped_linear
from armillary.model.moe.experts import Experts, Grouped, Overlapped

# M tokens, k choices of each, P = M·k copies, E experts, H hidden


class SortedCopies(NamedTuple):
    """The copies of tokens in the order of their experts."""

    source_P: Tensor  # the token each sorted row is a copy of
    inverse_Mk: Tensor  # where each token's copies are, by the number of their expert
    weights_P: Tensor
    experts_P: Tensor  # of the sorted rows; E where a choice was dropped
    ends_E: Tensor  # where the rows of each expert end


def sort_copies(weights_Mk: Tensor, experts_Mk: Tensor, num_experts: int) -> SortedCopies:
    """Stable: copies of one expert stay in the order of their tokens."""
    experts_Mk, slots_Mk = experts_Mk.sort(dim=-1)
    experts_P, order_P = experts_Mk.flatten().sort(stable=True)
    ends_E = torch.searchsorted(experts_P, torch.arange(num_experts, device=experts_P.device), right=True)
    k = experts_Mk.shape[1]
    source_P = order_P // k
    from_P = source_P * k + slots_Mk.flatten()[order_P]  # the choice each row is for
    weights_P = permuted(weights_Mk.flatten(), from_P, inverted(from_P))
    return SortedCopies(source_P, inverted(order_P).view(-1, k), weights_P, experts_P, ends_E.to(torch.int32))


def inverted(order_R: Tensor) -> Tensor:
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    return inverse_R


def permuted(rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows in another order; gradients are permuted back rather than added up."""
    return _Permuted.apply(rows_RH, order_R, inverse_R)  # type: ignore[no-any-return]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RH: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RH.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_RH.index_select(0, ctx.saved_tensors[0]), None, None


class SortedDispatch:
    """`MixtureOfExperts.dispatch` by one grouped GEMM for all experts of a layer."""

    def __init__(self, grouped: Grouped = grouped_linear, *, drops: bool = False) -> None:
        """`drops` where choices may name no expert."""
        self.grouped, self.drops = grouped, drops

    @uncompiled  # its own kernels, which a compiler does not improve
    def __call__(
        self, experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
    ) -> tuple[Tensor, Tensor | None]:
        copies, rows_PH = sorted_rows(experts, x_MH, weights_Mk, experts_Mk)
        out_PH = experts(rows_PH, copies.experts_P, copies.ends_E, self.grouped, not self.drops)
        return sum_copies(experts, out_PH, copies).to(x_MH.dtype), overlapped()


def sorted_rows(experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor) -> tuple[SortedCopies, Tensor]:
    """The copies of all tokens in the order of their experts, ready to be multiplied."""
    copies = sort_copies(weights_Mk, experts_Mk, experts.moe.num_experts)
    rows_PH = copy_tokens(to_autocast(x_MH), copies)
    if experts.moe.scale_input:
        rows_PH = rows_PH * copies.weights_P[:, None].to(rows_PH.dtype)
    return copies, rows_PH


def to_autocast(x: Tensor) -> Tensor:
    """In the dtype that autocast multiplies in."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def copy_tokens(x_MH: Tensor, copies: SortedCopies) -> Tensor:
    """Every token's copies, in the order of their experts."""
    return _CopyTokens.apply(x_MH, copies.source_P, copies.inverse_Mk)  # type: ignore[no-any-return]


def sum_copies(experts: Experts, out_PH: Tensor, copies: SortedCopies) -> Tensor:
    """The weighted sum of each token's copies; those of no expert count as zero."""
    if not experts.moe.scale_input:
        out_PH = out_PH * copies.weights_P[:, None].to(out_PH.dtype)
    if experts.moe.expert_bias:  # not its tensor: by now FSDP may have freed it, in one of two passes
        out_PH = out_PH.where(copies.experts_P[:, None] < experts.moe.num_experts, 0.0)
    return _SumCopies.apply(out_PH, copies.source_P, copies.inverse_Mk)  # type: ignore[no-any-return]


def _gathered_sums(rows_PH: Tensor, inverse_Mk: Tensor) -> Tensor:
    first, *rest = inverse_Mk.unbind(1)
    total = rows_PH.index_select(0, first)
    for at_M in rest:
        total = total + rows_PH.index_select(0, at_M)
    return total


class _CopyTokens(torch.autograd.Function):
    """Its gradient is the forward of `_SumCopies`, and the reverse."""

    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, source_P: Tensor, inverse_Mk: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_Mk)
        return x_MH.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, grad_PH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered_sums(grad_PH, ctx.saved_tensors[0]), None, None


class _SumCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_PH: Tensor, source_P: Tensor, inverse_Mk: Tensor) -> Tensor:
        ctx.save_for_backward(source_P)
        return _gathered_sums(rows_PH, inverse_Mk)

    @staticmethod
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_MH.index_select(0, ctx.saved_tensors[0]), None, None
