"""The tables of a profile: one row per operator and per kernel, over all its calls."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from armillary.profiling.analysis.roofline import LAUNCH_S, bound
from armillary.profiling.analysis.roofline_attribution import Attribution
from armillary.profiling.analysis.step_budget import Budget
from armillary.profiling.profile import Row
from armillary.profiling.trace.event_classes import MODULE
from armillary.profiling.trace.intervals import clip
from armillary.profiling.trace.trace import OP, Array

_MAX_KERNELS_NAMED = 3


def rows(attribution: Attribution, budget: Budget) -> tuple[Row, ...]:
    """Kernels and operators inside the window, the longest first."""
    trace, window = attribution.trace, budget.window
    if budget.device >= 0:
        inside = (trace.start < window.high) & (trace.end > window.low)
        on_it = np.flatnonzero(trace.on_device & (trace.device == budget.device) & inside)
        start, end = clip(trace.start[on_it], trace.end[on_it], *window.span)
        table = _kernels(attribution, on_it, end - start)
        table += _operators(
            attribution, inside & _same_process(attribution), on_it, attribution.links.op[on_it], end - start
        )
    else:
        on_main_thread = (
            (trace.start >= window.low) & (trace.start < window.high) & (trace.thread == attribution.host.main_thread)
        )
        table = _operators(
            attribution, on_main_thread, budget.events, budget.events, _own_time(attribution, budget.events)
        )
    return tuple(sorted(table, key=lambda row: -row.seconds))


def _same_process(attribution: Attribution) -> Array:
    """Events of the program's own process: a trace may hold those of several ranks."""
    threads, main = attribution.trace.threads, attribution.host.main_thread
    if main is None:
        return np.ones(len(attribution.trace), dtype=bool)
    process = threads[main].partition("/")[0]
    return np.array([thread.partition("/")[0] == process for thread in threads])[attribution.trace.thread]


def _own_time(attribution: Attribution, events: Array) -> Array:
    """Time of an operator and of the parts it calls that have no work of their own."""
    host = attribution.host
    ops = np.flatnonzero(attribution.trace.kind == OP)
    owner = np.where(host.worker[ops] >= 0, host.worker[ops], ops)
    return np.bincount(owner, weights=host.self_s[ops], minlength=len(attribution.trace))[events]


def _kernels(attribution: Attribution, events: Array, seconds: Array) -> list[Row]:
    time = np.zeros(len(attribution.trace))
    time[events] = seconds
    return [
        _row(attribution, attribution.trace.names[name], "kernel", group, time[group], 0.0)
        for name, group in _groups(attribution.trace.name[events], events)
    ]


def _operators(attribution: Attribution, inside: Array, work: Array, owner: Array, seconds: Array) -> list[Row]:
    """`work` are events, each of which belongs to the operator `owner` (-1: none) and took `seconds`."""
    trace = attribution.trace
    device_s = np.bincount(owner[owner >= 0], weights=seconds[owner >= 0], minlength=len(trace))
    shown = np.flatnonzero(inside & (trace.kind == OP))
    kernels = _kernels_of(attribution, work, owner, seconds)
    table = []
    for name, group in _groups(trace.name[shown], shown):
        cpu_s = float(attribution.host.self_s[group].sum())
        row = _row(attribution, trace.names[name], "operator", group, device_s[group], cpu_s)
        table.append(replace(row, details={**row.details, "kernels": kernels[name]}) if name in kernels else row)
    return table


def _kernels_of(attribution: Attribution, work: Array, owner: Array, seconds: Array) -> dict[int, list[str]]:
    """Name of an operator -> the kernels that did its work, the longest first."""
    trace = attribution.trace
    known = (owner >= 0) & trace.on_device[work]
    both = trace.name[owner[known]].astype(np.int64) << 32 | trace.name[work[known]]
    keys, inverse = np.unique(both, return_inverse=True)
    total = np.bincount(inverse, weights=seconds[known], minlength=len(keys))
    by_operator: dict[int, list[str]] = {}
    for key in keys[np.argsort(-total, kind="stable")].tolist():
        by_operator.setdefault(key >> 32, []).append(trace.names[key & 0xFFFFFFFF])
    return {name: kernels[:_MAX_KERNELS_NAMED] for name, kernels in by_operator.items()}


def _groups(keys: Array, events: Array) -> list[tuple[int, Array]]:
    order = np.argsort(keys, kind="stable")
    values, first = np.unique(keys[order], return_index=True)
    return list(zip(values.tolist(), np.split(events[order], first[1:]), strict=True)) if len(keys) else []


def _row(attribution: Attribution, name: str, kind: Any, events: Array, seconds: Array, cpu_s: float) -> Row:
    known = ~np.isnan(attribution.flops[events])
    flops_s, bytes_s = _sum(attribution.flops_s[events]), _sum(attribution.bytes_s[events])
    device_s = float(seconds.sum())
    work = Counter(attribution.work[events[known] if known.any() else events].tolist()).most_common(1)[0][0]
    launch_s = attribution.roofline.launch_s or LAUNCH_S
    return Row(
        name=name,
        kind=kind,
        work=attribution.works[work] if work >= 0 else "other",
        calls=len(events),
        device_s=device_s,
        cpu_s=cpu_s,
        flops=float(attribution.flops[events][known].sum()) if known.any() else None,
        bytes=float(attribution.bytes[events][known].sum()) if known.any() else None,
        roofline_s=_sum(attribution.roofline_s[events]),
        bound=bound(flops_s, bytes_s, device_s or cpu_s, len(events), launch_s),
        module=_module(attribution, events),
        details=_details(attribution, events, seconds, known),
    )


def _sum(values: Array) -> float | None:
    return None if np.isnan(values).all() else float(np.nansum(values))


def _details(attribution: Attribution, events: Array, seconds: Array, known: Array) -> dict[str, Any]:
    trace = attribution.trace
    details: dict[str, Any] = {}
    detail = trace.detail[events]
    if (detail >= 0).any():
        longest = detail[int(seconds.argmax())]
        details = {key: value for key, value in trace.details[longest].items() if value not in ("", None)}
    if trace.kind[events[0]] == OP:
        longest = trace.signature[events[int(seconds.argmax())]]
        if longest >= 0:
            details["shapes"] = [list(shape) for shape in trace.signatures[longest].dims if shape]
    if 0 < known.sum() < len(known):
        details["modelled_calls"] = int(known.sum())
    if attribution.links.graph[events].any():
        details["in_cuda_graph"] = int(attribution.links.graph[events].sum())
    return details


def _module(attribution: Attribution, events: Array) -> str:
    """The module most calls came from; a backward's is its forward's."""
    trace = attribution.trace
    modules: Counter[str] = Counter()
    for event in events[:200].tolist():
        op = event if trace.kind[event] == OP else int(attribution.links.launch[event])
        modules[module_of(attribution, op) if op >= 0 else ""] += 1
    del modules[""]
    return modules.most_common(1)[0][0] if modules else ""


def module_of(attribution: Attribution, event: int) -> str:
    """The module an event was called from, or ''."""
    trace, host = attribution.trace, attribution.host
    if host.module[event] >= 0:
        return trace.name_of(int(host.module[event])).removeprefix(MODULE)
    for around in host.ancestors(event):
        detail = trace.detail[around]
        if trace.kind[around] == OP and detail >= 0 and trace.details[detail].get("module"):
            return str(trace.details[detail]["module"])
        forward = attribution.forward_of.get(int(trace.sequence[around])) if trace.sequence[around] >= 0 else None
        if forward is not None and forward != around and host.module[forward] >= 0:
            return trace.name_of(int(host.module[forward])).removeprefix(MODULE)
    return ""
