"""A trace, or a profile made of one, as a Reading: the step budget as gauges.

As in our own runs, the time a step waits for its batch is apart, and the shares of the budget are of the rest.
"""

import json
from pathlib import Path

from armillary.diagnosis.readings.reading import Reading
from armillary.errors import BadData
from armillary.profiling.analysis.kernel_time import KERNEL_PARTS, LONG_STALL_S, launch_bound_s
from armillary.profiling.profile import BUDGET, Gap, Profile
from armillary.spec.gauges import budget_gauge
from armillary.store.home import Home

_HEAD = 4096


def read_profiled(path: Path, home: Home) -> Reading:
    """A trace of torch.profiler or Nsight Systems, or what `armillary profile --json` printed."""
    from armillary.profiling.analysis.analyse import analyse_file

    return reading_of(_written(path) or analyse_file(path, home, source=str(path)), str(path))


def reading_of(profile: Profile, source: str) -> Reading:
    """Where the time of a step went, by gauge name."""
    wait = _waited(profile)
    rest = max(1e-12, profile.wall_s - wait)
    parts = {part: profile.budget.get(part, 0.0) for part in BUDGET}
    parts["host"] = max(0.0, parts["host"] - wait)
    values = {budget_gauge(part): seconds / rest for part, seconds in parts.items()}
    values |= {
        "step_s": profile.step_s,
        "data_wait_s": wait / profile.steps,
        "data_wait_fraction": wait / profile.wall_s if profile.wall_s else 0.0,
        "comm_exposed_s": parts["comm_exposed"] / profile.steps,
    }
    values |= _kernels(profile, rest)
    values["host_stall_fraction"] = _stalled(profile.gaps, rest, parts["host"] + parts["sync"])
    if profile.memory is not None:
        values["memory_peak_bytes"] = profile.memory.peak_bytes
    return Reading(
        source=source,
        kind="profile",
        by="torch-profiler",
        values=values,
        profile=profile,
        settings=_settings(profile),
        notes=profile.notes,
    )


def _waited(profile: Profile) -> float:
    """Seconds in which the device stood still for its loader."""
    waited = sum(gap.seconds for gap in profile.gaps if gap.cause == "loader")
    return min(waited, profile.budget.get("host", 0.0))


def _kernels(profile: Profile, rest: float) -> dict[str, float]:
    """How many, how far from the roofline, and how much of the time follows their number rather than their work."""
    rows = profile.kernels or tuple(row for row in profile.operators if row.device_s)
    judged = sum(profile.budget.get(part, 0.0) for part in ("useful", "inefficiency"))
    worked = sum(profile.budget.get(part, 0.0) for part in KERNEL_PARTS)
    gauges = {"roofline_fraction": profile.budget["useful"] / judged} if judged > 0.5 * worked > 0 else {}
    if profile.kernels:
        gauges["device_busy_fraction"] = min(1.0, worked / profile.wall_s) if profile.wall_s else 0.0
    return gauges | {
        "kernels": sum(row.calls for row in rows) / profile.steps,
        "launch_bound_fraction": min(1.0, launch_bound_s(rows) / rest),
    }


def _stalled(gaps: tuple[Gap, ...], rest: float, most: float) -> float:
    """Share in which the host held the device up for long at a stretch, for another reason than its loader."""
    stalls = (gap for gap in gaps if gap.seconds >= LONG_STALL_S and gap.cause in ("host", "gil", "sync", "copy"))
    return min(sum(gap.seconds for gap in stalls), most) / rest


def _settings(profile: Profile) -> dict[str, str]:
    """Where the worst waits come from, where the trace has lines."""
    settings = {"device": profile.device}
    for cause in ("loader", "sync", "host"):
        worst = max((gap for gap in profile.gaps if gap.cause == cause), key=lambda gap: gap.seconds, default=None)
        if worst is not None and (worst.where or worst.what):
            settings[cause] = worst.where or worst.what
    return settings


def _written(path: Path) -> Profile | None:
    """What --json printed, also with a comparison beside it; None for a trace."""
    with path.open("rb") as file:
        head = file.read(_HEAD).lstrip()
    if not head.startswith(b"{") or b'"wall_s"' not in head or b'"traceEvents"' in head:
        return None
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise BadData(f"{path} is not JSON ({error}); profile again") from None
    inner = values.get("profile", values)
    return Profile.from_json(json.dumps(inner), str(path))
