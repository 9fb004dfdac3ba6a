"""The step budget where the CPU is the device: how the program's main thread spent its time.

An operator's time is work, less one dispatch, which counts as a launch gap; so does the time of operators that touch no
element, of autograd between operators, and of short Python code. Longer Python code is the host's time, unless another
thread communicates or computes meanwhile.
"""

import numpy as np

from armillary.profiling.analysis.idle_gaps import CAUSE_OF_STATE, GLUE_S, Stretch
from armillary.profiling.analysis.kernel_time import NO_TIME, KernelTime, split_kernel_time
from armillary.profiling.analysis.roofline import LAUNCH_S
from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.trace.host_calls import QUIET, STATES, Segments
from armillary.profiling.trace.intervals import clip, covered_within, gaps_between
from armillary.profiling.trace.trace import OP, Array

_COMPILED = ("Torch-Compiled", "## Call", "CompiledFunction")
Parts = dict[str, float]


def cpu_budget(attribution: Attribution, span: tuple[float, float]) -> tuple[Parts, list[Stretch], KernelTime, Array]:
    host = attribution.host
    if host.main_thread is None:
        return {"unknown": span[1] - span[0]}, [], NO_TIME, np.zeros(0, dtype=np.int64)
    segments = host.threads[host.main_thread]
    start, end = clip(segments.start, segments.end, *span)
    seconds, state = end - start, segments.state
    parts: Parts = {}
    work = _working(attribution, segments)
    owner = np.where(host.worker[segments.event] >= 0, host.worker[segments.event], segments.event)
    events, kernels, dispatch_s = _operators(attribution, owner[work], seconds[work])
    parts |= kernels.parts
    comm, loader, slow = (state == STATES.index(name) for name in ("comm", "loader", "slow"))
    sync = np.isin(state, [STATES.index("copy"), STATES.index("sync")]) & ~work
    overhead = (state >= QUIET) & ~work & ~comm & ~loader & ~slow & ~sync
    long_code = overhead & (state == STATES.index("code")) & (seconds > GLUE_S)
    parts["comm_exposed"] = float(seconds[comm].sum())
    parts["sync"] = float(seconds[sync].sum())
    parts["launch_gap"] = dispatch_s + float(seconds[overhead & ~long_code].sum())
    parts["host"] = float(seconds[loader | slow | long_code].sum())
    quiet = _quiet(attribution, segments, span)
    for stretch in quiet:
        for (part, _), length in stretch.causes.items():
            parts[part] = parts.get(part, 0.0) + length
    return parts, quiet + _blocked(segments, start, end, loader | comm | slow | sync | long_code), kernels, events


def _working(attribution: Attribution, segments: Segments) -> Array:
    """Segments that compute: operators that touch elements, and compiled code."""
    compiled = attribution.trace.matching(lambda name: name.startswith(_COMPILED))
    state = segments.state
    reading = (state == STATES.index("sync")) & (attribution.trace.kind[segments.event] == OP)  # item() on a CPU tensor
    op = (state == STATES.index("op")) | reading
    inside = attribution.host.worker[segments.event] >= 0
    code = (state == STATES.index("code")) & compiled[segments.event]
    view = (state == STATES.index("view")) & inside
    return op | (code & (segments.end - segments.start > GLUE_S)) | view


def _operators(attribution: Attribution, owner: Array, seconds: Array) -> tuple[Array, KernelTime, float]:
    """Time of each operator that works, one dispatch taken off."""
    events, inverse = np.unique(owner, return_inverse=True)
    time = np.bincount(inverse, weights=seconds, minlength=len(events)) if len(events) else np.zeros(0)
    roofline = np.nan_to_num(attribution.roofline_s[events])
    dispatch = np.minimum(np.maximum(time - roofline, 0.0), attribution.roofline.launch_s or LAUNCH_S)
    left = time - dispatch
    return (
        events,
        split_kernel_time(attribution, events, left, lambda some: float(left[some].sum())),
        float(dispatch.sum()),
    )


def _quiet(attribution: Attribution, segments: Segments, span: tuple[float, float]) -> list[Stretch]:
    """Intervals of Python on the main thread."""
    host, loud = attribution.host, segments.state >= QUIET
    starts, ends = gaps_between(segments.start[loud], segments.end[loud], *span)
    comm = covered_within(*_others(attribution, ("comm",)), starts, ends)
    busy = covered_within(*_others(attribution, ("comm", "op", "code")), starts, ends) - comm
    stretches = []
    for low, high, talk, work in zip(*(x.tolist() for x in (starts, ends, comm, busy)), strict=True):
        stretch = Stretch(low, high)
        stretch.add("collective", talk)
        stretch.add("host", work, part="idle")
        rest = high - low - talk - work
        event = host.at(host.main_thread or 0, (low + high) / 2) if rest > GLUE_S else -1
        stretch.add("launch" if high - low <= GLUE_S else "host", rest, event)
        if work > rest and work > talk:
            stretch.note = "another thread's operators"
        stretches.append(stretch)
    return stretches


def _others(attribution: Attribution, states: tuple[str, ...]) -> tuple[Array, Array]:
    """Intervals in which any other thread is in one of the states."""
    wanted = [STATES.index(name) for name in states]
    other_threads = [s for thread, s in attribution.host.threads.items() if thread != attribution.host.main_thread]
    picked = [(s.start[np.isin(s.state, wanted)], s.end[np.isin(s.state, wanted)]) for s in other_threads]
    if not picked:
        return np.zeros(0), np.zeros(0)
    return np.concatenate([start for start, _ in picked]), np.concatenate([end for _, end in picked])


def _blocked(segments: Segments, start: Array, end: Array, which: Array) -> list[Stretch]:
    """What the loader, communication and long foreign code took, for the list of gaps."""
    stretches = []
    for index in np.flatnonzero(which).tolist():
        stretch = Stretch(float(start[index]), float(end[index]))
        cause = CAUSE_OF_STATE.get(STATES[segments.state[index]], "host")
        stretch.add(cause, stretch.end - stretch.start, int(segments.event[index]))
        stretches.append(stretch)
    return stretches
