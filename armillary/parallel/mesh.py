"""The mesh: which ranks share which axis of a layout.

Axes from the outermost to the innermost are pp, replicate, shard, tp (`spec.placement`): neighbours on the mesh are
neighbours in a machine and in a domain of the network, so the axis with most communication gets the fastest links,
however a launcher numbered the processes. Ranks that share a row (cp) replicate the weights too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.errors import BadLayout
from armillary.machine.network_domain import network_domain
from armillary.machine.node_id import node_id
from armillary.parallel.world import World, new_group, new_mesh
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import axis_sizes, expert_axis_sizes
from armillary.spec.network_domains import Domain, in_domain_order

DATA_AXES = ("replicate", "shard")
AXES = ("pp", *DATA_AXES, "tp")
"""outermost first"""
EXPERT_AXES = ("expert_replicate", "expert_shard", "ep")
"""into which the data axes are split for experts, outermost first"""
AXIS_NAMES = {**dict.fromkeys((*AXES, *EXPERT_AXES), "dp"), "pp": "pp", "tp": "tp", "ep": "ep"}
"""axis of the mesh -> the axis of the layout that it belongs to"""


class Mesh:
    """The ranks of a layout, by axis."""

    def __init__(
        self,
        sizes: dict[str, int],
        world: World,
        torch_mesh: DeviceMesh | None = None,
        machines: tuple[str, ...] = (),
        cp: int = 1,
        context: dist.ProcessGroup | None = None,
        experts: DeviceMesh | None = None,
        domains: tuple[Domain, ...] = (),
    ) -> None:
        self.sizes, self.world, self.torch_mesh = sizes, world, torch_mesh
        self.machines, self.domains = machines, domains
        """of each rank"""
        self.cp, self.context = cp, context
        """ranks that share a row, and their group where there are several"""
        self.experts = experts
        """the same ranks by the axes of experts, with expert parallelism"""

    def size(self, axis: str) -> int:
        if axis in EXPERT_AXES:
            return 1 if self.experts is None else self.experts[axis].size()
        return self.sizes[axis]

    def rank(self, axis: str) -> int:
        """Of this process along the axis."""
        return 0 if self.torch_mesh is None else self.torch_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in `axis` only; None where it is alone."""
        if axis in EXPERT_AXES:
            return None if self.experts is None or self.size(axis) == 1 else self.experts[axis].get_group()
        return self.along(axis).get_group() if self.sizes[axis] > 1 else None

    def along(self, *axes: str) -> DeviceMesh:
        """torch's mesh of one axis or several."""
        assert self.torch_mesh is not None, "one process has no mesh"
        return self.torch_mesh[axes]

    @property
    def num_copies(self) -> int:
        """Ranks with the same weights, or with shards of one copy: gradients are reduced over these."""
        return prod(self.sizes[axis] for axis in DATA_AXES)

    @property
    def dp_size(self) -> int:
        """Ranks that read different rows of the batch."""
        return self.num_copies // self.cp

    @property
    def dp_rank(self) -> int:
        """Which of them this is."""
        return (self.rank("replicate") * self.sizes["shard"] + self.rank("shard")) // self.cp

    def group_machines(self) -> dict[str, float]:
        """Gauges: over how many machines the most spread group of tp or ep ranks is, and how many it needs; none where
        there is one machine, or no such group."""
        meshes = ((self.torch_mesh, "tp"), (self.experts, "ep"))
        groups = [rows for mesh, axis in meshes if mesh is not None for rows in _rows_along(mesh, axis)]
        spread = spread_of(groups, self.machines)
        return {} if spread is None else {"group_machines": spread[0], "group_machines_least": spread[1]}

    def is_on_one_machine(self, axis: str) -> bool:
        """Whether this rank reaches all others of the axis without a network."""
        group = self.group(axis)
        return group is None or len({self.machines[rank] for rank in dist.get_process_group_ranks(group)}) == 1


def make_mesh(layout: Layout, world: World, timeouts_s: Mapping[str, float] | None = None) -> Mesh:
    """The mesh of a layout over the processes that run; every rank calls it. `timeouts_s` are those of exchanges along
    tp, cp, ep, dp and pp; the default group's where none is given."""
    sizes = axis_sizes(layout)
    if prod(sizes.values()) != world.size:
        _refuse_size(layout, world.size)
    if world.size == 1 and not dist.is_initialized():
        return Mesh(sizes, world)
    places = places_of(world)
    ranks = torch.tensor(ranks_by_machine(places)).view(tuple(sizes.values()))
    limits = {axis: limit for axis in AXIS_NAMES if (limit := (timeouts_s or {}).get(AXIS_NAMES[axis])) is not None}
    torch_mesh = new_mesh(world.device.type, ranks, tuple(sizes), limits)
    lines = ranks.view(-1, layout.cp, layout.tp).transpose(1, 2).reshape(-1, layout.cp)
    context = _own_group(lines, world, (timeouts_s or {}).get("cp"))
    machines, domains = (tuple(each) for each in zip(*((place.machine, place.domain) for place in places), strict=True))
    experts = None
    if layout.ep > 1:
        shape = expert_axis_sizes(layout)
        experts = new_mesh(world.device.type, ranks.view(tuple(shape.values())), tuple(shape), limits)
    return Mesh(sizes, world, torch_mesh, machines, cp=layout.cp, context=context, experts=experts, domains=domains)


def _rows_along(mesh: DeviceMesh, axis: str) -> list[list[int]]:
    """The ranks of every group along an axis."""
    assert mesh.mesh_dim_names is not None
    at = mesh.mesh_dim_names.index(axis)
    rows: list[list[int]] = mesh.mesh.movedim(at, -1).reshape(-1, mesh.mesh.shape[at]).tolist()
    return rows


def spread_of(groups: Iterable[Sequence[int]], machines: Sequence[str]) -> tuple[float, float] | None:
    """(machines of the group that is on most more than it needs, machines it needs): ranks of a group over ranks of the
    largest machine, rounded up. None without a group of several ranks, or on one machine."""
    most = max(Counter(machines).values(), default=0)
    several = [group for group in groups if len(group) > 1]
    if len(set(machines)) < 2 or not several:
        return None
    spans = [(len({machines[rank] for rank in group}), -(-len(group) // most)) for group in several]
    worst = max(spans, key=lambda span: (span[0] - span[1], span[0]))
    return float(worst[0]), float(worst[1])


def _own_group(lines: torch.Tensor, world: World, timeout_s: float | None) -> dist.ProcessGroup | None:
    """Creates a group per line of ranks; returns this rank's, None where it is alone."""
    if lines.shape[1] == 1:
        return None
    groups = {tuple(line): new_group(line, timeout_s=timeout_s) for line in lines.tolist()}
    return next(group for line, group in groups.items() if world.rank in line)


def machines_of(world: World) -> tuple[str, ...]:
    """The machine of every rank; every rank calls it."""
    return tuple(place.machine for place in places_of(world))


class Place(NamedTuple):
    """Where a rank is: its machine, its number on it, and the machine's domains in the network."""

    machine: str
    number: int
    domain: Domain = ()


def places_of(world: World) -> list[Place]:
    """The place of every rank; every rank calls it."""
    places = [Place("", 0)] * world.size
    dist.all_gather_object(places, Place(node_id(), world.local_rank, network_domain()))
    return places


def ranks_by_machine(places: Sequence[Place]) -> list[int]:
    """Ranks in the order of domains and machines (as they first appear), and within a machine by their number on it:
    srun may distribute ranks round-robin over machines, and torchrun numbers machines as they arrive."""
    paths = [(*place.domain, place.machine) for place in places]
    order = list(dict.fromkeys(paths[rank] for rank in in_domain_order(paths)))
    return sorted(range(len(places)), key=lambda rank: (order.index(paths[rank]), places[rank].number))


def domains_of_nodes(world: World) -> tuple[Domain, ...]:
    """The domains of every machine, in the order in which the mesh takes them; every rank calls it."""
    if world.size == 1 and not dist.is_initialized():
        return ()
    places = places_of(world)
    return tuple({places[rank].machine: places[rank].domain for rank in ranks_by_machine(places)}.values())


def _refuse_size(layout: Layout, have: int) -> None:
    need = layout.num_devices
    inner = need // layout.dp
    alone = "".join(f"--set layout.{axis}=1 " for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1)
    hint = f"--set layout.dp={have // inner}" if have % inner == 0 else f"{alone}--set layout.dp={have}"
    raise BadLayout(f"{layout.text()} needs {need} processes and {have} are running; try --devices {need} or {hint}")
