"""Which ranks share an axis, and over which link it travels."""

from __future__ import annotations

import pytest
import torch

from armillary.errors import BadLayout
from armillary.parallel.mesh import Place, make_mesh, ranks_by_machine, spread_of
from armillary.parallel.world import World, join_world
from armillary.spec.layout import Layout
from tests.ranks import Ranks

HYBRID = Layout(dp=4, zero=3, shard=2, tp=2)


def world(rank: int, size: int) -> World:
    return World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))


def coordinates(layout: Layout) -> tuple[dict[str, int], int, dict[str, list[int]]]:
    import torch.distributed as dist

    with join_world("cpu") as joined:
        mesh = make_mesh(layout, joined)
        groups = {axis: dist.get_process_group_ranks(group) for axis in mesh.sizes if (group := mesh.group(axis))}
        assert all(mesh.is_on_one_machine(axis) for axis in mesh.sizes)
        return {axis: mesh.rank(axis) for axis in mesh.sizes}, mesh.dp_rank, groups


def test_tensor_parallel_ranks_are_neighbours(ranks: Ranks) -> None:
    found = ranks.run(4, coordinates, Layout(dp=2, tp=2, zero=3))
    assert found[0] == (dict(pp=0, replicate=0, shard=0, tp=0), 0, dict(shard=[0, 2], tp=[0, 1]))
    assert found[3] == (dict(pp=0, replicate=0, shard=1, tp=1), 1, dict(shard=[1, 3], tp=[2, 3]))
    assert [dp_rank for _, dp_rank, _ in found] == [0, 0, 1, 1]


@pytest.mark.slow
def test_shards_are_next_and_copies_the_farthest(ranks: Ranks) -> None:
    found = ranks.run(8, coordinates, HYBRID)
    assert found[0] == (dict(pp=0, replicate=0, shard=0, tp=0), 0, dict(replicate=[0, 4], shard=[0, 2], tp=[0, 1]))
    assert found[7] == (dict(pp=0, replicate=1, shard=1, tp=1), 3, dict(replicate=[3, 7], shard=[5, 7], tp=[6, 7]))
    assert [dp_rank for _, dp_rank, _ in found] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ranks_dealt_out_to_machines_in_turn_are_put_side_by_side() -> None:
    assert ranks_by_machine([Place("a", 0), Place("b", 0), Place("a", 1), Place("b", 1)]) == [0, 2, 1, 3]
    assert ranks_by_machine([Place("z", 0), Place("z", 1), Place("a", 0), Place("a", 1)]) == [0, 1, 2, 3]


def test_groups_that_machines_of_different_sizes_cut_through() -> None:
    """(machines of the worst group, machines it needs)"""
    pairs = [[0, 1], [2, 3]]
    assert spread_of(pairs, ("a", "a", "b", "b")) == (1, 1)
    assert spread_of(pairs, ("a", "b", "b", "b")) == (2, 1)
    assert spread_of([[0, 1, 2, 3]], ("a", "a", "b", "b")) == (2, 2), "larger than a machine"
    assert spread_of([[0], [1]], ("a", "b")) is None and spread_of(pairs, ("a",) * 4) is None


def uneven(layout: Layout) -> dict[str, float]:
    """As if the first rank had a machine to itself."""
    from unittest import mock

    from armillary.parallel import mesh

    with join_world("cpu") as joined, mock.patch.object(mesh, "node_id", lambda: "a" if joined.rank == 0 else "b"):
        return make_mesh(layout, joined).group_machines()


def test_a_mesh_tells_over_how_many_machines_its_groups_are(ranks: Ranks) -> None:
    spread = {"group_machines": 2.0, "group_machines_least": 1.0}
    assert ranks.run(4, uneven, Layout(dp=2, tp=2)) == [spread] * 4
    assert ranks.run(4, uneven, Layout(dp=4, ep=2)) == [spread] * 4
    assert ranks.run(2, uneven, Layout(dp=2)) == [{}] * 2


def test_machines_of_a_domain_are_neighbours() -> None:
    """torchrun has numbered four machines of two racks as they arrived: tp = 4 must not leave a rack."""
    racks = {"m0": "rack=1", "m1": "rack=2", "m2": "rack=1", "m3": "rack=2"}
    places = [Place(machine, number, ("zone=a", rack)) for machine, rack in racks.items() for number in range(2)]
    assert ranks_by_machine(places) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert ranks_by_machine([*places, Place("m4", 0)])[-1] == 8, "a machine of which nothing is known"


def test_an_axis_of_one_has_no_group() -> None:
    mesh = make_mesh(Layout(zero=3), world(0, 1))
    assert mesh.group("tp") is None and mesh.group("shard") is None
    assert (mesh.dp_size, mesh.dp_rank) == (1, 0)


@pytest.mark.parametrize(
    ("layout", "size", "words"),
    [
        (Layout(dp=4), 2, "dp=4 needs 4 processes and 2 are running; try --devices 4 or --set layout.dp=2"),
        (Layout(dp=2, tp=2), 3, "try --devices 4 or --set layout.tp=1 --set layout.dp=3"),
        (Layout(), 2, "dp=1 needs 1 processes and 2 are running"),
    ],
)
def test_another_number_of_processes_is_refused(layout: Layout, size: int, words: str) -> None:
    with pytest.raises(BadLayout, match=words):
        make_mesh(layout, world(0, size))
