"""Traces are read from anywhere, and what is no whole trace is refused in one line."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from armillary.errors import ArmillaryError, BadData
from armillary.profiling.analysis.analyse import analyse
from armillary.profiling.analysis.roofline_attribution import attribute_work
from armillary.profiling.trace import chrome_json as chrome
from armillary.profiling.trace.read_trace import read_trace
from armillary.profiling.trace.trace import KERNEL, OP, RUNTIME
from tests.profiling.traces import ROOFLINE, HandMade


def example() -> HandMade:
    made = HandMade().step(100).op("aten::mm", 10, 20, [4, 8], [8, 2])
    return made.kernel("sgemm", launched=15, at=40, takes=30, grid=[1, 2, 3])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_plain_and_gzipped_are_the_same(tmp_path: Path, name: str) -> None:
    trace = read_trace(example().write(tmp_path / name))
    assert len(trace) == 4
    kernel = int(np.flatnonzero(trace.kind == KERNEL)[0])
    assert (trace.name_of(kernel), trace.details[trace.detail[kernel]]) == ("sgemm", {"grid": [1, 2, 3]})
    assert trace.start[kernel] == pytest.approx(40e-6) and trace.seconds[kernel] == pytest.approx(30e-6)
    op = int(np.flatnonzero(trace.kind == OP)[0])
    assert trace.signatures[trace.signature[op]].dims == ((4, 8), (8, 2))


def test_a_bare_list_and_a_window_smaller_than_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "_CHUNK", 7)
    path = tmp_path / "list.json"
    path.write_text(json.dumps(example().events, indent=2))
    assert len(read_trace(path)) == 4


def test_lists_of_objects_inside_events_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where events are read many at a time, the cut must not fall into one of them."""
    made = example()
    for i in range(200):
        made.add("cpu_op", "aten::odd", i, 1, inside=[{"a": "}, {"}, {"b": i}])
    whole = len(read_trace(made.write(tmp_path / "whole.json")))
    for size in (100, 1_000, 10_000):
        monkeypatch.setattr(chrome, "_CHUNK", size)
        assert len(read_trace(made.write(tmp_path / "cut.json"))) == whole


def test_what_stands_after_the_events_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "late.json"
    device = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 5}
    path.write_text(json.dumps({"traceEvents": example().events, "deviceProperties": [device]}))
    trace = read_trace(path)
    assert trace.devices == ("NVIDIA H200",) and trace.device_bytes == (5.0,)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"   \n", "breaks off after 0 events"),
        (b"hello", "not JSON"),
        (b'{"a": 1}', "without traceEvents"),
        (b'{"traceEvents": []}', "holds no operator"),
        (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "holds no operator"),
        (b"[1, 2, 3]", "not of events"),
        (b"42", "not JSON"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur"', "breaks off after 0 events"),
        (b'{"traceEvents": [{"ph": "X"}, {"ph": oops, "a": "' + b"x" * 200 + b'"}]}', "broken after 1 events"),
        (b"\x1f\x8b\x08\x00garbage", "gzip"),
        (b"SQLite format 3\x00garbage", "SQLite"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(ArmillaryError, match=says) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_trace_says_how_far_it_went(tmp_path: Path, packed: bool) -> None:
    text = example().text().encode()
    cut = gzip.compress(text)[:-12] if packed else text[:-80]
    path = tmp_path / "cut.json"
    path.write_bytes(cut)
    with pytest.raises(ArmillaryError, match=r"breaks off after \d events; record it again"):
        read_trace(path)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ArmillaryError):
            read_trace(path)


def test_odd_values_do_not_stop_the_reading(tmp_path: Path) -> None:
    made = example().add("cpu_op", "aten::odd", 1, 1, **{"Input Dims": "none", "External id": "x"})
    made.events += [
        {"ph": "X", "cat": "cpu_op", "name": "no time"},
        {"ph": "X", "cat": 3, "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "no args", "ts": 3, "dur": -5, "pid": "x"},
    ]
    assert len(read_trace(made.write(tmp_path / "odd.json"))) == 6


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("ts", "late"),
        ("ts", float("inf")),
        ("ts", 1e300),
        ("dur", float("nan")),
        ("args", []),
        ("args", {"bytes": "x", "Input Dims": [[2]], "Input type": 3, "Concrete Inputs": 7}),
        ("pid", None),
    ],
)
@pytest.mark.parametrize("category", ["cpu_op", "kernel", "gpu_memcpy"])
def test_hostile_fields_are_no_bugs(tmp_path: Path, category: str, where: str, value: object) -> None:
    made = example()
    made.events.insert(
        0, {"ph": "X", "cat": category, "name": "hostile", "pid": 1, "tid": 1, "ts": 5, "dur": 2, where: value}
    )
    made.events.append({"ph": "i", "name": "[memory]", "ts": "x", "args": value})
    profile = analyse(made.write(tmp_path / "hostile.json"), roofline=ROOFLINE)
    assert sum(profile.budget.values()) == pytest.approx(profile.wall_s)


def test_a_trace_nested_beyond_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"traceEvents": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ArmillaryError):
        read_trace(path)


def nsys(path: Path, more: str = "") -> Path:
    base = sqlite3.connect(path)
    base.executescript(
        """
        create table StringIds (id integer, value text);
        insert into StringIds values (1, 'cudaLaunchKernel_v7000'), (2, 'sgemm');
        create table CUPTI_ACTIVITY_KIND_RUNTIME (start, end, nameId, correlationId, globalTid);
        insert into CUPTI_ACTIVITY_KIND_RUNTIME values (1000, 5000, 1, 9, 281479271743489);
        create table CUPTI_ACTIVITY_KIND_KERNEL (start, end, demangledName, correlationId, deviceId, streamId,
            gridX, gridY, gridZ, blockX, blockY, blockZ, registersPerThread);
        insert into CUPTI_ACTIVITY_KIND_KERNEL values (9000, 19000, 2, 9, 0, 7, 1, 1, 1, 128, 1, 1, 64);
        create table CUPTI_ACTIVITY_KIND_MEMCPY (start, end, copyKind, srcKind, dstKind, bytes, correlationId, deviceId,
            streamId);
        insert into CUPTI_ACTIVITY_KIND_MEMCPY values (20000, 30000, 1, 0, 2, 4096, 10, 0, 7);
        create table NVTX_EVENTS (start, end, text, textId, globalTid);
        insert into NVTX_EVENTS values (500, 6000, 'aten::mm, seq = 3', null, 281479271743489);
    """
        + more
    )
    base.commit()
    base.close()
    return path


def test_nsys_exports_read_like_kineto(tmp_path: Path) -> None:
    trace = read_trace(nsys(tmp_path / "report.sqlite"))
    assert {trace.name_of(i) for i in range(len(trace))} == {
        "cudaLaunchKernel",
        "sgemm",
        "aten::mm",
        "Memcpy HtoD (Pageable)",
    }
    call, kernel = (int(np.flatnonzero(trace.kind == kind)[0]) for kind in (RUNTIME, KERNEL))
    assert trace.correlation[call] == trace.correlation[kernel] == 9
    assert trace.details[trace.detail[kernel]]["registers"] == 64


def test_an_nsys_graph_is_one_piece_of_work(tmp_path: Path) -> None:
    more = """
        create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, deviceId, streamId, graphId, correlationId);
        insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (40000, 90000, 0, 7, 1, 11);
        insert into StringIds values (3, 'cudaGraphLaunch_v10000');
        insert into CUPTI_ACTIVITY_KIND_RUNTIME values (31000, 38000, 3, 11, 281479271743489);
    """
    profile = analyse(nsys(tmp_path / "report.sqlite", more), roofline=ROOFLINE)
    assert next(row for row in profile.kernels if row.name == "CUDA graph").device_s == pytest.approx(50e-6)
    assert profile.fraction("unjudged") > 0.5


def test_nsys_processes_count_for_themselves(tmp_path: Path) -> None:
    first, second = (281479271743489 + (n << 24) for n in (0, 1))
    more = f"""
        alter table CUPTI_ACTIVITY_KIND_KERNEL add column globalPid;
        update CUPTI_ACTIVITY_KIND_KERNEL set globalPid = {second};
        insert into CUPTI_ACTIVITY_KIND_RUNTIME values (2000, 6000, 1, 9, {second});
    """
    trace = read_trace(nsys(tmp_path / "report.sqlite", more))
    kernel = int(np.flatnonzero(trace.kind == KERNEL)[0])
    links = attribute_work(trace, ROOFLINE).links
    assert trace.start[links.launch[kernel]] == pytest.approx(1.5e-6) and first != second


def test_an_nsys_export_without_a_column_is_refused(tmp_path: Path) -> None:
    path = nsys(tmp_path / "r.sqlite", "alter table CUPTI_ACTIVITY_KIND_KERNEL drop column gridX;")
    with pytest.raises(BadData, match="lacks a column"):
        read_trace(path)


def test_another_sqlite_file_is_refused(tmp_path: Path) -> None:
    base = sqlite3.connect(tmp_path / "other.db")
    base.execute("create table things (a)")
    base.commit()
    base.close()
    with pytest.raises(ArmillaryError, match="no nsys export"):
        read_trace(tmp_path / "other.db")


@pytest.mark.slow
def test_fifty_megabytes_in_little_memory(tmp_path: Path) -> None:
    """Read and analysed in a process of its own, so that the peak is its own."""
    import subprocess
    import sys

    event = json.dumps(
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": "aten::mm",
            "pid": 1,
            "tid": 1,
            "ts": 0,
            "dur": 9,
            "args": {"External id": 1, "Input Dims": [[512, 512], [512, 512]], "Input type": ["float", "float"]},
        }
    )
    path = tmp_path / "big.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for i in range(50_000_000 // len(event)):
            file.write(("," if i else "") + event.replace('"ts": 0', f'"ts": {10 * i}'))
        file.write("]}")
    code = (
        "import resource, sys\n"
        "from armillary.profiling.analysis.analyse import analyse\n"
        "from armillary.profiling.profile import Roofline\n"
        "profile = analyse(sys.argv[1], roofline=Roofline(device='x'))\n"
        "print(profile.rows[0].calls, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    calls, peak = done.stdout.split()
    assert int(calls) == 50_000_000 // len(event) and float(peak) < 4e8
