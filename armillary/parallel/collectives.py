"""Collectives that autograd goes through: what crosses tensor-parallel ranks forward has its opposite backward.

They are torch's functional collectives, so a compiler sees them in its graph and can overlap them with products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


class Clock(Protocol):
    """Where the time goes that exchanges take; `parallel.exposed_waits.ExposedWaits` is one."""

    def mark(self) -> Any: ...

    def until_now(self, begin: Any) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks of one axis, as the collectives want them."""

    name: str
    """torch's name of the process group"""
    size: int
    """ranks in it"""
    rank: int
    """of this process"""
    clocks: list[Clock] = field(default_factory=list, compare=False, repr=False)
    """told of every exchange, which computing waits for; compiled code, which may overlap them, tells nobody"""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """Of a mesh with one axis."""
        return cls(name=mesh.get_group().group_name, size=mesh.size(), rank=mesh.get_local_rank())


def timed(group: Group, exchange: Callable[[], Tensor]) -> Tensor:
    """An exchange, or the wait for one, of which the group's clocks are told."""
    if not group.clocks or torch.compiler.is_compiling():
        return exchange()
    begins = [clock.mark() for clock in group.clocks]
    made = exchange()
    for clock, begin in zip(group.clocks, begins, strict=True):
        clock.until_now(begin)
    return made


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    x = x.contiguous()
    return timed(group, lambda: _ops.wait_tensor(_ops.all_reduce(x, op, group.name)))


def all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """The shards of all ranks side by side along `dim`."""
    x = x.contiguous()
    gathered = timed(group, lambda: _ops.wait_tensor(_ops.all_gather_into_tensor(x, group.size, group.name)))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size, dim=0), dim=dim)


def reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """The sum over ranks, of which each keeps its piece along `dim`."""
    whole = (x if dim == 0 else torch.cat(x.chunk(group.size, dim=dim), dim=0)).contiguous()
    return timed(group, lambda: _ops.wait_tensor(_ops.reduce_scatter_tensor(whole, "sum", group.size, group.name)))


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
    """Every rank gets all shards; each rank's gradient is a part of the whole one: summed and cut."""
    return _Gather.apply(x, group, dim)


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """Parts of a sum become shards of it; gradients are gathered."""
    return _Scatter.apply(x, group, dim)


def share(x: Tensor, group: Group) -> Tensor:
    """The same tensor on every rank, used for different things: gradients are summed."""
    return _Share.apply(x, group)


def summed(x: Tensor, group: Group) -> Tensor:
    """Parts of a sum become the sum, used for the same thing everywhere: the gradient is already whole."""
    return _Sum.apply(x, group)


def summed_for_each(x: Tensor, group: Group) -> Tensor:
    """Parts of a sum become the sum, used for different things: gradients are summed as well."""
    return _SumBoth.apply(x, group)
