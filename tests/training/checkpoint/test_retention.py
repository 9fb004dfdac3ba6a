"""Which checkpoints stay: hand-made lists, no files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from armillary.spec.tables.train import TrainJob
from armillary.training.checkpoint.interval import SaveClock
from armillary.training.checkpoint.retention import Entry, Policy, reasons, removable


def steps(*numbers: int) -> list[Entry]:
    return [Entry(step=number) for number in numbers]


def test_the_newest_stay() -> None:
    assert removable(steps(10, 20, 30, 40), Policy(last=2)) == [10, 20]
    assert removable(steps(10, 20, 30, 40), Policy(last=0)) == []


def test_every_kth_the_best_and_milestones_stay_as_well() -> None:
    losses = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.7, 50: 2.8, 60: 2.9}
    entries = [Entry(step=step, val_loss=loss) for step, loss in losses.items()]
    policy = Policy(last=1, interval=40, best=1, milestones={"first": 10})
    assert removable(entries, policy) == [30, 50]
    assert reasons(entries, policy) == {10: "first", 20: "best", 40: "every 40", 60: "last"}


def test_a_kept_delta_keeps_its_base() -> None:
    entries = [
        Entry(step=10),
        Entry(step=20, base=10),
        Entry(step=30),
        Entry(step=40, base=30),
        Entry(step=50, base=30),
    ]
    assert removable(entries, Policy(last=1)) == [10, 20, 40]
    assert removable(entries, Policy(last=1, best=0, milestones={"a": 20})) == [40]


def test_what_is_incomplete_counts_for_nothing() -> None:
    entries = [Entry(step=10), Entry(step=20), Entry(step=30, complete=False)]
    assert removable(entries, Policy(last=1)) == [10, 30]
    assert removable(entries, Policy(last=1), newest=30) == [], "the one just written is not good"
    assert removable([Entry(step=10, complete=False)], Policy(last=1)) == []


@given(
    entries=st.lists(
        st.builds(
            Entry,
            step=st.integers(1, 50),
            complete=st.booleans(),
            val_loss=st.none() | st.floats(0, 9),
            base=st.none() | st.integers(1, 50),
        ),
        unique_by=lambda entry: entry.step,
    ),
    policy=st.builds(Policy, last=st.integers(0, 4), interval=st.integers(0, 5), best=st.integers(0, 3)),
)
def test_the_newest_good_one_and_bases_never_go(entries: list[Entry], policy: Policy) -> None:
    gone = set(removable(entries, policy))
    good = [entry for entry in entries if entry.complete]
    if good:
        assert max(entry.step for entry in good) not in gone
    for entry in good:
        if entry.step not in gone and entry.base is not None:
            assert entry.base not in gone


def test_a_milestone_is_written_whatever_the_interval() -> None:
    clock = SaveClock(TrainJob(save_every=4, milestones={"early": 3}), None)
    assert [step + 1 for step in range(9) if clock.is_due(step)] == [3, 4, 8]
    clock = SaveClock(TrainJob(milestones={"early": 3}), 1.0)
    assert [step + 1 for step in range(9) if clock.is_due(step)] == [3]
