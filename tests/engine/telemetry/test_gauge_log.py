"""A server's records are bounded: steps sampled, old ones cut off, and the engine never waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.engine.telemetry.gauges import GaugeLog
from armillary.errors import BadData
from armillary.store.gauges import GaugeWriter, read_gauges


def test_every_request_and_some_steps(tmp_path: Path) -> None:
    path = tmp_path / "gauges.jsonl"
    made = GaugeLog(GaugeWriter(path), first=10)
    made.step_interval = 7
    for step in range(1, 101):
        made.record({"running": step}, step=step)
        made.record({"tokens_out": 3}, request=str(step))
    made.close()
    records = list(read_gauges(path))
    steps = [record["step"] for record in records if "step" in record]
    assert steps[:10] == list(range(1, 11)) and steps[10:] == [step for step in range(11, 101) if not step % 7]
    stands_for = [record["recorded_steps"] for record in records if "step" in record]
    assert stands_for[:11] == [1] * 10 + [4] and set(stands_for[11:]) == {7}
    assert [record["request"] for record in records if "request" in record] == [str(step) for step in range(1, 101)]


def test_a_quick_engine_is_sampled_more_thinly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("armillary.engine.telemetry.gauges.time.monotonic", lambda: now[0])
    made = GaugeLog(GaugeWriter(tmp_path / "gauges.jsonl"), per_second=50)
    for step in range(1, 2001):
        now[0] += 0.001  # a thousand steps a second
        made.record({"running": 1}, step=step)
    assert made.step_interval == 20
    made.close()


def test_the_file_is_cut_to_its_later_half_at_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "gauges.jsonl"
    made = GaugeLog(GaugeWriter(path), most_bytes=4000)
    made.record({"calibration_step_s": 0.5})
    for step in range(500):
        made.record({"running": step}, request=str(step))
    made.close()
    records = list(read_gauges(path))
    lasting = [one["calibration_step_s"] for one in records if "request" not in one]
    assert set(lasting) == {0.5} and len(lasting) <= 2, "it is of the whole run, and written again where it was cut off"
    records = [one for one in records if "request" in one]
    numbers = [int(record["request"]) for record in records]
    assert path.stat().st_size <= 4200 and numbers == list(range(numbers[0], 500)) and len(numbers) > 20


def test_a_disk_that_is_full_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gauges.jsonl"
    writer, full = GaugeWriter(path), [True]
    write = writer.write

    def fails(*args: object, **named: object) -> None:
        if full.pop() if full else False:
            raise BadData("the disk is full; make room")
        write(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "write", fails)
    made = GaugeLog(writer)
    made.record({"running": 1}, step=1)
    made.record({"running": 2}, step=2)
    made.close()
    assert [record["step"] for record in read_gauges(path)] == [2]
