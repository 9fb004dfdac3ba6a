"""Modules that compute on this rank's piece of their parameters, while the parameters stay DTensors.

Checkpoints, optimisers and FSDP see the whole shape and where it is cut; forward code that reads `self.weight` gets a
plain local tensor, so kernels, compilers and the model's own code need to know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


class Cut(NamedTuple):
    """How a parameter lies on tensor-parallel ranks, and how its gradient comes out of a local backward; a tuple has
    one placement for each axis of a mesh of several."""

    weight: Placement | tuple[Placement, ...]
    gradient: Placement | tuple[Placement, ...]


ROWS = Cut(Shard(0), Shard(0))
COLUMNS = Cut(Shard(1), Shard(1))
SAME = Cut(Replicate(), Replicate())
SHARED = Cut(Replicate(), Partial())
"""the same on every rank, but each rank's gradient covers only what that rank computed: they are summed"""


def localise(module: nn.Module, mesh: DeviceMesh, cuts: Mapping[str, Cut], *, aside: str = "") -> None:
    """Cut the parameters named (those the module has), and let its code see local tensors in their place.

    A parameter that is put `aside` reads as None when computing; `local(module, name)` still gives it.
    """
    held = {name: cut for name, cut in cuts.items() if module._parameters.get(name) is not None}
    for name, cut in held.items():
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = _distributed(parameter, mesh, _by_axis(cut.weight))
    become(module, _local_class, tuple(held), aside)
    seen: Any = module
    seen._cuts = {**getattr(module, "_cuts", {}), **{name: _by_axis(cut.gradient) for name, cut in held.items()}}
    seen._pieces = {}


def become(module: nn.Module, changed: Callable[..., type], *args: Any) -> None:
    """Make a module's class `changed(class, *args)`, a subclass of it, as torch's FSDP2 and parametrisations do: names
    and hooks stay as they are."""
    kind: Any = type(module)
    module.__class__ = changed(kind, *args)


def local_piece(whole: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """This rank's piece of a whole tensor; sizes that do not divide give the last ranks less, maybe nothing."""
    if not isinstance(placement, Shard):
        return whole
    pieces = whole.chunk(size, dim=placement.dim)
    return pieces[rank] if rank < len(pieces) else whole.narrow(placement.dim, 0, 0)


def _by_axis(placement: Placement | tuple[Placement, ...]) -> tuple[Placement, ...]:
    return placement if isinstance(placement, tuple) else (placement,)


@torch.no_grad()
def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    piece = parameter.data
    for axis, placement in enumerate(placements):
        piece = local_piece(piece, placement, mesh.size(axis), mesh.get_local_rank(axis))
    made = DTensor.from_local(
        piece.clone(memory_format=torch.contiguous_format),  # a view would keep the whole alive
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def local(module: Any, name: str) -> Tensor | None:
    """This rank's piece of a parameter, through which gradients reach it; a shard of FSDP's is given as it is."""
    if name in module._pieces:
        return module._pieces[name]  # type: ignore[no-any-return]
    parameter = module._parameters[name]
    if name in module._cuts and _is_cut(parameter, module._cuts[name]):
        return parameter.to_local(grad_placements=module._cuts[name])  # type: ignore[no-any-return]
    return parameter  # type: ignore[no-any-return]


@contextmanager
def pieces_ready(model: nn.Module) -> Iterator[None]:
    """Take the pieces out of the parameters beforehand: a compiler then meets plain tensors only."""
    cut: list[Any] = [module for module in model.modules() if hasattr(module, "_cuts")]
    for module in cut:
        module._pieces = {name: local(module, name) for name in module._cuts}
    try:
        yield
    finally:
        for module in cut:
            module._pieces = {}


def _is_cut(parameter: Tensor | None, placements: tuple[Placement, ...]) -> bool:
    """Cut along its own axes only, and gathered from FSDP's shards, if there are any: ready to compute with."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == len(placements)


def _read(module: Any, *, name: str, aside: bool) -> Tensor | None:
    """What the module's own code gets for `self.weight`."""
    computes = name in module._pieces or _is_cut(module._parameters[name], module._cuts[name])
    return None if aside and computes else local(module, name)


@cache
def _local_class(kind: type[nn.Module], names: tuple[str, ...], aside: str) -> type[nn.Module]:
    """One subclass a kind of module, so that compiled code is shared between layers."""
    seen = {name: property(partial(_read, name=name, aside=name == aside)) for name in names}
    return type(f"Local{kind.__name__}", (kind,), seen)
