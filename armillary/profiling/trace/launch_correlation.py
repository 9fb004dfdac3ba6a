"""Correlation of device events with the call that launched them and the operator they belong to."""

from dataclasses import dataclass

import numpy as np

from armillary.profiling.trace.event_classes import is_launch
from armillary.profiling.trace.host_calls import STATES, Host
from armillary.profiling.trace.trace import MEMCPY, OP, RUNTIME, Array, Trace

_CLOCKS_S = 1e-5
"""largest offset between the clocks of host and device"""


@dataclass(frozen=True, kw_only=True)
class Links:
    """For each event of the device: the host's call that launched it, and its operator; -1 where the trace does not
    say."""

    launch: Array
    op: Array
    """its operator: the nearest one with a known model, else the nearest"""
    graph: Array
    """whether a CUDA graph launched it: then its operator was recorded elsewhere"""


def read_links(trace: Trace, host: Host) -> Links:
    launch = _launches(trace)
    known = launch >= 0
    graph = known & trace.matching(lambda name: "GraphLaunch" in name)[launch]
    op: Array = np.full(len(trace), -1, dtype=np.int64)
    op[known] = np.where(host.worker[launch[known]] >= 0, host.worker[launch[known]], host.op[launch[known]])
    lost = trace.on_device & (op < 0) & ~graph
    op[lost] = _by_external_id(trace, host, lost)
    op[graph] = -1
    return Links(launch=launch, op=op, graph=graph)


def _launches(trace: Trace) -> Array:
    """By correlation id; where several calls share one, the one that launches, and of those the last before the work
    began: processes count from one each."""
    result: Array = np.full(len(trace), -1, dtype=np.int64)
    calls = np.flatnonzero((trace.kind == RUNTIME) & (trace.correlation >= 0))
    device = np.flatnonzero(trace.on_device & (trace.correlation >= 0))
    if not len(calls) or not len(device):
        return result
    launches = trace.matching(is_launch)[calls]
    unrelated = ~np.isin(trace.correlation[calls], trace.correlation[calls[launches]])
    calls = calls[launches | unrelated]
    calls = calls[np.lexsort((trace.start[calls], trace.correlation[calls]))]
    ids, first = np.unique(trace.correlation[calls], return_index=True)
    at = np.minimum(np.searchsorted(ids, trace.correlation[device]), len(ids) - 1)
    match = ids[at] == trace.correlation[device]
    device, at = device[match], at[match]
    span = float(trace.end.max()) + 1.0
    keys = np.searchsorted(ids, trace.correlation[calls]) * span + trace.start[calls]
    before = np.searchsorted(keys, at * span + trace.start[device] + _CLOCKS_S, side="right") - 1
    result[device] = calls[np.maximum(before, first[at])]
    return result


def _by_external_id(trace: Trace, host: Host, lost: Array) -> Array:
    """Kineto's own join, for launches outside any operator's time; old traces put the correlation id there."""
    launches: Array = np.full(int(lost.sum()), -1, dtype=np.int64)
    ops = np.flatnonzero((trace.kind == OP) & (trace.external >= 0))
    wanted = np.where(trace.external[lost] == trace.correlation[lost], -1, trace.external[lost])
    if not len(ops) or not len(wanted):
        return launches
    ids, first = np.unique(trace.external[ops], return_index=True)
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    match = ids[at] == wanted
    event = ops[first[at[match]]]
    launches[match] = np.where(host.worker[event] >= 0, host.worker[event], event)
    return launches


def mark_blocking_copies(trace: Trace, host: Host, links: Links) -> None:
    """A copy from or to pageable memory blocks its caller until the data is staged: its call counts as a copy."""
    pageable = trace.matching(lambda name: "Pageable" in name)
    calls = links.launch[(trace.kind == MEMCPY) & pageable & (links.launch >= 0)]
    host.state[calls] = STATES.index("copy")
    for segments in host.threads.values():
        segments.state[np.isin(segments.event, calls)] = STATES.index("copy")
