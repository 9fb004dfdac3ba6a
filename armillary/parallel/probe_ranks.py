"""The measurements of a pre-flight check, on the ranks of a layout: each device, each link of its groups, each disk.

Every figure is the best of several trials: other work on a machine only makes a trial slower. The rate of a pair is
bytes per second in one direction while both are busy; that of a group is bus bandwidth (as nccl-tests defines it) of
all-reduces: bytes over seconds between two large sizes, which leaves out latency and what a network lets pass at once.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path

import torch
import torch.distributed as dist

from armillary import __version__
from armillary.errors import ArmillaryError, one_line
from armillary.machine.clocks import cpu_clocks, gpu_clocks
from armillary.machine.node_id import node_id
from armillary.parallel.consensus import Consensus
from armillary.parallel.mesh import AXES, Mesh, make_mesh
from armillary.parallel.world import World, new_group
from armillary.profiling.ceilings.ceilings import name_of
from armillary.spec.arithmetic.non_gemm_ops import wire_factor
from armillary.spec.layout import Layout
from armillary.spec.network_domains import Domain
from armillary.store.cluster_probe import ClusterProbe, LinkProbe, RankProbe, TwoSizes

TRIALS = 40
BUDGET_S = 0.4
"""of each measurement of a device"""
GEMM_SIZE = {"cpu": 256, "cuda": 8192}
"""on a CPU shorter than a time slice, so that some calls are not interrupted on a busy machine"""
COPY_BYTES, COPIED_AT_ONCE = {"cpu": 1 << 26, "cuda": 1 << 30}, {"cpu": 1 << 22, "cuda": 1 << 30}
"""of a buffer that no cache holds, and of the parts of it that are timed, again shorter than a time slice on a CPU"""
DISK_BYTES = 1 << 25
PAIR_BYTES, SMALL_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}, 1 << 12
GROUP_BYTES = {"cpu": (1 << 12, 1 << 19, 1 << 22), "cuda": (1 << 14, 1 << 24, 1 << 27)}
"""latency is that of the first, rate from the difference of the others"""
PAIR_S, GROUP_S, FEWEST = 0.5, 1.5, 5
"""of each size between a pair and in a group, and trials where one takes longer"""
MOST_PAIRS = 16
"""ranks of a group up to which every pair is measured; in a larger one each rank with those 1, 2, 4 … further on"""


class LinkFailed(ArmillaryError):
    """Two ranks could not exchange data."""


def probe_ranks(layout: Layout, world: World, ranks: Consensus, folder: Path) -> ClusterProbe:
    """Measure everything; every rank calls it and gets all results. `folder` is where the disk is measured."""
    began = time.monotonic()
    mesh = make_mesh(layout, world)
    machines = mesh.machines or (node_id(),)
    devices = ranks.gather(_rank_probe(world, machines, folder))
    links = [link for axis in AXES for link in _pair_links(mesh, axis, ranks)]
    groups = [link for axis in AXES if (link := _group(mesh, axis)) is not None]
    return ClusterProbe(
        ranks=tuple(devices),
        links=_unique(ranks.gather(links)),
        groups=_unique(ranks.gather(groups)),
        network=ranks.broadcast(_network(machines, world)),
        domains=_unique(ranks.gather(_domain_networks(machines, mesh.domains, world))),
        seconds=time.monotonic() - began,
    )


def _unique(links: list[list[LinkProbe]]) -> tuple[LinkProbe, ...]:
    """Each link once, of the ranks that measured it the slowest: a link is as fast as both of its ends see it."""
    slowest: dict[tuple[str, tuple[int, ...]], LinkProbe] = {}
    for link in (link for of_rank in links for link in of_rank):
        seen = slowest.setdefault((link.axis, link.ranks), link)
        if link.bytes_per_s < seen.bytes_per_s:
            slowest[link.axis, link.ranks] = link
    return tuple(slowest.values())


# --- a device


def _rank_probe(world: World, machines: tuple[str, ...], folder: Path) -> RankProbe:
    device, node = world.device, machines[world.rank]
    first = machines.index(node) == world.rank
    return RankProbe(
        rank=world.rank,
        node=node,
        device=name_of(device),
        gemm_flops=gemm_flops(device),
        copy_bytes_per_s=copy_bytes_per_s(device),
        disk_bytes_per_s=disk_bytes_per_s(folder, world.rank) if first else None,
        clock_hz=_clock_hz(device),
        versions={"armillary": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
    )


def gemm_flops(device: torch.device) -> float:
    """FLOP/s of a square GEMM, fp32 on a CPU and bf16 on a GPU."""
    n, dtype = GEMM_SIZE[device.type], torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * n**3 / _best(lambda: torch.mm(left, right, out=out), device)


def copy_bytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by a copy in device memory."""
    source = torch.zeros(COPY_BYTES[device.type] // 4, device=device)
    target, size = torch.ones_like(source), COPIED_AT_ONCE[device.type]
    parts = cycle(zip(target.split(size // 4), source.split(size // 4), strict=True))

    def copy_part() -> None:
        to, part = next(parts)
        to.copy_(part)

    return 2 * size / _best(copy_part, device)


def disk_bytes_per_s(folder: Path, rank: int) -> float:
    """Bytes per second of a write that reaches the disk."""
    file, data = folder / f".disk-{rank}", os.urandom(DISK_BYTES)
    try:
        with file.open("wb") as opened:
            begin = time.perf_counter()
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
            return DISK_BYTES / (time.perf_counter() - begin)
    finally:
        file.unlink(missing_ok=True)


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest call within the budget, after one to warm up."""
    _wait(call, device)
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while not times or time.perf_counter() < end:
        times.append(_wait(call, device))
    return min(times)


def _wait(call: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _clock_hz(device: torch.device) -> float | None:
    read = gpu_clocks(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if device.type == "cuda" else cpu_clocks
    reading = read()
    return next((value for name, value in reading.items() if name in ("sm_clock_hz", "cpu_clock_hz")), None)


# --- links


def _pair_links(mesh: Mesh, axis: str, ranks: Consensus) -> list[LinkProbe]:
    """This rank with others of its group along the axis, one after the other; all groups measure at the same time, as
    they communicate in a step."""
    group = mesh.group(axis)
    if group is None:
        return []
    members, links = dist.get_process_group_ranks(group), []
    place = members.index(mesh.world.rank)
    for members_of_round in rounds(len(members)):
        ranks.total(0.0)  # all begin the round together
        other = next((sum(pair) - place for pair in members_of_round if place in pair), None)
        if other is not None:
            links.append(_pair(mesh, axis, members[other]))
    return links


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of `count` members, in rounds in which each is in one pair at most: all pairs, or in a large group each
    member and those 1, 2, 4 … further on."""
    offsets = range(1, count) if count <= MOST_PAIRS else [1 << power for power in range((count - 1).bit_length())]
    every_pair = dict.fromkeys(tuple(sorted((place, (place + by) % count))) for by in offsets for place in range(count))
    schedule: list[list[tuple[int, int]]] = []
    for first, second in every_pair:
        free = (each for each in schedule if not any(first in pair or second in pair for pair in each))
        place = next(free, None)
        if place is None:
            schedule.append(place := [])
        place.append((first, second))
    return schedule


def _pair(mesh: Mesh, axis: str, other: int) -> LinkProbe:
    own, size = mesh.world.rank, PAIR_BYTES[mesh.world.device.type]
    try:
        small, large = (_exchange_s(mesh.world, other, each) for each in (SMALL_BYTES, size))
    except (RuntimeError, dist.DistError) as error:  # such as gloo's and NCCL's timeouts
        ends = " and ".join(f"{rank} on {mesh.machines[rank]}" for rank in sorted((own, other)))
        raise LinkFailed(f"no exchange between ranks {ends} ({one_line(error, 200)}); check their network") from error
    timed = TwoSizes(num_bytes=size - SMALL_BYTES, smaller_s=small, larger_s=large)
    apart = mesh.machines[own] != mesh.machines[other]
    return _link(axis, (min(own, other), max(own, other)), timed, small, apart=apart)


def _link(axis: str, ranks: tuple[int, ...], timed: TwoSizes, latency_s: float, *, apart: bool) -> LinkProbe:
    rate = timed.bytes_per_s
    return LinkProbe(axis=axis, ranks=ranks, between_nodes=apart, bytes_per_s=rate, latency_s=latency_s, timed=timed)


def _exchange_s(world: World, other: int, size: int) -> float:
    """Seconds of the fastest exchange of `size` bytes in both directions."""
    out, back = (torch.zeros(size, dtype=torch.uint8, device=world.device) for _ in range(2))

    def send_both() -> None:
        _send_both(world, other, out, back)

    send_both()
    first = torch.tensor([_wait(send_both, world.device)], dtype=torch.float32, device=world.device)
    repeats = _trials(max(float(first), float(_swap(world, other, first))), PAIR_S)
    return min(float(first), *(_wait(send_both, world.device) for _ in range(repeats)))


def _swap(world: World, other: int, value: torch.Tensor) -> torch.Tensor:
    """The other rank's value."""
    theirs = torch.empty_like(value)
    _send_both(world, other, value, theirs)
    return theirs


def _send_both(world: World, other: int, out: torch.Tensor, back: torch.Tensor) -> None:
    calls = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
    for work in dist.batch_isend_irecv(calls if world.rank < other else calls[::-1]):
        work.wait()


def _trials(first_s: float, budget_s: float) -> int:
    """Further trials of what took `first_s`."""
    return min(TRIALS, max(FEWEST, int(budget_s / max(first_s, 1e-9))))


def _group(mesh: Mesh, axis: str) -> LinkProbe | None:
    """The group of this rank in an all-reduce."""
    group = mesh.group(axis)
    if group is None:
        return None
    members = tuple(sorted(dist.get_process_group_ranks(group)))
    apart = len({mesh.machines[rank] for rank in members}) > 1
    return _all_reduces(axis, members, group, mesh.world.device, apart=apart)


def _network(machines: tuple[str, ...], world: World) -> LinkProbe | None:
    """One rank per node in an all-reduce; rank 0 is always one of them."""
    first = sorted({machines.index(node) for node in machines})
    if len(first) == 1:
        return None
    group = new_group(first)
    return _all_reduces("nodes", tuple(first), group, world.device, apart=True) if world.rank in first else None


def _domain_networks(machines: tuple[str, ...], domains: tuple[Domain, ...], world: World) -> list[LinkProbe]:
    """The same inside the innermost domains of the network that hold several nodes, but not all: at the same time."""
    first = [machines.index(node) for node in dict.fromkeys(machines)]
    members = groups_in_domains({rank: domains[rank] for rank in first} if domains else {})
    groups = {ranks: new_group(ranks) for ranks in members}
    return [
        _all_reduces(kind, ranks, groups[ranks], world.device, apart=True)
        for ranks, kind in members.items()
        if world.rank in ranks
    ]


def groups_in_domains(domains: Mapping[int, Domain]) -> dict[tuple[int, ...], str]:
    """Ranks that share the innermost domain in which any has a neighbour, and its kind; nothing where that is all."""
    for depth in range(min((len(domain) for domain in domains.values()), default=0), 0, -1):
        groups: dict[Domain, list[int]] = {}
        for rank, domain in domains.items():
            groups.setdefault(domain[:depth], []).append(rank)
        several = {tuple(ranks): domain[-1].partition("=")[0] for domain, ranks in groups.items() if len(ranks) > 1}
        if several:
            return several if len(groups) > 1 else {}
    return {}


def _all_reduces(
    axis: str, members: tuple[int, ...], group: dist.ProcessGroup, device: torch.device, *, apart: bool
) -> LinkProbe:
    sizes, steps = GROUP_BYTES[device.type], 2 * (len(members) - 1)
    small, middle, large = (_all_reduce_s(size, group, device) for size in sizes)
    moved = (sizes[2] - sizes[1]) * wire_factor("all_reduce", len(members))
    return _link(axis, members, TwoSizes(num_bytes=moved, smaller_s=middle, larger_s=large), small / steps, apart=apart)


def _all_reduce_s(size: int, group: dist.ProcessGroup, device: torch.device) -> float:
    value = torch.zeros(size // 4, device=device)
    dist.all_reduce(value, group=group)
    first = torch.tensor(_wait(lambda: dist.all_reduce(value, group=group), device), device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX, group=group)  # all make the same number of trials
    repeats = _trials(float(first), GROUP_S)
    return min(_wait(lambda: dist.all_reduce(value, group=group), device) for _ in range(repeats))
