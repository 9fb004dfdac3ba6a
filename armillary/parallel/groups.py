"""Process groups beside the default one, bounded by its timeout.

torch gives every new group a timeout of its own (10 minutes for NCCL, 30 for gloo), whatever the default group was
started with; a rank that is stuck in one of them would be noticed that much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """What bounds an exchange of this group."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def default_timeout() -> timedelta:
    """What bounds an exchange of all ranks, as `join_world` was told."""
    everybody = dist.group.WORLD
    assert everybody is not None, "several ranks have a process group"
    return timeout_of(everybody)


def new_group(ranks: Sequence[int] | None = None, *, backend: str | None = None) -> dist.ProcessGroup:
    """A group of these ranks, or of all; every rank calls it."""
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=default_timeout())
    return made


def new_mesh(device_type: str, ranks: torch.Tensor, axes: Sequence[str]) -> DeviceMesh:
    """torch's mesh of these ranks, with a group for every axis; every rank calls it."""
    made = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes))
    for group in made.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(default_timeout(), group)
    return made
