"""Expert parallelism's dispatch: copies of tokens travel to the ranks that hold their experts, and back.

Two all-to-alls of rows a layer, forward and backward, and one of counts, which is the only thing the host waits for.
The shared expert runs while the first is under way, in both directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.compile import uncompiled
from armillary.model.moe.experts import Experts, Grouped, Overlapped
from armillary.model.moe.sorted_dispatch import inverted, permuted, sorted_rows, sum_copies
from armillary.parallel.collectives import Group, timed

# M tokens, k choices of each, P = M·k copies, R rows that arrive, E experts, e of them here, H hidden
_ops = torch.ops._c10d_functional


class ExchangedDispatch:
    """`MixtureOfExperts.dispatch` where ranks of `group` hold equal parts of the experts, in order."""

    def __init__(self, group: Group, grouped: Grouped) -> None:
        self.group, self.grouped = group, grouped

    @uncompiled  # how many rows arrive differs from step to step: a compiler would begin anew
    def __call__(
        self, experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
    ) -> tuple[Tensor, Tensor | None]:
        found, rows_PH = sorted_rows(experts, x_MH, weights_Mk, experts_Mk)
        arriving_re, sent, received = self._counts(found.ends_E)
        there, back = Trip(sent, received, self.group), Trip(received, sent, self.group)
        travelling = there.start(rows_PH[: sum(sent)])  # dropped ones stay
        overlapped_MH = overlapped()
        out_RH = self._run(experts, there.arrive(travelling), arriving_re)
        out_PH = back.arrive(back.start(out_RH))
        if len(out_PH) < len(rows_PH):
            out_PH = torch.cat((out_PH, out_PH.new_zeros(len(rows_PH) - len(out_PH), out_PH.shape[1])))
        return sum_copies(experts, out_PH, found).to(x_MH.dtype), overlapped_MH

    def _counts(self, ends_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """(rows that arrive from each rank for each expert here, rows sent to each rank, rows received from each)."""
        counts_re = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(self.group.size, -1)
        even = [counts_re.shape[1]] * self.group.size
        counts = counts_re.flatten()
        arriving = timed(
            self.group, lambda: _ops.wait_tensor(_ops.all_to_all_single(counts, even, even, self.group.name))
        )
        arriving_re = arriving.view_as(counts_re)
        sent, received = torch.stack((counts_re.sum(dim=1), arriving_re.sum(dim=1))).tolist()
        return arriving_re, sent, received

    def _run(self, experts: Experts, arrived_RH: Tensor, arriving_re: Tensor) -> Tensor:
        """Rows that came rank by rank, put into the order of experts and back."""
        ranks, local = arriving_re.shape
        numbers = torch.arange(local, device=arriving_re.device).repeat(ranks)
        experts_R = numbers.repeat_interleave(arriving_re.flatten(), output_size=len(arrived_RH))
        experts_R, order_R = experts_R.sort(stable=True)
        inverse_R = inverted(order_R)
        ends_e = arriving_re.sum(dim=0).cumsum(0).to(torch.int32)
        out_RH = experts(permuted(arrived_RH, order_R, inverse_R), experts_R, ends_e, self.grouped, True)
        return permuted(out_RH, inverse_R, order_R)


class Trip:
    """Rows on their way between ranks, and the gradients on theirs back: `start`, other work, `arrive`."""

    def __init__(self, sent: list[int], received: list[int], group: Group) -> None:
        """Counts of rows by rank."""
        self.sent, self.received, self.group = sent, received, group
        self.returning: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """What will hold the rows of others for this rank, once `arrive` was called."""
        travelling: Tensor = _Start.apply(rows, self)
        return travelling

    def arrive(self, travelling: Tensor) -> Tensor:
        arrived: Tensor = _Arrive.apply(travelling, self)
        return arrived

    def move(self, rows: Tensor, *, back: bool = False) -> Tensor:
        out, into = (self.sent, self.received) if back else (self.received, self.sent)
        result: Tensor = _ops.all_to_all_single(rows.contiguous(), out, into, self.group.name)
        return result


class _Start(torch.autograd.Function):
    """Rows set out; their gradients, which set out in `_Arrive`'s backward, are waited for here."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.move(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        returning, ctx.trip.returning = ctx.trip.returning, None
        assert returning is not None, "what arrived has a gradient"
        return timed(ctx.trip.group, lambda: _ops.wait_tensor(returning)), None


class _Arrive(torch.autograd.Function):
    """Rows are there. What was computed since they set out has its backward between these two as well, because autograd
    runs the latest first."""

    @staticmethod
    def forward(ctx: Any, travelling: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return timed(trip.group, lambda: _ops.wait_tensor(travelling))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.trip.returning = ctx.trip.move(grad, back=True)
        return grad, None  # only its shape matters: the gradients themselves are on their way
