"""Modules that compute on this rank's shard of their parameters, while the parameters stay DTensors.

Checkpoints, optimizers and FSDP see the full shape and its placements; forward code that reads `self.weight` gets a
plain local tensor, so kernels, compilers and the model's own code need not know.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


class ShardSpec(NamedTuple):
    """Placements of a parameter on tensor-parallel ranks, and of its gradient after a local backward pass; a tuple has
    one placement for each mesh axis."""

    weight: Placement | tuple[Placement, ...]
    gradient: Placement | tuple[Placement, ...]


ROWS = ShardSpec(Shard(0), Shard(0))
COLUMNS = ShardSpec(Shard(1), Shard(1))
SAME = ShardSpec(Replicate(), Replicate())
SHARED = ShardSpec(Replicate(), Partial())
"""replicated, but each rank's gradient covers only what that rank computed: gradients are summed"""


def localise(module: nn.Module, mesh: DeviceMesh, specs: Mapping[str, ShardSpec], *, hidden: str = "") -> None:
    """Shard the named parameters (those the module has); the module's code reads local tensors in their place.

    A parameter that is `hidden` reads as None when computing; `local(module, name)` still returns it.
    """
    present = {name: spec for name, spec in specs.items() if module._parameters.get(name) is not None}
    for name, spec in present.items():
        parameter = module._parameters[name]
        assert parameter is not None
        module._parameters[name] = _distributed(parameter, mesh, _by_axis(spec.weight))
    swap_class(module, _local_class, tuple(present), hidden)
    target: Any = module
    target._gradient_placements = {
        **getattr(module, "_gradient_placements", {}),
        **{name: _by_axis(spec.gradient) for name, spec in present.items()},
    }
    target._local_shards = {}


def swap_class(module: nn.Module, changed: Callable[..., type], *args: Any) -> None:
    """Set a module's class to `changed(class, *args)`, a subclass of it, as torch's FSDP2 and parametrizations do:
    names and hooks stay as they are."""
    kind: Any = type(module)
    module.__class__ = changed(kind, *args)


def local_shard(full: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    """This rank's shard of a full tensor; where sizes do not divide, the last ranks get less or nothing."""
    if placement.is_replicate() or placement.is_partial():
        return full
    dim = int(placement.dim)  # type: ignore[attr-defined]
    shards = full.chunk(size, dim=dim)
    return shards[rank] if rank < len(shards) else full.narrow(dim, 0, 0)


def _by_axis(placement: Placement | tuple[Placement, ...]) -> tuple[Placement, ...]:
    return placement if isinstance(placement, tuple) else (placement,)


@torch.no_grad()
def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    shard = parameter.data
    for axis, placement in enumerate(placements):
        shard = local_shard(shard, placement, mesh.size(axis), mesh.get_local_rank(axis))
    distributed = DTensor.from_local(
        shard.clone(memory_format=torch.contiguous_format),  # a view would keep the full tensor alive
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(distributed, requires_grad=parameter.requires_grad)


def local(module: Any, name: str) -> Tensor | None:
    """This rank's shard of a parameter, through which gradients reach it; a shard of FSDP's is returned as it is."""
    if name in module._local_shards:
        return module._local_shards[name]  # type: ignore[no-any-return]
    parameter = module._parameters[name]
    if name in module._gradient_placements and _is_gathered(parameter, module._gradient_placements[name]):
        return parameter.to_local(grad_placements=module._gradient_placements[name])  # type: ignore[no-any-return]
    return parameter  # type: ignore[no-any-return]


@contextmanager
def local_shards_ready(model: nn.Module) -> Iterator[None]:
    """Take the local shards out of the parameters beforehand, so that a compiler sees plain tensors only."""
    sharded: list[Any] = [module for module in model.modules() if hasattr(module, "_gradient_placements")]
    for module in sharded:
        module._local_shards = {name: local(module, name) for name in module._gradient_placements}
    try:
        yield
    finally:
        for module in sharded:
            module._local_shards = {}


def _is_gathered(parameter: Tensor | None, placements: tuple[Placement, ...]) -> bool:
    """Sharded along its own axes only; FSDP's shards, if any, are all-gathered: ready to compute with."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.ndim == len(placements)


def _read(module: Any, *, name: str, hidden: bool) -> Tensor | None:
    """What the module's own code reads as `self.weight`."""
    computes = name in module._local_shards or _is_gathered(module._parameters[name], module._gradient_placements[name])
    return None if hidden and computes else local(module, name)


@cache
def _local_class(kind: type[nn.Module], names: tuple[str, ...], hidden: str) -> type[nn.Module]:
    """One subclass per class of module, so that layers share compiled code."""
    properties = {name: property(partial(_read, name=name, hidden=name == hidden)) for name in names}
    return type(f"Local{kind.__name__}", (kind,), properties)
