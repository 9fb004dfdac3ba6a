"""The goodput account: hand-made runs, and any sequence of events sums to the time that passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.store.goodput import JOB_PARTS, PARTS, account_of, account_of_run
from armillary.store.home import Home
from armillary.store.run_events import EVENTS, NAME, RunEvent, add_event, read_events
from armillary.store.runs import create_run


def events(*rows: tuple[float, Any] | tuple[float, Any, dict[str, float]]) -> list[RunEvent]:
    return [RunEvent(time=row[0], event=row[1], more=row[2] if len(row) > 2 else {}) for row in rows]


def spent(rows: list[RunEvent], **how: Any) -> dict[str, Any]:
    account = account_of(rows, **how)
    return {part: pytest.approx(seconds) for part, seconds in account.seconds.items() if seconds}


HEALTHY = events(
    (0, "created"),
    (2, "loading"),
    (10, "steps", {"step": 0}),
    (20, "steps", {"step": 10, "data_wait_s": 1.0, "logging_s": 2.0}),
    (30, "validation", {"step": 20}),
    (33, "steps", {"step": 20}),
    (43, "saving", {"step": 30}),
    (45, "exporting", {"step": 30}),
    (46, "finished", {"step": 30}),
)


def test_a_healthy_run() -> None:
    account = account_of(HEALTHY)
    assert spent(HEALTHY) == {
        "loading": 10,
        "useful": 28,
        "logging": 2,
        "validation": 3,
        "saving": 2,
        "exporting": 1,
    }
    assert account.goodput_fraction == pytest.approx(28 / 46) and account.data_wait_s == 1.0
    assert (account.num_saves, account.save_s, account.num_failures, account.mtbf_s) == (1, 2, 0, None)
    shares = {name: share for name, share, _ in account.amdahl()}
    assert sum(shares.values()) == pytest.approx(1) and shares["data preparation"] == pytest.approx(1 / 46)
    assert shares == pytest.approx(
        {"steps": 27 / 46, "I/O": 13 / 46, "validation": 3 / 46, "logging": 2 / 46, "data preparation": 1 / 46}
    )
    name, share, speedup = account.amdahl()[1]
    assert name == "I/O" and speedup == pytest.approx(46 / 33) == pytest.approx(1 / (1 - share))


def test_every_part_is_in_the_table_of_the_whole_job() -> None:
    assert sorted(part for parts in JOB_PARTS.values() for part in parts) == sorted({*PARTS} - {"useful", "idle"})


def test_steps_after_the_last_checkpoint_are_repeated() -> None:
    killed = [
        *HEALTHY[:4],
        *events(
            (30, "saving", {"step": 20}),
            (31, "steps", {"step": 20}),
            (41, "steps", {"step": 30}),
            (44, "failed"),
            (45, "restarting"),
            (50, "loading"),
            (55, "steps", {"step": 20}),
            (65, "steps", {"step": 30}),
        ),
    ]
    account = account_of(killed)
    assert spent(killed) == {
        "loading": 15,
        "useful": 28,
        "logging": 2,
        "saving": 1,
        "repeated": 13,
        "restarting": 6,
    }
    assert (account.num_failures, account.restart_s, account.mtbf_s) == (1, 11, 65)


def test_a_step_span_is_split_where_the_run_resumed() -> None:
    begun = events((0, "steps", {"step": 0}), (10, "steps", {"step": 10}), (10, "failed"))
    assert spent([*begun, *events((10, "restarting"), (10, "steps", {"step": 4}))]) == {"useful": 4, "repeated": 6}


def test_what_survivors_write_after_a_failure_is_no_progress() -> None:
    """The launcher has seen a rank die; the main rank ends a save, and is then ended."""
    rows = events((0, "steps", {"step": 0}), (10, "saving", {"step": 10}), (11, "failed"), (12, "steps", {"step": 10}))
    rows += events((14, "restarting"), (20, "loading"), (22, "steps", {"step": 10}))
    account = account_of(rows)
    assert spent(rows) == {"useful": 10, "saving": 1, "restarting": 9, "loading": 2}
    assert (account.num_failures, account.restart_s) == (1, 11)
    nodes = [*rows[:4], *events((14, "waiting"), (18, "restarting"), (20, "loading"), (22, "steps", {"step": 10}))]
    assert spent(nodes) == {"useful": 10, "saving": 1, "restarting": 5, "waiting": 4, "loading": 2}
    assert account_of(nodes).num_failures == 1


def test_a_run_that_died_unseen_is_idle_from_when_it_was_last_alive() -> None:
    rows = [*HEALTHY[:4], *events((100, "resumed", {"seen": 25}), (104, "loading"), (105, "steps", {"step": 10}))]
    assert spent(rows) == {"loading": 15, "useful": 8, "logging": 2, "repeated": 5, "idle": 75}
    assert account_of(rows).num_failures == 1 and account_of(rows).restart_s == 5
    assert spent(HEALTHY[:4], now=30.0, died=True)["repeated"] == 10
    assert spent(HEALTHY[:4], now=30.0)["useful"] == 18


def test_a_stopped_run_is_idle_until_it_is_resumed_and_counts_no_failure() -> None:
    rows = events((0, "steps", {"step": 0}), (5, "stopped", {"step": 5}), (60, "resumed", {"seen": 6}), (61, "loading"))
    assert spent(rows) == {"useful": 5, "idle": 55, "loading": 1} and account_of(rows).num_failures == 0
    assert spent(rows[:2], now=1000.0) == {"useful": 5}, "one that ended does not go on"


def test_preparation_reaches_back() -> None:
    rows = events((100, "created", {"preparing_s": 40}), (101, "loading"), (105, "failed"))
    assert spent(rows) == {"preparing": 40, "loading": 5}
    rows += events((200, "resumed", {"preparing_s": 20, "seen": 105}), (201, "stopped"))
    assert spent(rows) == {"preparing": 60, "loading": 6, "idle": 75} and account_of(rows).num_failures == 1


def state_after(made: list[RunEvent]) -> str:
    """The last event, but for what a surviving rank still wrote after a failure."""
    state = ""
    for event in made:
        if state != "failed" or event.event not in ("steps", "validation", "saving", "exporting"):
            state = event.event
    return state


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6),
            st.sampled_from(EVENTS),
            st.fixed_dictionaries(
                {},
                optional={
                    "step": st.integers(0, 50),
                    "seen": st.floats(-10, 1e6),
                    "preparing_s": st.floats(-1, 100),
                    "logging_s": st.floats(-1, 1e3),
                    "data_wait_s": st.floats(-1, 1e3),
                },
            ),
        ),
        min_size=1,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_sequence_of_events_sums_to_the_time_that_passed(
    rows: list[tuple[float, Any, dict[str, float]]], live: bool, died: bool
) -> None:
    made = events(*rows)
    first = made[0].time - max(0.0, made[0].number("preparing_s"))
    last = max(event.time for event in made)
    end = last + 7.0 if live and state_after(made) not in ("failed", "stopped", "finished") else last
    account = account_of(made, now=end if end > last else None, died=died)
    assert account.total_s == pytest.approx(end - first, abs=1e-3)
    assert all(seconds >= -1e-9 for seconds in account.seconds.values())
    assert sum(account.share(part) for part in account.seconds) == pytest.approx(1 if account.total_s else 0)
    assert 0 <= account.data_wait_s <= account.seconds["useful"] + 1e-6


def test_a_torn_line_and_an_unknown_event_are_ignored(tmp_path: Path) -> None:
    add_event(tmp_path, "created", now=1.0)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"time": 2.0, "event": "pause')
    add_event(tmp_path, "loading", now=3.0)
    with (tmp_path / NAME).open("ab") as file:
        file.write(b'{"time": 4.0, "event": "of a later version"}\n{"time": 5')
    assert [(event.time, event.event) for event in read_events(tmp_path)] == [(1.0, "created"), (3.0, "loading")]


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    add_event(tmp_path / "missing", "created")
    assert read_events(tmp_path / "missing") == []


def test_a_run_as_it_stands(home: Home) -> None:
    run = create_run(home, {})
    assert account_of_run(run, now=0.0) is None
    add_event(run.folder, "created", now=10.0)
    live = account_of_run(run, now=12.0)
    assert live is not None and live.seconds["loading"] == 2.0
    run.update(state="interrupted")
    stopped = account_of_run(run, now=99.0)
    assert stopped is not None and stopped.total_s == 0.0


def test_an_elastic_run_that_waits_for_nodes_has_failed_once() -> None:
    start = ((0, "loading"), (10, "steps"), (20, "failed"), (21, "restarting"))
    account = account_of(events(*start, (22, "waiting"), (30, "restarting"), (35, "loading"), (40, "steps")))
    assert account.num_failures == 1
    assert (account.seconds["waiting"], account.seconds["restarting"]) == (8, 7)
