"""The track record: lines are only added, the first prediction counts, and a broken line costs only itself."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from armillary.diagnosis.outcome.track_record import LoggedPrediction, log_outcome, log_prediction, path_of, read_record
from armillary.errors import ArmillaryError
from armillary.store.home import Home

LEVER = LoggedPrediction(run="a", title="more rows", change={"layout.micro_batch": 4}, predicted=2.0, predicted_at=10.0)


def test_the_first_prediction_is_the_one_that_counts(home: Home) -> None:
    assert log_prediction(home, LEVER) == LEVER
    assert log_prediction(home, replace(LEVER, predicted=1.6, predicted_at=20.0)) == LEVER
    assert log_prediction(home, replace(LEVER, of="memory_peak_bytes")).of == "memory_peak_bytes", "another gauge"
    assert [one.predicted for one in read_record(home).lines] == [2.0, 2.0]
    assert read_record(home).summary == "no lever was measured yet" and read_record(home).median_error is None


def test_what_was_written_stays_as_it_was(home: Home) -> None:
    log_prediction(home, LEVER)
    before = path_of(home).read_bytes()
    log_outcome(home, replace(LEVER, obtained=1.6, by="b"))
    log_outcome(home, replace(LEVER, obtained=1.6, by="b"))
    log_outcome(home, replace(LEVER, obtained=1.8, by="b"))  # run b went on meanwhile
    log_outcome(home, replace(LEVER, obtained=2.2, by="c"))
    assert path_of(home).read_bytes().startswith(before) and len(read_record(home).lines) == 4
    record = read_record(home)
    assert [(one.by, one.obtained) for one in record.levers] == [("b", 1.8), ("c", 2.2)]
    assert record.summary == "2 levers, median error 10%" and record.median_error == pytest.approx(0.1)


@pytest.mark.parametrize(
    "broken",
    [
        b"{broken",
        b"[]",
        b"7",
        b'{"run": "a"}',
        b'{"run":"a","title":"x","predicted":0,"predicted_at":1}',
        b"\xff\xfe",
        b'{"run":"a","title":"x","predicted":"nan","predicted_at":1}',
        b'{"from": "a later version"}',
        b"[" * 100_000,
    ],
)
def test_a_broken_line_is_left_out_and_named(home: Home, broken: bytes) -> None:
    log_prediction(home, LEVER)
    with path_of(home).open("ab") as file:
        file.write(broken)  # and no end of line: its writer was killed
    log_outcome(home, replace(LEVER, obtained=1.6, by="b"))
    record = read_record(home)
    assert [one.obtained for one in record.lines] == [None, 1.6]
    assert record.notes == (f"line 2 of {path_of(home)} is broken and left out; delete it",)


def test_a_place_that_cannot_be_written_is_one_line(home: Home) -> None:
    os.makedirs(path_of(home))
    assert read_record(home).lines == ()
    with pytest.raises(ArmillaryError, match=r"cannot write .*track-record.jsonl"):
        log_prediction(home, LEVER)
