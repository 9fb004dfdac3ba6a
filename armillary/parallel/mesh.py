"""The mesh: which ranks share which axis of a layout, and which link each axis travels over.

Axes from the outermost to the innermost are replicate, shard, tp: neighbours on the mesh are neighbours in a machine,
so the axis that talks most gets the fastest links, however a launcher numbered the processes.
"""

from __future__ import annotations

import socket
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.errors import BadLayout
from armillary.parallel.placement import axis_words
from armillary.parallel.world import World
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout

DATA_AXES = ("replicate", "shard")
AXES = (*DATA_AXES, "tp")
"""outermost first"""


class Mesh:
    """The ranks of a layout, by axis."""

    def __init__(
        self, sizes: dict[str, int], world: World, torch_mesh: DeviceMesh | None = None,
        cluster: Cluster | None = None, machines: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.sizes, self.world, self.torch_mesh, self.cluster = sizes, world, torch_mesh, cluster
        self.machines = machines
        """of each rank"""

    def size(self, axis: str) -> int:
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """Of this process along the axis."""
        return 0 if self.torch_mesh is None else self.torch_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Those that differ from this rank in `axis` only; None where it is alone."""
        return self.along(axis).get_group() if self.sizes[axis] > 1 else None

    def along(self, *axes: str) -> DeviceMesh:
        """torch's mesh of one axis or several."""
        assert self.torch_mesh is not None, "one process has no mesh"
        return self.torch_mesh[axes]

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows of the batch."""
        return prod(self.sizes[axis] for axis in DATA_AXES)

    @property
    def dp_rank(self) -> int:
        """Which of them this is."""
        return self.rank("replicate") * self.sizes["shard"] + self.rank("shard")

    def is_on_one_machine(self, axis: str) -> bool:
        """Whether this rank reaches all others of the axis without a network."""
        group = self.group(axis)
        return group is None or len({self.machines[rank] for rank in dist.get_process_group_ranks(group)}) == 1

    def placement(self) -> list[str]:
        """In words, which axis spans which tier of the cluster; one line for each axis in use."""
        return axis_words(self.sizes, self.cluster)


def axis_sizes(layout: Layout) -> dict[str, int]:
    """Ranks along each axis; replicate × shard = dp."""
    shard = layout.shard_size
    return {"replicate": layout.dp // shard, "shard": shard, "tp": layout.tp}


def make_mesh(layout: Layout, world: World, cluster: Cluster | None = None) -> Mesh:
    """The mesh of a layout over the processes there are; every rank calls it."""
    sizes = axis_sizes(layout)
    if prod(sizes.values()) != world.size:
        _refuse_size(layout, world.size)
    if world.size == 1 and not dist.is_initialized():
        return Mesh(sizes, world, None, cluster)
    places = _neighbours(world)
    ranks = torch.tensor(ranks_by_machine(places)).view(tuple(sizes.values()))
    made = DeviceMesh(world.device.type, ranks, mesh_dim_names=tuple(sizes))
    return Mesh(sizes, world, made, cluster, tuple(machine for machine, _ in places))


def _neighbours(world: World) -> list[tuple[str, int]]:
    """(machine, number on it) of every rank."""
    found: list[tuple[str, int]] = [("", 0)] * world.size
    dist.all_gather_object(found, (socket.gethostname(), world.local_rank))
    return found


def ranks_by_machine(places: list[tuple[str, int]]) -> list[int]:
    """Ranks in the order of machines (as they first appear), and within one by their number on it: srun may deal ranks
    out to machines in turn, torchrun does not."""
    machines = list(dict.fromkeys(machine for machine, _ in places))
    return sorted(range(len(places)), key=lambda rank: (machines.index(places[rank][0]), places[rank][1]))


def _refuse_size(layout: Layout, have: int) -> None:
    need = layout.num_devices
    fits = have % layout.tp == 0
    hint = f"--set layout.dp={have // layout.tp}" if fits else "--set layout.tp=1 --set layout.dp=" + str(have)
    raise BadLayout(f"{layout.text()} needs {need} processes and {have} are running; try --devices {need} or {hint}")
