"""How a recipe's layout divides over nodes, and what a job runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from armillary.cluster.job import find_job, list_jobs, note_handle, read_job, write_job
from armillary.cluster.node_request import fill_nodes, make_job, nodes_of, parse_range, with_nodes
from armillary.errors import BadInput, BadLayout, BadRecipe, NotFound
from armillary.spec.hardware import Chip, Cluster, Link, Tier
from armillary.spec.layout import Layout
from armillary.spec.recipe import Recipe, load_recipe, recipe_from_dict, to_toml
from armillary.store.home import Home

CORE = Chip(name="core", title="core", vendor="", kind="cpu")
SHARED = Link(name="shared-memory", title="shared memory", bytes_per_s=None, latency_s=None, kind="scale_up")
TWO_CORES = Cluster(name="here", chip=CORE, tiers=(Tier(link=SHARED, count=2),))


def recipe(*overrides: str) -> Recipe:
    return recipe_from_dict({"model": {"name": "gpt2"}}, overrides)


@pytest.mark.parametrize(
    ("overrides", "nodes", "placed"),
    [
        (("layout.dp=4",), 2, (2, 2, 0)),
        ((), 2, (2, 1, 0)),
        (("launch.ranks_per_node=3",), 2, (2, 3, 0)),
        (("layout.tp=2", "launch.ranks_per_node=4"), 3, (3, 4, 0)),
        (("hardware.on=dgx-h200x8",), 2, (2, 8, 8)),
        (("hardware.on=h100x8", "layout.tp=8"), 4, (4, 8, 8)),
    ],
)
def test_a_layout_fills_the_nodes(overrides: tuple[str, ...], nodes: int, placed: tuple[int, ...]) -> None:
    asked = with_nodes(recipe(*overrides), nodes)
    cluster = asked.cluster(TWO_CORES)
    asked = fill_nodes(asked, cluster)
    found = nodes_of(asked, cluster)
    assert (found.count, found.ranks, found.gpus) == placed
    assert asked.layout.num_devices == found.count * found.ranks
    assert cluster.num_nodes == nodes


def test_a_layout_that_needs_fewer_nodes_gets_fewer() -> None:
    asked = recipe("hardware.on=dgx-h200x8", "layout.dp=4", "layout.tp=4")
    found = nodes_of(asked, asked.cluster())
    assert (found.count, found.ranks) == (2, 8)
    asked = recipe("hardware.on=dgx-h200x8", "layout.dp=4")
    assert nodes_of(asked, asked.cluster()).text == "1 node × 4 ranks"


def test_what_cannot_be_placed_is_refused_with_a_way_out() -> None:
    with pytest.raises(BadLayout, match=r"has 12 ranks, which 8 per node do not place on 2 nodes; try --nodes 2 or"):
        nodes_of(recipe("hardware.on=dgx-h200x2", "layout.dp=12"), recipe("hardware.on=dgx-h200x2").cluster())
    with pytest.raises(BadLayout, match=r"try --set layout\.tp"):
        fill_nodes(recipe("hardware.on=dgx-h200x1", "layout.tp=3"), recipe("hardware.on=dgx-h200x1").cluster())
    with pytest.raises(BadInput, match="--nodes 0 is nothing"):
        parse_range("0")
    with pytest.raises(BadRecipe, match="counts machines like this one"):
        recipe("hardware.on=h100x8", "hardware.nodes=2")


def test_machines_like_this_one_are_connected_by_the_network() -> None:
    cluster = recipe("hardware.nodes=3", "hardware.network=ethernet-10g").cluster(TWO_CORES)
    assert [(tier.count, tier.link.name) for tier in cluster.tiers] == [(2, "shared-memory"), (3, "ethernet-10g")]
    assert (cluster.num_nodes, cluster.num_devices) == (3, 6)
    assert recipe().cluster(TWO_CORES) is TWO_CORES


def test_a_job_is_kept_as_a_folder(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    asked = with_nodes(recipe("launch.partition=gpu", "train.grace_s=200", "train.max_restarts=1"), 2)
    asked = fill_nodes(asked, asked.cluster(TWO_CORES))
    job = make_job(asked, nodes_of(asked, asked.cluster(TWO_CORES)), home, target="slurm", name="keen-fox")
    write_job(job, {"recipe.toml": to_toml(asked)})
    assert read_job(job.folder) == job and load_recipe(job.folder / "recipe.toml") == asked
    assert job.stop_s == 200 and job.restarts == 1
    numbered = note_handle(job, "4711")
    assert find_job(home, "4711") == find_job(home, "keen-fox") == numbered
    later = replace(numbered, name="fair-elk", folder=tmp_path / "jobs" / "fair-elk", created=job.created + 1)
    write_job(later, {})
    (tmp_path / "jobs" / "broken").mkdir()
    (tmp_path / "jobs" / "broken" / "job.json").write_text("{")
    assert [each.name for each in list_jobs(home)] == ["fair-elk", "keen-fox"]
    with pytest.raises(NotFound, match="no job 'keen-fux'; did you mean keen-fox"):
        find_job(home, "keen-fux")


def test_a_check_has_all_its_nodes(tmp_path: Path) -> None:
    """Its ranks are started by torchrun for all of them: none may be missing."""
    placed = nodes_of(recipe(), TWO_CORES)
    made = [
        make_job(recipe(), placed, Home.at(tmp_path), target="slurm", name="a", least=1, is_check=is_check)
        for is_check in (False, True)
    ]
    assert [job.least_nodes for job in made] == [1, 0]


def test_the_port_is_the_same_for_a_name_and_given_ones_win(tmp_path: Path) -> None:
    placed = nodes_of(recipe(), TWO_CORES)
    ports = [make_job(recipe(), placed, Home.at(tmp_path), target="ssh", name="a").port for _ in range(2)]
    assert ports[0] == ports[1] and 20_000 <= ports[0] < 29_000
    assert make_job(recipe("launch.port=4000"), placed, Home.at(tmp_path), target="ssh").port == 4000


@pytest.mark.parametrize("name", ["../../x", "a b", "fox'", "-x"])
def test_a_name_that_is_no_folder_s_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="is no name for a run; use letters, digits and -"):
        make_job(recipe(), nodes_of(recipe(), TWO_CORES), Home.at(tmp_path), target="ssh", name=name)


def test_a_layout_default_is_one_rank() -> None:
    assert nodes_of(recipe(), TWO_CORES).text == "1 node × 1 rank" and Layout().num_devices == 1
