"""Findings of a profile in plain words, each with the speedup if what it names cost nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from armillary.profiling.analysis.amdahl import speedup
from armillary.profiling.analysis.idle_gaps import gil_waits
from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.analysis.step_budget import Budget
from armillary.profiling.profile import Cause, Gap, Profile, Row
from armillary.profiling.trace.event_classes import short_name
from armillary.profiling.trace.trace import Array
from armillary.units import seconds_text

_WORTH = 0.03
"""share of the time below which a finding is left out"""
_NEARLY_ALL = 0.95
_SHORT_S = 50e-6
"""kernels below this are too short for the host to keep ahead of"""
_MEMORY_BOUND = 0.1
"""share of the memory roofline from which a chain is memory-bound, and fusing it helps"""
_LARGE = 0.3
"""share of the time from which a kernel is named even near its roofline"""
_MAX_KERNELS_NAMED = 4


@dataclass(frozen=True)
class Finding:
    """One thing that costs time: the share of the wall time that it would save, and on which condition."""

    saves: float
    text: str
    hope: str = "without it"

    def line(self) -> str:
        if self.saves > _NEARLY_ALL:
            return f"{self.text}: it is nearly all of the time"
        return f"{self.text}: at most {speedup(self.saves, float('inf')):.2f} × faster {self.hope}"


def findings(profile: Profile, attribution: Attribution, spent: Budget) -> Profile:
    """The profile with its findings, the largest gain first."""
    candidates = [
        *_launches(profile),
        *_causes(profile, attribution, spent),
        *_kernels(profile),
        *_tiny(profile),
    ]
    ranked = sorted((finding for finding in candidates if finding.saves >= _WORTH), key=lambda finding: -finding.saves)
    return replace(profile, findings=tuple(finding.line() for finding in ranked) or (_nothing(profile),))


def _nothing(profile: Profile) -> str:
    if profile.fraction("unjudged") > profile.fraction("useful"):
        return f"nothing stands out; {profile.fraction('unjudged'):.0%} of the time is kernels that cannot be judged"
    return f"nothing stands out: {profile.fraction('useful'):.0%} of the time is work at the roofline"


def _launches(profile: Profile) -> Iterator[Finding]:
    share = profile.fraction("launch_gap")
    rows = profile.kernels or profile.operators
    calls = sum(row.calls for row in rows)
    if not calls:
        return
    lengths: Array = np.repeat([row.seconds / row.calls for row in rows], [row.calls for row in rows])
    what = "kernels" if profile.kernels else "operators"
    median = float(np.median(lengths))
    many = f"{calls / profile.steps:,.0f} {what} per step, {seconds_text(median)} median"
    bound = "launch-bound" if median < _SHORT_S else "launched too late though long"
    yield Finding(share, f"{many}, {bound}; torch.compile or CUDA graphs join them")


_SAY: dict[Cause, str] = {
    "loader": "the loader starves the device {time} per step{where}; more workers, prefetching or pinned memory",
    "sync": "{what}{where} blocks {time} per step; read the value later or less often",
    "copy": "copies between host and device take {time} per step alone{where}; {copying}",
    "collective": "communication stands alone {time} per step{where}; overlap it with computation or send less",
    "gil": "Python threads fight for the interpreter lock {time} per step{where}; move the busy thread to a process",
    "unrecorded": "the device is busy {time} per step with work that the trace does not have; record all of it",
    "host": "Python holds the device up {time} per step{where} ({what}); move that work off the critical path",
}


def _causes(profile: Profile, attribution: Attribution, spent: Budget) -> Iterator[Finding]:
    """One finding per cause, with the source line that cost most."""
    seconds: dict[Cause, float] = {}
    gil = gil_waits(spent.stretches, attribution.host)
    pageable = any("Pageable" in name for name in attribution.trace.names)
    copying = "pin the memory and copy with non_blocking" if pageable else "overlap them with kernels, or copy less"
    for stretch in spent.stretches:
        for (part, cause), length in stretch.causes.items():
            seconds[cause] = seconds.get(cause, 0.0) + length * spent.scale.get(part, 1.0)
    if gil:
        seconds["gil"] = seconds.pop("host", 0.0)
    for cause, total in seconds.items():
        if cause in _SAY:
            worst = _worst(profile.gaps, cause)
            where = f" at {worst.where}" if worst and worst.where else ""
            text = _SAY[cause].format(
                time=seconds_text(total / profile.steps), where=where, what=_what(worst, cause), copying=copying
            )
            yield Finding(total / profile.wall_s, text)


def _worst(gaps: tuple[Gap, ...], cause: Cause) -> Gap | None:
    """The place with the largest total, represented by its longest gap."""
    of_cause = [gap for gap in gaps if gap.cause == cause]
    places: dict[tuple[str, str], float] = {}
    for gap in of_cause:
        places[(gap.what, gap.where)] = places.get((gap.what, gap.where), 0.0) + gap.seconds
    return max(of_cause, key=lambda gap: (places[(gap.what, gap.where)], gap.seconds), default=None)


def _what(gap: Gap | None, cause: Cause) -> str:
    if gap is None or not gap.what:
        return "a synchronisation" if cause == "sync" else "Python"
    return ".item()" if gap.what in ("aten::item", "aten::_local_scalar_dense") else gap.what


def _kernels(profile: Profile) -> Iterator[Finding]:
    """Kernels far from their roofline, and chains of small memory-bound ones that fusing would join."""
    rows = profile.kernels or tuple(row for row in profile.operators if row.device_s)
    for row in rows[:_MAX_KERNELS_NAMED]:
        if row.seconds and row.work != "collective" and row.bound != "overhead":
            yield _kernel(row, profile.wall_s)
    chain = [row for row in rows if row.bound == "memory" and row.work in ("elementwise", "norm", "copy", "softmax")]
    seconds, calls = sum(row.seconds for row in chain), sum(row.calls for row in chain)
    achieved = sum(min(row.roofline_s or 0.0, row.seconds) for row in chain) / seconds if seconds else 0.0
    if calls > 1 and achieved > _MEMORY_BOUND:
        count = f"{calls / profile.steps:,.0f}"
        text = f"{count} memory-bound operations per step read and write the same data repeatedly; fuse them"
        yield Finding(seconds / profile.wall_s * (1 - 1 / max(2, min(calls / profile.steps, 4))), text)


def _tiny(profile: Profile) -> Iterator[Finding]:
    """Kernels too short for any roofline: each takes little time, and inside a CUDA graph no launch is to blame."""
    rows = [row for row in profile.kernels if row.bound == "overhead"]
    calls, seconds = sum(row.calls for row in rows), sum(row.seconds for row in rows)
    if calls:
        lost = sum(max(0.0, row.seconds - (row.roofline_s or 0.0)) for row in rows) / profile.wall_s
        each = seconds_text(seconds / calls)
        yield Finding(
            lost,
            f"{calls / profile.steps:,.0f} kernels per step are too short for any roofline ({each} each) and "
            f"take {seconds / profile.wall_s:.0%} of the time; fuse them",
        )


def _kernel(row: Row, wall_s: float) -> Finding:
    """Far below its roofline, a kernel can gain the distance; near it or unjudged, only a faster kernel helps."""
    share = row.seconds / wall_s
    text = f"{short_name(row.name)} ({row.work}) takes {share:.0%} of the time"
    if row.roofline_s is None:
        least = share / 2 if share >= _LARGE else 0.0
        return Finding(least, f"{text}, and its least time is not known", "if it ran twice as fast")
    achieved = f"{min(1.0, row.roofline_fraction or 0.0):.0%} of the {row.bound} roofline"
    lost = max(0.0, row.seconds - row.roofline_s) / wall_s
    if share >= _LARGE and lost < share / 2:
        less = "a narrower dtype or less of it" if row.bound == "compute" else "fewer bytes: fuse or narrow it"
        return Finding(share / 2, f"{text} at {achieved}: only {less} helps", "if it ran twice as fast")
    return Finding(lost, f"{text} at {achieved}")
