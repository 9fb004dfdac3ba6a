"""Expert-parallel dispatch: tokens are sent by all-to-all to the ranks that hold their experts, and back.

A layer has two all-to-alls of rows, forward and backward, and one of counts, the only one that the host waits for.
The shared expert runs during the first, in both passes.
"""

from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.torch_compat import uncompiled
from armillary.model.moe.experts import Experts, Grouped, Overlapped
from armillary.model.moe.sorted_dispatch import inverted, permuted, sorted_rows, sum_copies
from armillary.parallel.collectives import Group, timed

# M tokens, k choices of each, P = M·k copies, R rows that arrive, E experts, e of them here, H hidden
_ops = torch.ops._c10d_functional


class AllToAllDispatch:
    """`MixtureOfExperts.dispatch` where the ranks of `group` hold equal shares of the experts, in order."""

    def __init__(self, group: Group, grouped: Grouped) -> None:
        self.group, self.grouped = group, grouped

    @uncompiled  # the number of rows differs from step to step: a compiler would recompile
    def __call__(
        self, experts: Experts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
    ) -> tuple[Tensor, Tensor | None]:
        order, rows_PH = sorted_rows(experts, x_MH, weights_Mk, experts_Mk)
        arriving_re, sent, received = self._counts(order.ends_E)
        dispatch, combine = AllToAllPlan(sent, received, self.group), AllToAllPlan(received, sent, self.group)
        in_flight = dispatch.start(rows_PH[: sum(sent)])  # dropped rows are not sent
        overlapped_MH = overlapped()
        out_RH = self._run(experts, dispatch.wait(in_flight), arriving_re)
        out_PH = combine.wait(combine.start(out_RH))
        if len(out_PH) < len(rows_PH):
            out_PH = torch.cat((out_PH, out_PH.new_zeros(len(rows_PH) - len(out_PH), out_PH.shape[1])))
        return sum_copies(experts, out_PH, order).to(x_MH.dtype), overlapped_MH

    def _counts(self, ends_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """(rows that arrive from each rank for each expert here, rows sent to each rank, rows received from each)."""
        counts_re = ends_E.long().diff(prepend=ends_E.new_zeros(1)).view(self.group.size, -1)
        even = [counts_re.shape[1]] * self.group.size
        counts = counts_re.flatten()
        arriving_re = timed(
            self.group, lambda: _ops.wait_tensor(_ops.all_to_all_single(counts, even, even, self.group.name))
        ).view_as(counts_re)
        sent, received = torch.stack((counts_re.sum(dim=1), arriving_re.sum(dim=1))).tolist()
        return arriving_re, sent, received

    def _run(self, experts: Experts, arrived_RH: Tensor, arriving_re: Tensor) -> Tensor:
        """Run the experts on rows that arrived ordered by rank: sorted by expert, and back."""
        ranks, local = arriving_re.shape
        numbers = torch.arange(local, device=arriving_re.device).repeat(ranks)
        experts_R = numbers.repeat_interleave(arriving_re.flatten(), output_size=len(arrived_RH))
        experts_R, order_R = experts_R.sort(stable=True)
        inverse_R = inverted(order_R)
        ends_e = arriving_re.sum(dim=0).cumsum(0).to(torch.int32)
        out_RH = experts(permuted(arrived_RH, order_R, inverse_R), experts_R, ends_e, self.grouped, True)
        return permuted(out_RH, inverse_R, order_R)


class AllToAllPlan:
    """An all-to-all of rows, and the opposite one of their gradients: `start`, other work, `wait`."""

    def __init__(self, sent: list[int], received: list[int], group: Group) -> None:
        """Counts of rows by rank."""
        self.sent, self.received, self.group = sent, received, group
        self.gradients: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """The received rows, valid after `wait`."""
        return _Start.apply(rows, self)

    def wait(self, in_flight: Tensor) -> Tensor:
        return _Wait.apply(in_flight, self)

    def move(self, rows: Tensor, *, back: bool = False) -> Tensor:
        out, into = (self.sent, self.received) if back else (self.received, self.sent)
        return _ops.all_to_all_single(rows.contiguous(), out, into, self.group.name)


class _Start(torch.autograd.Function):
    """Sends the rows; the backward pass waits for their gradients, which `_Wait`'s backward sends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: AllToAllPlan) -> Tensor:
        ctx.plan = plan
        return plan.move(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradients, ctx.plan.gradients = ctx.plan.gradients, None
        assert gradients is not None, "received rows have a gradient"
        return timed(ctx.plan.group, lambda: _ops.wait_tensor(gradients)), None


class _Wait(torch.autograd.Function):
    """Waits for the rows. What was computed since `_Start` has its backward between these two as well, because autograd
    runs the latest node first."""

    @staticmethod
    def forward(ctx: Any, in_flight: Tensor, plan: AllToAllPlan) -> Tensor:
        ctx.plan = plan
        return timed(plan.group, lambda: _ops.wait_tensor(in_flight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.plan.gradients = ctx.plan.move(grad, back=True)
        return grad, None  # only its shape matters: the gradients themselves are in flight
