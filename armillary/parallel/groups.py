"""Process groups with the timeout of the default group.

torch gives every new group its own timeout (10 minutes for NCCL, 30 for gloo), whatever the default group was started
with; a rank that is stuck in one of them would be noticed that much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of this group's collectives."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def default_timeout() -> timedelta:
    """The timeout of the default group, as `join_world` set it."""
    world = dist.group.WORLD
    assert world is not None, "several ranks have a process group"
    return timeout_of(world)


def new_group(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks, or of all; every rank calls it."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=default_timeout())
    return group


def new_mesh(device_type: str, ranks: torch.Tensor, axes: Sequence[str]) -> DeviceMesh:
    """torch's mesh of these ranks, with a group for every axis; every rank calls it."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(default_timeout(), group)
    return mesh
