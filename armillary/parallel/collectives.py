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
    """Times collectives; `parallel.exposed_waits.ExposedWaits` is one."""

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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """All-gather; the gradient is reduce-scattered."""
    return _Gather.apply(x, group, dim)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Reduce-scatter of partial sums; the gradient is all-gathered."""
    return _Scatter.apply(x, group, dim)


def share(x: Tensor, group: Group) -> Tensor:
    """The same tensor on every rank, used for different things: the gradient is all-reduced."""
    return _Share.apply(x, group)


def summed(x: Tensor, group: Group) -> Tensor:
    """All-reduce of partial sums, used for the same thing on every rank: the gradient is complete already."""
    return _Sum.apply(x, group)


def summed_for_each(x: Tensor, group: Group) -> Tensor:
    """All-reduce of partial sums, used for different things: the gradient is all-reduced as well."""
    return _SumBoth.apply(x, group)
