"""Experts of data-parallel attention: they are divided over all ranks, so each gets the tokens of all dp ranks.

    all-gather of hidden states, routing weights and choices, padded to the dp rank with most tokens; on CPUs of one
        host the sum of everybody's rows among zeros, through shared memory, which is faster than gloo's
    each rank computes its part of the experts for all tokens
    all-reduce of the results, of which each dp rank keeps its own tokens'

A rank that has no tokens in a step takes part all the same: the others need its experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from armillary.model.moe.experts import Dispatch, Experts, MixtureOfExperts, Overlapped
from armillary.parallel.collectives import Group, all_gather

Add = Callable[[Tensor], Tensor]
_DIGIT = 128

# M tokens of this dp rank, A of all, k experts per token, H hidden, E experts, C bytes of a token


class GatheredTokens:
    """Gathers the tokens of all dp ranks, and adds up what the ranks made of them."""

    def __init__(self, dp: Group, add: Add, add_dp: Add | None = None) -> None:
        """`add`: all-reduce over all ranks of the engine; `add_dp`: over the dp ranks, where it is faster than an
        all-gather."""
        self.dp, self.add, self._add_dp = dp, add, add_dp
        self.sizes: tuple[int, ...] = ()
        """tokens of each dp rank in this step; empty: as many as here, some of them padding (CUDA graphs)"""
        self.num_live: Tensor | None = None  # int32 [1]: where there is padding, the first of it on this dp rank

    def own(self, num_tokens: int) -> slice:
        """Where the tokens of this dp rank are among all."""
        sizes = self._sizes(num_tokens)
        first = sum(sizes[: self.dp.rank])
        return slice(first, first + num_tokens)

    def without_padding(self, experts_Mk: Tensor) -> Tensor:
        """Padding chooses expert −1."""
        if self.sizes or self.num_live is None:
            return experts_Mk
        is_live_M = torch.arange(len(experts_Mk), device=experts_Mk.device) < self.num_live
        return experts_Mk.where(is_live_M[:, None], -1)

    def gather(self, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(x_AH, weights_Ak, experts_Ak), in one all-gather."""
        weights_Mk = weights_Mk.to(x_MH.dtype)
        if self._add_dp is not None:
            return self._summed(x_MH, weights_Mk, experts_Mk, self._add_dp)
        sizes = self._sizes(len(x_MH))
        parts = [x_MH, weights_Mk, experts_Mk.int()]
        rows_MC = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        padded_PC = torch.nn.functional.pad(rows_MC, (0, 0, 0, max(sizes) - len(rows_MC)))
        per_rank = all_gather(padded_PC, self.dp, dim=0).unflatten(0, (len(sizes), -1))
        rows_AC = torch.cat([rows[:size] for rows, size in zip(per_rank, sizes, strict=True)])
        x, weights, experts = rows_AC.split([part.shape[1] * part.itemsize for part in parts], dim=1)
        return (
            x.contiguous().view(x_MH.dtype),
            weights.contiguous().view(x_MH.dtype),
            experts.contiguous().view(torch.int32).to(experts_Mk.dtype),
        )

    def _summed(self, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, add: Add) -> tuple[Tensor, Tensor, Tensor]:
        """Adding zeros changes nothing; numbers of experts are in two parts, which are exact in 16 bits."""
        digits = [part.to(x_MH.dtype) for part in (experts_Mk // _DIGIT, experts_Mk % _DIGIT)]
        parts = [x_MH, weights_Mk, *digits]
        widths = [part.shape[1] for part in parts]
        rows_AC = x_MH.new_zeros(sum(self._sizes(len(x_MH))), sum(widths))
        rows_AC[self.own(len(x_MH))] = torch.cat(parts, dim=1)
        x, weights, high, low = add(rows_AC).split(widths, dim=1)
        experts = high.to(experts_Mk.dtype) * _DIGIT + low.to(experts_Mk.dtype)
        return x.contiguous(), weights.contiguous(), experts

    def _sizes(self, num_tokens: int) -> tuple[int, ...]:
        sizes = self.sizes or (num_tokens,) * self.dp.size
        assert sizes[self.dp.rank] == num_tokens, f"{num_tokens} tokens where {sizes[self.dp.rank]} were announced"
        return sizes


class GatheredExperts:
    """`MixtureOfExperts.dispatch` of a rank with data-parallel attention."""

    def __init__(self, dispatch: Dispatch, tokens: GatheredTokens, counts_E: Tensor, *, drops: bool) -> None:
        """`dispatch` to this rank's part of the experts, which `drops` choices of others; `counts_E` is added to, for
        the tokens of all dp ranks."""
        self.dispatch, self.tokens, self.counts_E, self.drops = dispatch, tokens, counts_E, drops

    def __call__(
        self, experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
    ) -> tuple[Tensor, Tensor | None]:
        own = self.tokens.own(len(x_MH))
        chosen_Mk = self.tokens.without_padding(experts_Mk)
        x_AH, weights_Ak, experts_Ak = self.tokens.gather(x_MH, weights_Mk, chosen_Mk)
        self._count(experts_Ak)
        experts_Ak = experts_Ak if self.drops else experts_Ak.clamp_min(0)
        mixed_AH, _ = self.dispatch(experts, x_AH, weights_Ak, experts_Ak, _nothing)
        shared_MH = overlapped()
        if shared_MH is not None:  # where tp ranks share the shared expert, a part of it
            mixed_AH[own] += shared_MH
        return self.tokens.add(mixed_AH)[own], None

    def _count(self, experts_Ak: Tensor) -> None:
        chosen = experts_Ak.flatten().long()
        self.counts_E.scatter_add_(0, chosen.clamp_min(0), (chosen >= 0).to(self.counts_E.dtype))


def run_without_tokens(mixture: MixtureOfExperts, x_0H: Tensor) -> None:
    """The part of a rank that has no tokens in a step."""
    top_k = mixture.moe.top_k
    mixture.dispatch(
        mixture.experts, x_0H, x_0H.new_empty(0, top_k), x_0H.new_empty(0, top_k, dtype=torch.int64), _nothing
    )


def _nothing() -> None:
    return None
