"""The norm of all gradients over the mesh, and clipping by it.

Every element counts once, whoever holds it: squares are summed over the axes along which a parameter is cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armillary.parallel.mesh import Mesh
from armillary.parallel.replicate import local_of

CUT_AXES = ("shard", "tp")


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], mesh: Mesh, limit: float) -> Tensor:
    """The norm before clipping; `limit` 0 only measures."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients, mesh)
    if limit:
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # a scale of 1 is multiplied too: nobody waits for the device
        torch._foreach_mul_([local_of(gradient) for gradient in gradients], scale)
    return norm


def gradient_norm(gradients: list[Tensor], mesh: Mesh) -> Tensor:
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_axes.setdefault(_cut_along(gradient), []).append(local_of(gradient))
    device = mesh.world.device
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    squares = {axes: _squares(found, wide) for axes, found in by_axes.items()}
    zero = torch.zeros((), dtype=wide, device=device)
    both, shard, tp, none = (
        squares.get(axes, zero) for axes in (("shard", "tp"), ("shard",), ("tp",), ())
    )  # every rank takes part in the same sums, whatever it holds
    both, shard = _summed(torch.stack((both, shard)), mesh, "shard")
    (both_and_tp,) = _summed(torch.stack((both + tp,)), mesh, "tp")
    return (both_and_tp + shard + none).sqrt()


def _squares(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()


def _summed(values: Tensor, mesh: Mesh, axis: str) -> Tensor:
    group = mesh.group(axis)
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def _cut_along(gradient: Tensor) -> tuple[str, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names
    assert names is not None
    return tuple(name for name, place in zip(names, gradient.placements, strict=True) if not place.is_replicate())
