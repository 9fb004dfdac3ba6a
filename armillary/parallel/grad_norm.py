"""The norm of all gradients over the mesh, and clipping by it.

Every element counts once: squares are summed over the axes along which a parameter is sharded.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from armillary.parallel.ddp import local_of
from armillary.parallel.mesh import Mesh

SHARD_AXES = (
    (),
    ("shard",),
    ("tp",),
    ("shard", "tp"),
    ("ep",),
    ("ep", "tp"),
    ("expert_shard", "ep"),
    ("expert_shard", "ep", "tp"),
)
"""the axes along which a parameter may be sharded"""


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], mesh: Mesh, limit: float, *, copies: Iterable[Tensor] = ()) -> Tensor:
    """The norm before clipping; `limit` 0 only measures. `copies` are clipped but counted by another stage."""
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    copied = set(map(id, copies))
    norm = gradient_norm([gradient for key, gradient in gradients.items() if key not in copied], mesh)
    if limit:
        # a scale of 1 is applied too, so that nothing waits for the device
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_of(gradient) for gradient in gradients.values()], scale)
    return norm


def gradient_norm(gradients: list[Tensor], mesh: Mesh) -> Tensor:
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for gradient in gradients:
        by_axes.setdefault(_sharded_along(gradient), []).append(local_of(gradient))
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    zero = torch.zeros((), dtype=wide, device=mesh.world.device)
    squares = {axes: _squares(by_axes[axes], wide) if axes in by_axes else zero for axes in SHARD_AXES}
    for axis in ("shard", "expert_shard", "ep", "tp"):  # every rank takes part in the same sums, whatever it holds
        sharded = [axes for axes in SHARD_AXES if axis in axes]
        summed = _summed(torch.stack([squares[axes] for axes in sharded]), mesh, axis)
        squares |= dict(zip(sharded, summed, strict=True))
    return _summed(torch.stack(list(squares.values())).sum(), mesh, "pp").sqrt()


def _squares(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).square().sum()


def _summed(values: Tensor, mesh: Mesh, axis: str) -> Tensor:
    group = mesh.group(axis)
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def _sharded_along(gradient: Tensor) -> tuple[str, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    names = gradient.device_mesh.mesh_dim_names
    assert names is not None
    return tuple(name for name, place in zip(names, gradient.placements, strict=True) if not place.is_replicate())
