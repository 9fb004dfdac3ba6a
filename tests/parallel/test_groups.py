"""Every process group is bounded by the timeout of the default one, and a stuck rank is noticed in each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from armillary.model.transformer import build
from armillary.parallel.apply import apply
from armillary.parallel.mesh import AXES, EXPERT_AXES, make_mesh
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.world import World, join_world, timeout_of
from armillary.spec.layout import Layout
from armillary.spec.tables.train import AXIS_TIMEOUTS_S
from armillary.training.loop import make_consensus
from armillary.training.parity.case import SEQUENCE, mixture
from armillary.training.step.loss import loss_sum
from tests.ranks import Ranks

ALIKE = timedelta(seconds=77)


@contextmanager
def bounded_by(timeout: timedelta) -> Iterator[None]:
    """The pool's default group with this timeout, for a while."""
    everybody = dist.group.WORLD
    assert everybody is not None
    before = timeout_of(everybody)
    distributed_c10d._set_pg_timeout(timeout, everybody)
    try:
        yield
    finally:
        distributed_c10d._set_pg_timeout(before, everybody)


def made_for(layout: Layout) -> list[float]:
    """Seconds that bound each group that this layout made on this rank."""
    before = set(distributed_c10d._world.pg_map)
    with bounded_by(ALIKE), join_world("cpu") as world:
        mesh, config = make_mesh(layout, world), mixture()
        if layout.pp > 1:
            with torch.device("meta"):
                model = make_stage_model(config, layout, mesh.rank("pp"), sequence=SEQUENCE)
        else:
            model = build(config, dtype=torch.float32, device="cpu", seed=1)
        apply(model, layout, mesh, loss=loss_sum)
        beside_nccl = World(rank=world.rank, size=world.size, local_rank=0, device=torch.device("cuda"))
        make_consensus(beside_nccl)
        groups = set(distributed_c10d._world.pg_map) - before
        return [timeout_of(group).total_seconds() for group in groups if dist.get_rank(group) >= 0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, zero=3, precision="fp32"),
        Layout(dp=4, ep=2, zero=3, shard=2, precision="fp32"),
        Layout(cp=2, pp=2, precision="fp32"),
    ],
    ids=Layout.text,
)
def test_every_group_has_the_timeout_of_the_default_one(ranks: Ranks, layout: Layout) -> None:
    for found in ranks.run(4, made_for, layout):
        assert len(found) > 2 and set(found) == {ALIKE.total_seconds()}


def by_axis(layout: Layout) -> dict[str, float]:
    """Seconds that bound the groups of each axis, as a recipe's timeouts say."""
    limits = {axis: 10.0 * number for number, axis in enumerate(AXIS_TIMEOUTS_S, 1)}
    with join_world("cpu") as world:
        mesh = make_mesh(layout, world, limits)
        groups = {axis: group for axis in (*AXES, *EXPERT_AXES) if (group := mesh.group(axis))}
        groups |= {"cp": mesh.context} if mesh.context else {}
        return {axis: timeout_of(group).total_seconds() for axis, group in groups.items()}


def test_axes_have_timeouts_of_their_own(ranks: Ranks) -> None:
    """tp 10 s, cp 20 s, ep 30 s, dp 40 s, pp 50 s."""
    assert ranks.run(4, by_axis, Layout(tp=2, pp=2))[0] == {"tp": 10, "pp": 50}
    assert ranks.run(4, by_axis, Layout(dp=2, cp=2))[0] == {"replicate": 40, "cp": 20}
    assert ranks.run(4, by_axis, Layout(dp=4, ep=2))[0] == {"replicate": 40, "expert_replicate": 40, "ep": 30}


def waits_for_a_stuck_rank(finished: str) -> tuple[str, float]:
    """Rank 1 never comes to the exchange of its axis; it stays until the others have noticed."""
    store = dist.FileStore(finished, 4)
    with bounded_by(timedelta(seconds=2)), join_world("cpu") as world:
        group, began, said = make_mesh(Layout(dp=2, tp=2), world).group("tp"), time.monotonic(), ""
        if world.rank == 1:
            store.wait(["noticed"], timedelta(seconds=90))
        if world.rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=group)
            except RuntimeError as error:
                said = str(error)
            store.set("noticed", "")
        return said, time.monotonic() - began


def test_a_stuck_rank_is_noticed_on_its_axis(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = ranks.run(4, waits_for_a_stuck_rank, str(tmp_path_factory.mktemp("stuck") / "store"))
    said, waited_s = found[0]
    assert "Timed out waiting 2000ms" in said and waited_s < 80
