"""Excerpts of at most 20 kB of public Kineto traces, written beside this file: python cut_excerpts.py FOLDER.

FOLDER holds the traces of HolisticTraceAnalysis's test data (see README.md). An excerpt keeps operators, CUDA calls,
kernels and copies that begin between two instants. Annotations, flow arrows and arguments that the reader does not use
are left out; nothing is changed or added.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

WINDOWS = {  # name: file, start and length of the window in microseconds from the first event on the device
    "alexnet_start": ("critical_path_alexnet_benchmark_result_2869224_1695835535_trace", 0, 20_000_000),
    "recommender_eight_a100": ("trace_diff_control_control", 230_000, 8_000),
    "recommender_two_v100": ("trace_diff_test_test", 240_000, 5_000),
    "recommender_two_v100_all_to_all": ("trace_diff_test_test", 640_000, 5_000),
}
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
KEPT = ON_DEVICE | {"cpu_op", "cuda_runtime", "cuda_sync"}
KEPT_ARGUMENTS = {
    "correlation",
    "device",
    "stream",
    "bytes",
    "Input Dims",
    "Input type",
    "Sequence number",
    "External id",
}
LARGEST = 20_000
Event = dict[str, Any]


def excerpt(trace: dict[str, Any], start: float, length: float) -> dict[str, Any]:
    """The events of a window; `start` counts from the first event on the device."""
    complete = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in KEPT]
    first = min(event["ts"] for event in complete if event["cat"] in ON_DEVICE) + start
    events = [event for event in complete if first <= event["ts"] < first + length]
    named = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    lean = [_lean(event) for event in sorted(events, key=lambda event: event["ts"])]
    return {key: trace[key] for key in ("schemaVersion", "deviceProperties")} | {"traceEvents": named + lean}


def _lean(event: Event) -> Event:
    arguments = {key: value for key, value in event.get("args", {}).items() if key in KEPT_ARGUMENTS}
    return {**event, "args": arguments}


def main(folder: Path) -> None:
    for name, (file, start, length) in WINDOWS.items():
        with gzip.open(folder / f"{file}.json.gz", "rt") as text:
            found = excerpt(json.load(text), start, length)
        packed = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 9, mtime=0)
        print(f"{name}: {len(found['traceEvents'])} events, {len(packed)} bytes")
        assert len(packed) <= LARGEST, name
        (Path(__file__).parent / f"{name}.json.gz").write_bytes(packed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
