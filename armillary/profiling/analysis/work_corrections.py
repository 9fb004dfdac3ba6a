"""Corrections of modelled work: by the nesting of operators, and by the device's events.

A wrapper has no work of its own; an operator that does the work keeps the time of its parts. A kernel's name and time
are facts, a model is an assumption: where they contradict each other, the model is dropped and the time counts as
unjudged.
"""

from collections.abc import Callable, Sequence

import numpy as np

from armillary.profiling.profile import Roofline
from armillary.profiling.trace.event_classes import element_size, is_plain_fp32, kernel_work
from armillary.profiling.trace.host_calls import Host
from armillary.profiling.trace.launch_correlation import Links
from armillary.profiling.trace.trace import KERNEL, OP, Array, Trace
from armillary.profiling.work.work import is_explicit, is_guess
from armillary.spec.arithmetic.ops import Op

Columns = dict[str, Array]
_MOST = 0.3
"""share of an operator's bytes from which the inner operators do the work"""
_SCALAR = 32
"""bytes moved when one number is cast"""
_EPILOGUES = frozenset(
    f"aten::{name}{end}" for name in ("add", "sub", "mul", "div", "relu", "gelu") for end in ("", "_")
)
"""elementwise operators inside a GEMM's operator (bias, scale): work of their own"""
_CACHED = 128e6
"""bytes that may lie in a cache, so that they beat the memory's bandwidth: the last level holds 6 to 256 MB"""
_MARGIN = 1.5
"""more than this factor beyond the roofline is no measurement error"""
_CACHE_MARGIN = 4.0
"""a GPU's caches are two to three times as fast as its memory; a CPU's have no such bound"""
_FAST_CONV = 4.0
"""factor by which Winograd convolutions need fewer FLOPs than direct ones (Lavin & Gray, arXiv 1509.09308)"""
_TICK_S = 1e-6
"""older traces round times to this"""


def _which(table: Sequence[Op], holds: Callable[[Op], bool]) -> Array:
    return np.array([holds(op) for op in table], dtype=bool)


def _guesses(table: Sequence[Op]) -> Array:
    return _which(table, lambda op: is_guess(op.name))


# --- nested operators


def drop_wrappers(host: Host, model: Array, table: list[Op]) -> None:
    """A wrapper, which calls modelled operators for its work, gets no work of its own."""
    events = np.flatnonzero(model >= 0)
    above = _above(host, events)
    inner, outer = events[above >= 0], above[above >= 0]
    if not len(inner):
        return
    kinds = np.array([hash(op.kind) for op in table])
    explicit = _which(table, lambda op: is_explicit(op.name))
    listed = _which(table, lambda op: "_foreach_" in op.name)
    moved = np.array([op.bytes for op in table])
    same = (kinds[model[inner]] == kinds[model[outer]]) & ~_guesses(table)[model[inner]]
    inside = moved[model[inner]]
    counts = (same | ~explicit[model[outer]]) & (inside > _SCALAR)  # a number's cast is not the operator's work
    handed = np.bincount(outer, weights=np.where(counts, inside, 0.0), minlength=len(model))
    handed_on = (handed[outer] > 0) & (handed[outer] >= _MOST * moved[model[outer]])
    one_by_one = listed[model[outer]]  # a list of tensors, each handed to an operator of its own
    model[outer[handed_on | one_by_one]] = -1


def _above(host: Host, events: Array) -> Array:
    """The nearest operator with a model around each one; -1: none."""
    parents = host.parent[events]
    return np.where(parents >= 0, host.worker[parents], -1)


def take_in_parts(trace: Trace, host: Host, model: Array, table: list[Op]) -> None:
    """The time of an operator without a rule of its own, or of a sum inside a norm or softmax, belongs to the enclosing
    operator with a rule, except the epilogue of a GEMM."""
    if not table:
        return
    guess = _guesses(table)
    sums = _which(table, lambda op: op.kind == "reduction")
    gemm = _which(table, lambda op: op.on_matrix_units)
    rows = _which(table, lambda op: op.kind in ("norm", "softmax", "loss"))
    parts, outer = _around(host, model, guess | sums)
    apart = gemm[model[outer]] & trace.matching(_EPILOGUES.__contains__)[parts]
    taken = (outer >= 0) & ((guess[model[parts]] & ~apart) | rows[model[outer]])
    owner: Array = np.full(len(trace), -1, dtype=np.int64)
    owner[parts[taken]] = outer[taken]
    known = np.flatnonzero(host.worker >= 0)
    known = known[owner[host.worker[known]] >= 0]
    host.worker[known] = owner[host.worker[known]]
    model[parts[taken]] = -1


def _around(host: Host, model: Array, partial: Array) -> tuple[Array, Array]:
    """Operators that may be part of another, and the nearest with a model around each that is none; -1: none."""
    heads = np.flatnonzero(host.worker == np.arange(len(model)))
    up: Array = np.full(len(model), -1, dtype=np.int64)
    up[heads] = _above(host, heads)
    through: Array = model < 0
    through[~through] = partial[model[~through]]
    parts = np.flatnonzero((model >= 0) & through)
    outer = up[parts]
    while (wrapped := (outer >= 0) & through[outer]).any():
        outer[wrapped] = up[outer[wrapped]]
    return parts, outer


# --- the device's events


def modelled_kernels(trace: Trace, links: Links, model: Array) -> Array:
    """Kernels whose operator has a model."""
    kernels = np.flatnonzero(trace.on_device & (links.op >= 0))
    return kernels[model[links.op[kernels]] >= 0]


def drop_work(columns: Columns, events: Array) -> None:
    for values in columns.values():
        values[events] = np.nan


def drop_unlaunched(trace: Trace, links: Links, columns: Columns) -> None:
    """On a GPU an operator that launched nothing did nothing there, whatever its arguments are."""
    launched: Array = np.zeros(len(trace), dtype=bool)
    owners = links.op[trace.on_device]
    launched[owners[owners >= 0]] = True
    drop_work(columns, (trace.kind == OP) & ~launched)


def drop_false_elementwise(trace: Trace, links: Links, model: Array, table: Sequence[Op], columns: Columns) -> None:
    """An operator without a rule whose kernel is a GEMM, attention or convolution by its name gets no work."""
    if not table:
        return
    gemms = trace.matching(lambda name: kernel_work(name) in ("gemm", "attention", "conv"))
    kernels = modelled_kernels(trace, links, model)
    kernels = kernels[gemms[kernels] & _guesses(table)[model[links.op[kernels]]]]
    owners = np.unique(links.op[kernels])
    model[owners] = -1
    drop_work(columns, owners)


def correct_lists(trace: Trace, links: Links, model: Array, assumed: Array, columns: Columns) -> None:
    """A trace does not say what a list of tensors holds, but the template of the kernel that goes over it does."""
    if not len(assumed):
        return
    size = np.array([element_size(name) for name in trace.names])
    kernels = modelled_kernels(trace, links, model)
    kernels = kernels[(size[trace.name[kernels]] > 0) & (assumed[model[links.op[kernels]]] > 0)]
    owners, first = np.unique(links.op[kernels], return_index=True)
    factor = size[trace.name[kernels[first]]] / assumed[model[owners]]
    for name in ("bytes", "bytes_s"):
        columns[name][owners] *= factor


def correct_plain_fp32(
    trace: Trace, links: Links, model: Array, table: Sequence[Op], columns: Columns, roofline: Roofline
) -> None:
    """fp32 GEMMs run on the matrix units as tf32, or outside them: the kernel's name tells which peak applies."""
    if "tf32" not in roofline.flops or "fp32" not in roofline.flops or not table:
        return
    fp32 = _which(table, lambda op: op.dtype == "fp32" and op.on_matrix_units)
    kernels = modelled_kernels(trace, links, model)
    kernels = kernels[trace.matching(is_plain_fp32)[kernels] & fp32[model[links.op[kernels]]]]
    for events in (kernels, np.unique(links.op[kernels])):
        columns["flops_s"][events] = columns["flops"][events] / roofline.flops["fp32"]


def drop_impossible(trace: Trace, links: Links, model: Array, table: Sequence[Op], columns: Columns) -> Array:
    """Drop the work of operators that would be faster than the device allows; their kernels are returned."""
    owners = np.flatnonzero((model >= 0) & (trace.kind == OP))
    kernels = np.flatnonzero(trace.on_device & (links.op >= 0))
    on_gpu = bool(trace.on_device.any())
    on_device_s = np.bincount(links.op[kernels], weights=trace.seconds[kernels], minlength=len(trace))
    seconds = (on_device_s if on_gpu else trace.seconds)[owners]
    conv = _which(table, lambda op: op.kind == "conv")
    wrong = owners[_impossible(columns, owners, seconds, conv[model[owners]], on_gpu)]
    kernels = kernels[np.isin(links.op[kernels], wrong)]
    drop_work(columns, wrong)
    drop_work(columns, kernels)
    return kernels


def drop_impossible_kernels(trace: Trace, events: Array, columns: Columns) -> None:
    """The same for kernels that were given the work of others."""
    events = events[trace.kind[events] == KERNEL]
    conv: Array = np.zeros(len(events), dtype=bool)
    drop_work(columns, events[_impossible(columns, events, trace.seconds[events], conv, True)])


def _impossible(columns: Columns, events: Array, seconds: Array, conv: Array, on_gpu: bool) -> Array:
    """Small tensors may sit in a cache: they only count as wrong where no cache is as fast."""
    time = seconds + _TICK_S
    flops_s, bytes_s = np.nan_to_num(columns["flops_s"][events]), np.nan_to_num(columns["bytes_s"][events])
    past = bytes_s > _MARGIN * time
    uncached = np.nan_to_num(columns["bytes"][events]) > _CACHED
    beyond_caches = (bytes_s > _CACHE_MARGIN * time) & on_gpu
    return (past & uncached) | beyond_caches | (flops_s > np.where(conv, _FAST_CONV, _MARGIN) * time)
