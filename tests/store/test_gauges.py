"""gauges.jsonl: one writer, any reader at any time, and nothing lost to a crash but the record being written."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import ArmillaryError, BadData, BadInput, NotFound
from armillary.store.gauges import GaugeWriter, _records, columns, last_record, read_gauges
from tests.store.victim import kill_at_random, start


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "gauges.jsonl"


def test_records_of_steps_and_requests(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 3.5, "step_s": 0.25}, step=1, now=10.0)
        writer.write({"ttft_s": 0.04}, request="r-7", source="event", now=11.0)
    assert list(read_gauges(path)) == [
        {"time": 10.0, "step": 1, "loss": 3.5, "step_s": 0.25},
        {"time": 11.0, "request": "r-7", "source": "event", "ttft_s": 0.04},
    ]


def test_time_is_now_unless_given(path: Path) -> None:
    before = time.time()
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0}, step=1)
    [record] = read_gauges(path)
    assert before <= record["time"] <= time.time()


def test_each_gauge_may_have_its_own_source(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0, "step_s": 2.0}, step=1, source={"step_s": "event"})
    [record] = read_gauges(path)
    assert record["source"] == {"step_s": "event"}


@given(value=st.floats())
def test_every_float_survives_as_strict_json(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("g") / "gauges.jsonl"
    with GaugeWriter(path) as writer:
        writer.write({"loss": value}, step=0)
        writer.write({"loss": np.float32(1.5)}, step=np.int64(1))  # type: ignore[arg-type]
    first, second = read_gauges(path)
    assert first["loss"] == value or (math.isnan(value) and math.isnan(first["loss"]))
    assert (second["loss"], second["step"]) == (1.5, 1)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_request_id_that_reads_like_a_number_stays_text(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"ttft_s": math.inf}, request="inf")
    [record] = read_gauges(path)
    assert (record["request"], record["ttft_s"]) == ("inf", math.inf)


def test_unknown_gauges_are_refused_with_the_nearest_name_and_nothing_is_written(path: Path) -> None:
    with GaugeWriter(path) as writer, pytest.raises(BadInput, match=r"^no gauge 'los'; did you mean loss\?$"):
        writer.write({"step_s": 1.0, "los": 1.0}, step=1)
    assert list(read_gauges(path)) == []


# --- one writer


def test_a_second_writer_is_refused_until_the_first_is_done(path: Path) -> None:
    with GaugeWriter(path) as first:
        with pytest.raises(BadInput, match=r"gauges\.jsonl is being written by another process; stop that one first"):
            GaugeWriter(path)
        first.write({"loss": 1.0}, step=1)
    with GaugeWriter(path) as second:
        second.write({"loss": 2.0}, step=2)
    assert columns(path, ["loss"]) == {"loss": [1.0, 2.0]}


def test_a_writer_in_another_process_counts_until_it_dies(path: Path) -> None:
    with start(FOREVER, path) as child:
        with pytest.raises(BadInput, match="being written by another process"):
            GaugeWriter(path)
        child.kill()
    GaugeWriter(path).close()


def test_threads_may_share_a_writer(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writers = [
            threading.Thread(target=lambda: [writer.write({"loss": 1.0}, step=i) for i in range(50)]) for _ in range(4)
        ]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
    assert len(list(read_gauges(path))) == 200


# --- crashes


FOREVER = """
import sys
from pathlib import Path
from armillary.store.gauges import GaugeWriter
writer = GaugeWriter(Path(sys.argv[1]))
for step in range(10**9):
    writer.write({"loss": step / 7, "step_s": 0.5}, step=step)
    if step == 0: print("ready", flush=True)
"""


def test_a_killed_writer_costs_no_whole_record(path: Path) -> None:
    kept = 0
    for _ in range(5):
        kill_at_random(FOREVER, path)
        steps = [record["step"] for record in read_gauges(path)]
        assert steps[kept:] == list(range(len(steps) - kept))
        assert len(steps) > kept
        kept = len(steps)
    assert all(record["loss"] == record["step"] / 7 for record in read_gauges(path))


def test_a_torn_line_is_ignored_by_readers_and_cut_off_by_the_next_writer(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0}, step=1)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert len(list(read_gauges(path))) == 1
    with GaugeWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.write({"loss": 2.0}, step=2)
    assert columns(path, ["step"]) == {"step": [1, 2]}


@pytest.mark.parametrize("torn", [b"{", b"x" * 200_000, b"\0" * 70_000])
def test_a_file_that_is_all_torn_starts_anew(path: Path, torn: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(torn)
    assert list(read_gauges(path)) == []
    GaugeWriter(path).close()
    assert path.read_bytes() == b""


def test_a_long_torn_line_after_whole_ones(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"step":1}\n' + b"y" * 150_000)
    GaugeWriter(path).close()
    assert path.read_bytes() == b'{"step":1}\n'


def test_a_disk_that_fills_up_takes_the_record_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0}, step=1)
        whole = path.read_bytes()
        write = os.write

        def half(descriptor: int, data: bytes) -> int:
            monkeypatch.setattr(os, "write", none)
            return write(descriptor, data[: len(data) // 2])

        def none(descriptor: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(ArmillaryError, match=r"^disk full while writing .*gauges\.jsonl; free some space"):
            writer.write({"loss": 2.0}, step=2)
        assert path.read_bytes() == whole
        monkeypatch.setattr(os, "write", write)
        writer.write({"loss": 3.0}, step=3)
    assert columns(path, ["step"]) == {"step": [1, 3]}


# --- reading


def read_since(path: Path, since: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The complete records from byte `since` on, and the offset after them."""
    pairs = list(_records(path, since, False, 0.0, lambda: True))
    return [record for record, _ in pairs], pairs[-1][1] if pairs else since


def test_reading_while_it_is_written_gives_whole_records_in_order(path: Path) -> None:
    with start(FOREVER, path) as child:
        seen, offset, rounds = 0, 0, 0
        while rounds < 30:
            records, offset = read_since(path, offset)
            assert [record["step"] for record in records] == list(range(seen, seen + len(records)))
            seen, rounds = seen + len(records), rounds + 1
        child.kill()
    assert len(list(read_gauges(path))) >= seen > 0


def test_following_waits_for_more_and_ends_when_told(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 0.0}, step=0)
        done = threading.Event()
        follower = read_gauges(path, follow=True, poll_s=0.001, stop=done.is_set)
        assert next(follower)["step"] == 0
        writer.write({"loss": 1.0}, step=1)
        assert next(follower)["step"] == 1
        writer.write({"loss": 2.0}, step=2)
        done.set()
        assert [record["step"] for record in follower] == [2]


def test_reading_goes_on_where_it_stopped(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0}, step=1)
        first, offset = read_since(path)
        assert read_since(path, offset) == ([], offset)
        writer.write({"loss": 2.0}, step=2)
        second, end = read_since(path, offset)
    assert [record["step"] for record in first + second] == [1, 2]
    assert end == path.stat().st_size
    assert [record["step"] for record in read_gauges(path, since=offset)] == [2]


def test_a_run_that_goes_on_cuts_off_the_steps_it_does_again(path: Path) -> None:
    with GaugeWriter(path, step=0) as writer:
        for step in range(5):
            writer.write({"loss": float(step)}, step=step)
    _, offset = read_since(path)
    with GaugeWriter(path, step=3) as writer:
        writer.write({"loss": 3.5, "val_loss": 3.25}, step=3)
    assert columns(path, ["step", "loss"]) == {"step": [0, 1, 2, 3], "loss": [0.0, 1.0, 2.0, 3.5]}
    assert [record["step"] for record in read_since(path, offset)[0]] in ([], [3]), "who had read on is not lost"
    with GaugeWriter(path, step=4) as writer:
        writer.write({"loss": 4.5}, step=4)
    assert columns(path, ["step"])["step"] == [0, 1, 2, 3, 4]
    GaugeWriter(path, step=0).close()
    assert path.read_bytes() == b"" and last_record(path) is None


def test_the_last_record_is_the_last_whole_one(path: Path) -> None:
    assert last_record(path) is None
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0}, step=1, now=0.0)
        writer.write({"loss": 2.0}, step=2, now=0.0)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    assert last_record(path) == {"time": 0.0, "step": 2, "loss": 2.0}


def test_columns_line_up(path: Path) -> None:
    with GaugeWriter(path) as writer:
        writer.write({"loss": 1.0, "step_s": 0.5}, step=1)
        writer.write({"loss": 2.0}, step=2)
        writer.write({"ttft_s": 0.1}, request="r")
    assert columns(path, ["step", "loss", "step_s"]) == {"step": [1, 2], "loss": [1.0, 2.0], "step_s": [0.5, None]}
    with pytest.raises(BadInput, match=r"no gauge 'lost'; did you mean loss\?"):
        columns(path, ["lost"])


def test_a_missing_file_and_a_broken_record(path: Path) -> None:
    with pytest.raises(NotFound, match="no gauges at"):
        list(read_gauges(path))
    path.parent.mkdir()
    path.write_bytes(b'{"step":1}\nnot json\n{"step":2}\n')
    with pytest.raises(BadData, match=r"broken record at byte 11; delete that line to read the rest$"):
        list(read_gauges(path))


def test_former_names_of_gauges_are_read_by_their_current_names(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"time": 1.0, "roof_fraction": 0.5, "source": {"roof_fraction": "trace"}, "step": 3}\n')
    expected = {"time": 1.0, "roofline_fraction": 0.5, "source": {"roofline_fraction": "trace"}, "step": 3}
    assert list(read_gauges(path)) == [expected] and last_record(path) == expected
    with GaugeWriter(path) as writer, pytest.raises(BadInput, match=r"did you mean roofline_fraction\?"):
        writer.write({"roof_fraction": 0.5})
