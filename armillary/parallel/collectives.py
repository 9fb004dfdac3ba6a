"""Differentiable collectives: each has its opposite in the backward pass.

They are torch's functional collectives, so a compiler sees them in its graph and can overlap them with GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


class WaitTimer(Protocol):
    """Times collectives; `parallel.timers.ExposedWaits` is one."""

    def mark(self) -> Any: ...

    def until_now(self, begin: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one mesh axis, as the functional collectives take them. `timers` time every collective that
    computing waits for; compiled code, which may overlap them, is not timed."""

    name: str  # torch's name of the process group
    size: int
    rank: int  # of this process
    timers: list[WaitTimer] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """Of a mesh with one axis."""
        return cls(name=mesh.get_group().group_name, size=mesh.size(), rank=mesh.get_local_rank())


def timed(group: Group, collective: Callable[[], Tensor]) -> Tensor:
    """Run a collective, or the wait for one, timed by the group's timers."""
    if not group.timers or torch.compiler.is_compiling():
        return collective()
    begins = [timer.mark() for timer in group.timers]
    result = collective()
    for timer, begin in zip(group.timers, begins, strict=True):
        timer.until_now(begin)
    return result


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    x = x.contiguous()
    return timed(group, lambda: _ops.wait_tensor(_ops.all_reduce(x, op, group.name)))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The shards of all ranks side by side along `dim`."""
    x = x.contiguous()
    gathered = timed(group, lambda: _ops.wait_tensor(_ops.all_gather_into_tensor(x, group.size, group.name)))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size, dim=0), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each rank keeps its shard along `dim`."""
    full = (x if dim == 0 else torch.cat(x.chunk(group.size, dim=dim), dim=0)).contiguous()
    return timed(group, lambda: _ops.wait_tensor(_ops.reduce_scatter_tensor(full, "sum", group.size, group.name)))


def _unchanged(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


_OPPOSITE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather": (all_gather, reduce_scatter),
    "scatter": (reduce_scatter, all_gather),
    "share": (_unchanged, all_reduce),
    "sum": (all_reduce, _unchanged),
    "sum for each": (all_reduce, all_reduce),
}
"""kind -> collective of the forward pass, and of the gradient"""


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, group: Group, *dim: int) -> Tensor:
        ctx.kind, ctx.args = kind, (group, *dim)
        return _OPPOSITE[kind][0](x, group, *dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _OPPOSITE[ctx.kind][1](grads[0], *ctx.args), None, *(None for _ in ctx.args)


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather; the gradient is reduce-scattered."""
    return _Collective.apply(x, "gather", group, dim)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Reduce-scatter of partial sums; the gradient is all-gathered."""
    return _Collective.apply(x, "scatter", group, dim)


def share(x: Tensor, group: Group) -> Tensor:
    """The same tensor on every rank, used for different things: the gradient is all-reduced."""
    return _Collective.apply(x, "share", group)


def summed(x: Tensor, group: Group) -> Tensor:
    """All-reduce of partial sums, used for the same thing on every rank: the gradient is complete already."""
    return _Collective.apply(x, "sum", group)


def summed_for_each(x: Tensor, group: Group) -> Tensor:
    """All-reduce of partial sums, used for different things: the gradient is all-reduced as well."""
    return _Collective.apply(x, "sum for each", group)
