"""The node of a straggler is left out when nodes meet again, where that gains something and enough others stay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.output import Output
from armillary.cli.train.elastic import ElasticNode
from armillary.cli.train.leader import Leader
from armillary.cli.train.node_exclusion import NodeExcluded, excluded_node, refuse_excluded, round_facts
from armillary.spec.catalogue import model
from armillary.spec.recipe import recipe_from_dict
from armillary.store.gauges import GaugeWriter
from armillary.store.hang_verdict import HangVerdict, write_verdict
from armillary.store.home import Home
from armillary.store.run_events import read_events
from armillary.store.runs import Run, create_run
from armillary.training.resilience.node_rendezvous import Nodes

NODES: list[dict[str, Any]] = [
    {"devices": 2, "machine": f"m{n}", "launcher": f"m{n}/7", "host": f"h{n}", "is_host": n == 0} for n in range(4)
]


def a_run(home: Home, late_s: float, *, rank: int = 5, since: float = 0.0) -> tuple[Run, dict[str, Any]]:
    """40 steps of a second on eight ranks, in which one is late; and what was noted of the nodes."""
    run = create_run(home, {"model": {"name": "armillary-2m"}})
    with GaugeWriter(run.gauges) as writer:
        for step in range(40):
            late = {"rank_spread_s": late_s + 0.001 * (step % 3), "slowest_rank": float(rank)}
            writer.write({"loss": 3.0, "step_s": 1.0} | late, step=step, now=100.0 + step)
    return run, round_facts(NODES, [2, 2, 2, 2]) | {"time": since}


def test_the_node_of_the_late_rank_is_named_with_the_reason(home: Home) -> None:
    run, last = a_run(home, 0.4)
    slow = excluded_node(run, last, others_wait=False)
    assert slow is not None and (slow.host, slow.rank, slow.machine) == ("h2", 5, "m2")
    assert "h2 is left out: rank 5 was 401 ms per step later than the others since step" in slow.text
    refuse_excluded([asdict(slow)], NODES[1])
    with pytest.raises(NodeExcluded, match="h2 is left out"):
        refuse_excluded([asdict(slow)], NODES[2] | {"launcher": "m2/8"})  # started again on that machine


def test_three_nodes_without_a_small_delay_are_slower_than_four_with_it(home: Home) -> None:
    run, last = a_run(home, 0.2)
    assert excluded_node(run, last, others_wait=False) is None
    assert excluded_node(run, last, others_wait=True) is not None, "another node takes its place"


def test_only_steps_of_the_last_round_count_and_the_meeting_point_stays(home: Home) -> None:
    run, last = a_run(home, 0.4, since=200.0)
    assert excluded_node(run, last, others_wait=False) is None
    run, last = a_run(home, 0.4, since=105.0)
    assert excluded_node(run, last, others_wait=False) is not None
    run, last = a_run(home, 0.4, rank=1)
    assert excluded_node(run, last, others_wait=False) is None


def test_a_rank_that_stood_still_counts_too(home: Home) -> None:
    run, last = a_run(home, 0.0)
    verdict = HangVerdict(cause="slow_rank", rank=7, text="rank 7 computes for ever; look at it", time=150.0)
    write_verdict(run.folder, verdict)
    slow = excluded_node(run, last, others_wait=False)
    assert slow is not None and slow.host == "h3" and slow.why == "rank 7 computes for ever"


def test_one_of_several_nodes_of_a_machine(home: Home) -> None:
    run, last = a_run(home, 0.4)
    last["nodes"] = [node | {"machine": "same"} for node in last["nodes"]]
    slow = excluded_node(run, last, others_wait=False)
    assert slow is not None
    refuse_excluded([asdict(slow)], NODES[3] | {"machine": "same"})
    with pytest.raises(NodeExcluded):
        refuse_excluded([asdict(slow)], NODES[2] | {"machine": "same"})


class Meeting:
    """What the nodes of later rounds are told, without a store."""

    def __init__(self, **notes: Any) -> None:
        self.notes = notes

    def noted(self, key: str) -> Any:
        return self.notes.get(key)

    def note(self, key: str, value: Any) -> None:
        self.notes[key] = value

    def num_waiting(self) -> int:
        return 0


def leader(home: Home, run: Run, last: dict[str, Any], *, least: int, asked: bool = True) -> Leader:
    recipe = recipe_from_dict(
        {
            "model": {"name": "armillary-2m"},
            "layout": {"dp": 8},
            "train": {"exclude_stragglers": asked, "sequence": 32, "batch_tokens": 768},
        }
    )
    node = ElasticNode(
        out=Output("silent"),
        home=home,
        recipe=recipe,
        config=model("armillary-2m").config,
        nodes=Nodes(least=least, most=4),
        devices=2,
        planning={},
        open_run=lambda out, begun: pytest.fail("not opened"),
    )
    meeting = Meeting(run={"folder": str(run.folder), "owner": run.owner}, round=last)
    return Leader(node, meeting, None, NODES)  # type: ignore[arg-type]


def test_the_leader_tells_who_leaves_and_notes_it_in_the_run(home: Home) -> None:
    run, last = a_run(home, 0.4)
    leads = leader(home, run, last, least=3)
    start = leads._without_straggler()
    assert start is not None and start["leaves"] == 2 and "rank 5 was" in start["why"]
    assert [each["host"] for each in leads.meeting.noted("excluded")] == ["h2"]
    assert read_events(run.folder)[-1].more["excluded"] == start["why"]
    assert leads._without_straggler() is None, "judged once"


@pytest.mark.parametrize(("least", "asked"), [(4, True), (3, False)], ids=["too few others", "not asked for"])
def test_otherwise_the_node_stays(least: int, asked: bool, home: Home, tmp_path: Path) -> None:
    run, last = a_run(home, 0.4)
    leads = leader(home, run, last, least=least, asked=asked)
    assert leads._without_straggler() is None and leads.meeting.noted("excluded") is None
