"""Profile: where the time of a program's steps went, from any source; torch-free, and stored as JSON.

The budget says where the wall time of the steps went, in seconds that add up to it; rows compare operators and
kernels with the measured roofline; gaps say when the device was idle, and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from armillary.errors import BadInput
from armillary.spec.toml.fields import build, to_plain

BUDGET = {
    "useful": "work at the speed of the roofline",
    "inefficiency": "kernel time beyond what the roofline allows",
    "unjudged": "device time that cannot be judged: no ceiling, no model of the work, or work that the trace lacks",
    "comm_exposed": "communication with no computation beside it",
    "launch_gap": "device idle because the next launch came late",
    "host": "device idle while Python or the loader ran",
    "sync": "synchronisation and copies between host and device",
    "idle": "device idle for another known reason",
    "unknown": "what could not be attributed",
}
"""parts of a step's wall time, in the order they are shown; each is the gauge NAME_fraction"""

Bound = Literal["compute", "memory", "overhead", "unknown"]
Cause = Literal["launch", "loader", "gil", "sync", "copy", "collective", "host", "unrecorded", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operator or one kernel, all its calls together; FLOPs, bytes and the least time for them where a model of
    its work exists."""

    name: str
    kind: Literal["operator", "kernel"]
    work: str = "other"
    """class: gemm, attention, conv, norm, elementwise, softmax, embedding, optimizer, copy, collective or other"""
    calls: int
    device_s: float = 0.0
    cpu_s: float = 0.0
    """time on the host without children, of all calls"""
    flops: float | None = None
    bytes: float | None = None
    roofline_s: float | None = None
    bound: Bound = "unknown"
    """which side of the roofline limits it; overhead: too short for either"""
    module: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """occupancy, registers, shared memory, grid … where the trace has them"""

    @property
    def seconds(self) -> float:
        return self.device_s or self.cpu_s

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.flops is not None and self.bytes else None

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.seconds if self.flops is not None and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes is not None and self.seconds else None

    @property
    def roofline_fraction(self) -> float | None:
        """Least time on the roofline over time taken."""
        return self.roofline_s / self.seconds if self.roofline_s is not None and self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Gap:
    """An interval in which the device was idle, from the beginning of the window; file:line where the trace has
    stacks."""

    start_s: float
    seconds: float
    cause: Cause
    what: str = ""
    """the host's event that ran longest in it"""
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryTimeline:
    """Memory in use over the window, and by what at the peak."""

    times_s: tuple[float, ...]
    bytes: tuple[float, ...]
    peak_bytes: float
    peak_s: float
    by_category: Mapping[str, float] = field(default_factory=dict)
    """at the peak: weights, gradients, optimizer, activations, other"""
    by_module: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The ceilings a profile is compared with: FLOP/s by dtype, memory traffic, and the cost of one launch."""

    device: str
    flops: Mapping[str, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    launch_s: float | None = None
    source: Literal["measured", "catalogue", "unknown"] = "unknown"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a number of steps went; rows and gaps are sorted, the longest first."""

    source: str
    """the trace, script or recipe it was made from"""
    device: str
    """what ran it: cuda or cpu, and its name where known"""
    wall_s: float
    steps: int = 1
    budget: Mapping[str, float]
    """part of BUDGET -> seconds; they add up to wall_s"""
    rows: tuple[Row, ...] = ()
    gaps: tuple[Gap, ...] = ()
    memory: MemoryTimeline | None = None
    roofline: Roofline
    findings: tuple[str, ...] = ()
    """what to look at first, in plain words, the largest gain first"""
    notes: tuple[str, ...] = ()
    """what the trace lacks or what was assumed"""

    def __post_init__(self) -> None:
        unknown = set(self.budget) - set(BUDGET)
        if unknown:
            raise BadInput(f"no part of a budget: {', '.join(sorted(unknown))}; parts are {', '.join(BUDGET)}")

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps

    def fraction(self, part: str) -> float:
        return self.budget.get(part, 0.0) / self.wall_s if self.wall_s else 0.0

    @property
    def kernels(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == "kernel")

    @property
    def operators(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == "operator")

    def to_json(self) -> str:
        return json.dumps(to_plain(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "profile.json") -> Profile:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{where} is not JSON ({error}); profile again") from None
        if not isinstance(values, dict) or "budget" not in values:
            raise BadInput(f"{where} holds no profile; make one with armillary profile")
        return build(Profile, _current_keys(values), where)


def _current_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Profiles written before the fields `roof` and `roof_s` were called roofline and roofline_s."""
    if "roof" in values:
        values["roofline"] = values.pop("roof")
    for row in values.get("rows", ()):
        if "roof_s" in row:
            row["roofline_s"] = row.pop("roof_s")
    return values
