"""From a trace to a Profile: the step budget, the tables, the gaps, the memory and the findings."""

from pathlib import Path

import numpy as np

from armillary.profiling.analysis.amdahl import AmdahlRow, amdahl
from armillary.profiling.analysis.findings import findings
from armillary.profiling.analysis.idle_gaps import as_gaps
from armillary.profiling.analysis.kernel_time import KERNEL_PARTS
from armillary.profiling.analysis.memory_timeline import memory_timeline
from armillary.profiling.analysis.op_table import rows
from armillary.profiling.analysis.roofline import roofline_for
from armillary.profiling.analysis.roofline_attribution import Attribution, attribute_work
from armillary.profiling.analysis.step_budget import Budget, budget, busiest_device, overhead_note, without_recording
from armillary.profiling.profile import Profile, Roofline
from armillary.profiling.trace.event_classes import is_host_copy, is_launch
from armillary.profiling.trace.read_trace import read_trace
from armillary.profiling.trace.trace import OP, PYTHON, RUNTIME, Trace
from armillary.store.home import Home


def analyse(
    trace: Trace | str | Path, *, roofline: Roofline, source: str = "", plain_s: float | None = None
) -> Profile:
    """Where the time of a trace went, compared with `roofline`; `plain_s` is a step's time without the profiler."""
    trace = trace if isinstance(trace, Trace) else read_trace(trace)
    attribution = attribute_work(trace, roofline)
    spent = without_recording(budget(attribution), plain_s)
    name = traced_device(trace)
    device = "cpu" if spent.device < 0 else f"cuda {name}" if name else f"cuda:{spent.device}"
    profile = Profile(
        source=source or trace.source,
        device=device,
        wall_s=spent.wall_s,
        steps=spent.window.steps,
        budget=spent.parts,
        rows=rows(attribution, spent),
        gaps=as_gaps(spent.stretches, attribution.host, spent.window.span),
        memory=memory_timeline(attribution, spent.window, spent.device),
        roofline=roofline,
        notes=_notes(attribution, spent, plain_s),
    )
    return findings(profile, attribution, spent)


def analyse_file(path: Path, home: Home | None, *, source: str, cpu: str = "", plain_s: float | None = None) -> Profile:
    """A trace file, compared with the roofline of the device that it names, else with that of the CPU `cpu`."""
    trace = read_trace(path)
    memory_bytes = trace.device_bytes[0] if trace.device_bytes else None
    roofline = roofline_for(traced_device(trace) or cpu, home, memory_bytes)
    return analyse(trace, roofline=roofline, source=source, plain_s=plain_s)


def traced_device(trace: Trace) -> str:
    """What the driver calls the device a trace was recorded on, or '' where the trace does not say."""
    number = busiest_device(trace)
    return trace.devices[number] if 0 <= number < len(trace.devices) else ""


def amdahl_of(profile: Profile) -> tuple[AmdahlRow, ...]:
    """Amdahl's law for each class of kernels and each other part of the budget."""
    kernel_s = sum(profile.budget.get(part, 0.0) for part in KERNEL_PARTS)
    rows = profile.kernels or profile.operators
    worked = [row for row in rows if row.work != "collective" and not is_host_copy(row.name)]
    total = sum(row.device_s for row in worked)
    shares: dict[str, float] = {}
    for row in worked:
        share = row.device_s / total * kernel_s / profile.wall_s if total and profile.wall_s else 0.0
        shares[row.work] = shares.get(row.work, 0.0) + share
    other_parts = {part: profile.fraction(part) for part in profile.budget if part not in KERNEL_PARTS}
    return amdahl({**{work: share for work, share in shares.items() if share > 0}, **other_parts})


def _notes(attribution: Attribution, spent: Budget, plain_s: float | None) -> tuple[str, ...]:
    trace, notes = attribution.trace, []
    if attribution.roofline.source == "unknown":
        notes.append(
            "no ceiling of this device is known, so kernel time is not judged: "
            "measure it with armillary bench ceilings on that machine"
        )
    elif spent.kernels.judged_share < 0.95:
        share = 1 - spent.kernels.judged_share
        notes.append(
            f"{share:.0%} of kernel time has no model of its work (no shapes in the trace, or code of "
            "one's own): it is not judged"
        )
    if attribution.roofline.source == "catalogue":
        notes.append("compared with the catalogue's peaks, which no kernel quite reaches: measure with armillary bench")
    if attribution.links.graph.any():
        count = int(attribution.links.graph.sum())
        notes.append(f"{count:,} kernels ran in CUDA graphs, which hide operators and shapes: known by name only")
    if spent.device < 0 and any(is_launch(trace.names[name]) for name in np.unique(trace.name[trace.kind == RUNTIME])):
        notes.append(
            "the trace has launches but nothing of the device: record with ProfilerActivity.CUDA; "
            "what follows is the host's side alone"
        )
    if spent.device < 0 and trace.memory is not None:
        notes.append("memory on a CPU is counted from the beginning of the recording, without earlier allocations")
    if spent.device < 0 and (note := _item_calls_note(attribution, spent)):
        notes.append(note)
    if not len(trace.signatures):
        notes.append("no shapes in the trace: record with record_shapes=True for FLOPs and bytes")
    if len(set(trace.device[trace.on_device].tolist())) > 1:
        notes.append(f"several devices in the trace: device {spent.device}, the busiest, is shown")
    if not (trace.kind == PYTHON).any():
        notes.append("no Python stacks in the trace: record with with_stack=True for source lines and modules")
    return (*notes, *filter(None, [overhead_note(spent, plain_s)]))


def _item_calls_note(attribution: Attribution, spent: Budget) -> str:
    """A warning that `.item()` in a loop, free on a CPU, is expensive on a GPU."""
    trace, window = attribution.trace, spent.window
    inside = (trace.start >= window.low) & (trace.start < window.high)
    calls = np.flatnonzero((trace.kind == OP) & trace.matching(lambda name: name.startswith("aten::item")) & inside)
    count = len(calls) / window.steps
    if count < 1:
        return ""
    where = attribution.host.where(int(calls[0]))
    at = f" at {where}" if where else ""
    return f".item() is called {count:,.0f} times per step{at}: on a GPU each call would wait for the device"
