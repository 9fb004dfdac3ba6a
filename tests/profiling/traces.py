"""Small traces made by hand, in microseconds: `GpuTrace().step(1000).kernel("gemm", launched=10, at=20, takes=500)`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from armillary.profiling.profile import Roofline

MAIN, DEVICE = {"pid": 1, "tid": 1}, {"pid": 0, "tid": 7}
ROOFLINE = Roofline(
    device="test", flops={"fp32": 1e13, "bf16": 1e14}, bytes_per_s=1e12, launch_s=5e-6, source="measured"
)
EXCERPTS = Path(__file__).parent / "data"
"""public traces of other programs; README.md there names source and licence"""


class HandMade:
    """A trace that grows a call at a time."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.correlation = 0

    def add(self, cat: str, name: str, at: float, takes: float, *, tid: int = 1, **args: Any) -> HandMade:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": takes, "args": args}
        )
        return self

    def step(self, until: float, *, at: float = 0, number: int = 1) -> HandMade:
        return self.add("user_annotation", f"ProfilerStep#{number}", at, until - at)

    def op(
        self,
        name: str,
        at: float,
        takes: float,
        *shapes: list[int],
        dtype: str = "float",
        tid: int = 1,
        concrete: list[str] | None = None,
    ) -> HandMade:
        args = {"Input Dims": list(shapes), "Input type": [dtype] * len(shapes), "Concrete Inputs": concrete or []}
        return self.add("cpu_op", name, at, takes, tid=tid, **args)

    def python(self, name: str, at: float, takes: float, *, tid: int = 1) -> HandMade:
        return self.add("python_function", name, at, takes, tid=tid)

    def call(self, name: str, at: float, takes: float, *, tid: int = 1) -> HandMade:
        return self.add("cuda_runtime", name, at, takes, tid=tid)

    def kernel(
        self,
        name: str,
        *,
        launched: float,
        at: float,
        takes: float,
        stream: int = 7,
        call_takes: float = 4,
        cat: str = "kernel",
        call: str = "cudaLaunchKernel",
        tid: int = 1,
        **args: Any,
    ) -> HandMade:
        """A launch on the host and what it started on the device."""
        self.correlation += 1
        self.add("cuda_runtime", call, launched, call_takes, tid=tid, correlation=self.correlation)
        return self.on_device(name, at=at, takes=takes, stream=stream, cat=cat, **args)

    def on_device(
        self, name: str, *, at: float, takes: float, stream: int = 7, cat: str = "kernel", **args: Any
    ) -> HandMade:
        """One more kernel of the last launch: a graph has many."""
        where = {"device": 0, "stream": stream, "correlation": self.correlation}
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": at,
                "dur": takes,
                "args": {**where, **args},
            }
        )
        return self

    def memory(self, at: float, change: int, total: int, address: int, *, device_type: int = 1) -> HandMade:
        args = {"Bytes": change, "Total Allocated": total, "Addr": address, "Device Type": device_type, "Device Id": 0}
        self.events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": at, "s": "t", "args": args})
        return self

    def text(self) -> str:
        return json.dumps({"schemaVersion": 1, "deviceProperties": [], "traceEvents": self.events, "traceName": "made"})

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(self.text().encode()))
        else:
            path.write_text(self.text())
        return path
