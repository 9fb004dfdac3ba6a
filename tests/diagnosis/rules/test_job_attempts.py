"""What Slurm's accounting and Kubernetes' events tell of a job, in the formats that these programs document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.open_reading import open_reading
from armillary.errors import BadData
from armillary.store.home import Home

HEAD = "JobID|State|Start|End|NodeList\n"


def judged(folder: Path, text: str) -> Diagnosis:
    path = folder / "events.txt"
    path.write_text(text)
    home = Home.at(folder)
    return diagnose(open_reading(str(path), home), home)


def attempts(*rows: tuple[str, int, int, str]) -> str:
    """(state, hour of its start, hour of its end, nodes) of each attempt, and the steps of the first."""
    lines = [f"42|{state}|2026-11-18T{at:02}:00:00|2026-11-18T{to:02}:00:00|{nodes}" for state, at, to, nodes in rows]
    return HEAD + "\n".join([lines[0], lines[0].replace("42|", "42.batch|"), *lines[1:]]) + "\n"


def test_a_node_that_fails_each_time_is_named(tmp_path: Path) -> None:
    found = judged(
        tmp_path,
        attempts(
            ("NODE_FAIL", 1, 2, "gpu[01-02]"), ("NODE_FAIL", 3, 4, "gpu[01-02]"), ("COMPLETED", 5, 9, "gpu[03-04]")
        ),
    )
    assert (found.loop, found.cause) == ("training", "failures") and "gpu[01-02]" in found.headline
    assert "--exclude=gpu[01-02]" in found.levers[0].action and found.levers[0].at_most == pytest.approx(8 / 6)


@pytest.mark.parametrize(
    ("state", "cause", "action"),
    [
        ("OUT_OF_MEMORY", "memory_pressure", "--mem"),
        ("PREEMPTED", "failures", "train.save_every"),
        ("FAILED", "failures", "log"),
    ],
)
def test_repeated_ends(tmp_path: Path, state: str, cause: str, action: str) -> None:
    found = judged(tmp_path, attempts((state, 1, 2, "a"), (state, 2, 3, "a"), ("RUNNING", 3, 4, "a")))
    assert found.cause == cause and action in found.levers[0].action


def test_one_failure_is_no_pattern(tmp_path: Path) -> None:
    found = judged(tmp_path, attempts(("FAILED", 1, 2, "a"), ("COMPLETED", 2, 9, "a")))
    assert found.cause is None and found.judged


def test_a_job_that_never_started(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no attempt"):
        judged(tmp_path, HEAD + "42|PENDING|Unknown|Unknown|None assigned\n")


def events(*reasons: tuple[str, int]) -> str:
    items = [
        {"reason": name, "count": count, "involvedObject": {"kind": "Pod", "name": "job-0"}} for name, count in reasons
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=1)


def test_events_of_kubernetes(tmp_path: Path) -> None:
    assert judged(tmp_path, events(("Scheduled", 1), ("OOMKilling", 3), ("BackOff", 2))).cause == "memory_pressure"
    waiting = judged(tmp_path, events(("FailedScheduling", 12)))
    assert waiting.cause == "failures" and "no node had a place" in waiting.headline
    assert judged(tmp_path, events(("Scheduled", 1), ("Started", 1))).cause is None
