"""Corrections of modelled work by the device's events: a kernel's name and time are facts, a model is an assumption.

Where they contradict each other, the model is dropped and the time counts as unjudged.
"""

from collections.abc import Sequence

import numpy as np

from armillary.profiling.profile import Roofline
from armillary.profiling.trace.event_classes import element_size, is_plain_fp32, kernel_work
from armillary.profiling.trace.launch_correlation import Links
from armillary.profiling.trace.trace import KERNEL, OP, Array, Trace
from armillary.profiling.work.work import is_guess
from armillary.spec.arithmetic.ops import Op

Columns = dict[str, Array]
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


def drop_unlaunched(trace: Trace, links: Links, columns: Columns) -> None:
    """On a GPU an operator that launched nothing did nothing there, whatever its arguments are."""
    launched: Array = np.zeros(len(trace), dtype=bool)
    owners = links.op[trace.on_device]
    launched[owners[owners >= 0]] = True
    for values in columns.values():
        values[(trace.kind == OP) & ~launched] = np.nan


def drop_false_elementwise(trace: Trace, links: Links, model: Array, table: Sequence[Op], columns: Columns) -> None:
    """An operator without a rule whose kernel is a GEMM, attention or convolution by its name gets no work."""
    if not table:
        return
    gemms = np.array([kernel_work(name) in ("gemm", "attention", "conv") for name in trace.names], dtype=bool)
    guess = np.array([is_guess(op.name) for op in table], dtype=bool)
    kernels = _modelled(trace, links, model)
    kernels = kernels[gemms[trace.name[kernels]] & guess[model[links.op[kernels]]]]
    owners = np.unique(links.op[kernels])
    model[owners] = -1
    for values in columns.values():
        values[owners] = np.nan


def correct_lists(trace: Trace, links: Links, model: Array, assumed: Array, columns: Columns) -> None:
    """A trace does not say what a list of tensors holds, but the template of the kernel that goes over it does."""
    if not len(assumed):
        return
    size = np.array([element_size(name) for name in trace.names])
    kernels = _modelled(trace, links, model)
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
    plain = np.array([is_plain_fp32(name) for name in trace.names], dtype=bool)
    fp32 = np.array([op.dtype == "fp32" and op.on_matrix_units for op in table], dtype=bool)
    kernels = _modelled(trace, links, model)
    kernels = kernels[plain[trace.name[kernels]] & fp32[model[links.op[kernels]]]]
    for events in (kernels, np.unique(links.op[kernels])):
        columns["flops_s"][events] = columns["flops"][events] / roofline.flops["fp32"]


def drop_impossible(trace: Trace, links: Links, model: Array, table: Sequence[Op], columns: Columns) -> Array:
    """Drop the work of operators that would be faster than the device allows; their kernels are returned."""
    owners = np.flatnonzero((model >= 0) & (trace.kind == OP))
    seconds = trace.seconds.copy()
    if trace.on_device.any():
        seconds = np.zeros(len(trace))
        kernels = np.flatnonzero(trace.on_device & (links.op >= 0))
        np.add.at(seconds, links.op[kernels], trace.seconds[kernels])
    conv = np.array([op.kind == "conv" for op in table], dtype=bool)
    wrong = owners[_impossible(columns, owners, seconds[owners], conv[model[owners]], trace.on_device.any())]
    inside: Array = np.zeros(len(trace), dtype=bool)
    inside[wrong] = True
    kernels = np.flatnonzero(trace.on_device & (links.op >= 0))
    kernels = kernels[inside[links.op[kernels]]]
    for values in columns.values():
        values[wrong] = np.nan
        values[kernels] = np.nan
    return kernels


def drop_impossible_kernels(trace: Trace, events: Array, columns: Columns) -> None:
    """The same for kernels that were given the work of others."""
    events = events[trace.kind[events] == KERNEL]
    wrong = events[_impossible(columns, events, trace.seconds[events], np.zeros(len(events), dtype=bool), True)]
    for values in columns.values():
        values[wrong] = np.nan


def _impossible(columns: Columns, events: Array, seconds: Array, conv: Array, on_gpu: bool) -> Array:
    """Small tensors may sit in a cache: they only count as wrong where no cache is as fast."""
    time = seconds + _TICK_S
    flops_s, bytes_s = np.nan_to_num(columns["flops_s"][events]), np.nan_to_num(columns["bytes_s"][events])
    past = bytes_s > _MARGIN * time
    uncached = np.nan_to_num(columns["bytes"][events]) > _CACHED
    beyond_caches = (bytes_s > _CACHE_MARGIN * time) & on_gpu
    return (past & uncached) | beyond_caches | (flops_s > np.where(conv, _FAST_CONV, _MARGIN) * time)


def _modelled(trace: Trace, links: Links, model: Array) -> Array:
    """Kernels whose operator has a model."""
    kernels = np.flatnonzero(trace.on_device & (links.op >= 0))
    return kernels[model[links.op[kernels]] >= 0]
