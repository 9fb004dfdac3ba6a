"""Where the ranks of an axis lie, and over which link it travels."""

from __future__ import annotations

from armillary.spec.catalogue import cluster
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.placement import (
    axis_lines,
    axis_sizes,
    crossed,
    expert_axis_sizes,
    experts_apart,
    ordinal,
    placement,
)


def test_placement_says_which_link_an_axis_crosses() -> None:
    sizes = axis_sizes(Layout(dp=8, zero=3, shard=4, tp=8))
    words = axis_lines(sizes, cluster("dgx-h100x8"))
    assert words[0].startswith("tp=8: neighbouring ranks, over NVLink 4 (8 devices)")
    assert words[1].startswith("shard=4: every 8th rank, over") and "(64 devices)" in words[1]
    assert words[2].startswith("replicate=2: every 32nd rank")
    assert placement(Layout(dp=8, zero=3, shard=4, tp=8), cluster("dgx-h100x8")) == words


def test_ranks_that_share_a_row_are_nearer_than_those_that_share_weights() -> None:
    words = placement(Layout(dp=8, cp=4, tp=2, zero=3), cluster("dgx-h100x8"))
    assert words[1].startswith("cp=4: every 2nd rank, over NVLink 4") and words[2].startswith("shard=8: every 8th rank")
    assert placement(Layout(dp=2, pp=2), None) == ["replicate=2: neighbouring ranks", "pp=2: every 2nd rank"]


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 21, 112)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "21st",
        "112th",
    ]


def test_an_axis_that_straddles_a_node_is_as_slow_as_the_network() -> None:
    inside, straddling = axis_sizes(Layout(dp=4, tp=4)), axis_sizes(Layout(dp=4, tp=6))
    machine = cluster("dgx-h100x8")
    assert crossed("tp", inside, machine)[1] == 8
    assert crossed("tp", straddling, machine)[1] == 64
    assert crossed("replicate", axis_sizes(Layout(dp=128)), machine)[0] is None


def test_experts_are_shared_out_among_neighbours() -> None:
    """64 GPUs in nodes of 8: tokens for experts stay inside a node, and so do those of tp inside ep."""
    on = cluster("h100x64")
    inside = axis_lines(expert_axis_sizes(Layout(dp=64, ep=8, zero=3)), on)
    assert inside[0] == "ep=8: neighbouring ranks, over NVLink 4 (8 devices)"
    assert inside[1] == "expert_shard=8: every 8th rank, over InfiniBand NDR (64 devices)"
    both = axis_lines(expert_axis_sizes(Layout(dp=32, tp=2, ep=4)), on)
    assert both[1] == "ep=4: every 2nd rank, over NVLink 4 (8 devices)"
    assert expert_axis_sizes(Layout(dp=8, ep=4, zero=3, shard=2)) == dict(
        pp=1, expert_replicate=2, expert_shard=1, ep=4, tp=1
    )
    assert placement(Layout(dp=64, ep=8, zero=3), on)[-1] == inside[0]


def test_experts_that_leave_the_fast_links_are_told_how_to_stay() -> None:
    on = cluster("h100x64")
    assert experts_apart(Layout(dp=64, ep=8), on) == experts_apart(Layout(dp=64), on) == ""
    assert experts_apart(Layout(dp=64, ep=16), on) == (
        "experts over ep=16 ranks exchange tokens over InfiniBand NDR; ep=8 stays inside NVLink 4"
    )
    assert experts_apart(Layout(dp=16, tp=4, ep=8), on).endswith("ep=2 stays inside NVLink 4"), "tp comes first"
    assert experts_apart(Layout(dp=4, tp=16, ep=4), on) == "", "tp alone fills a node: no ep stays inside"
