"""Each operator and kernel of a trace against the roofline: its FLOPs, its bytes, and the least time they need."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from armillary.profiling.analysis.roofline import peak_flops
from armillary.profiling.analysis.work_corrections import (
    correct_lists,
    correct_plain_fp32,
    drop_false_elementwise,
    drop_impossible,
    drop_impossible_kernels,
    drop_unlaunched,
    drop_work,
    drop_wrappers,
    modelled_kernels,
    take_in_parts,
)
from armillary.profiling.profile import Roofline
from armillary.profiling.trace.event_classes import is_host_copy, kernel_work
from armillary.profiling.trace.host_calls import STATES, Host, read_host, state_codes
from armillary.profiling.trace.launch_correlation import Links, mark_blocking_copies, read_links
from armillary.profiling.trace.op_call import assumed_size, floats_of
from armillary.profiling.trace.trace import MEMCPY, MEMSET, OP, Array, Trace
from armillary.profiling.work.work import WORK_OF_KIND, op_of
from armillary.spec.arithmetic.ops import Op


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """A trace, its tree, its links, and the work of each event with the least time for it; NaN where no model of
    the work exists."""

    trace: Trace
    host: Host
    links: Links
    roofline: Roofline
    work: Array
    """class of work, an index into works; -1 for events that are no work"""
    works: tuple[str, ...]
    flops: Array
    bytes: Array
    flops_s: Array
    bytes_s: Array

    @cached_property
    def roofline_s(self) -> Array:
        """The larger of the two; NaN where neither is known."""
        return np.fmax(self.flops_s, self.bytes_s)

    @cached_property
    def forward_of(self) -> dict[int, int]:
        """Autograd's sequence number -> the operator of the forward that has it."""
        forward = np.flatnonzero((self.trace.sequence >= 0) & (self.host.module >= 0))
        return dict(zip(self.trace.sequence[forward].tolist(), forward.tolist(), strict=True))

    @property
    def on_gpu(self) -> bool:
        return bool(self.trace.on_device.any())


def attribute_work(trace: Trace, roofline: Roofline) -> Attribution:
    model, table, assumed = _models(trace)
    host = read_host(trace, model >= 0)
    drop_wrappers(host, model, table)
    take_in_parts(trace, host, model, table)
    links = read_links(trace, host)
    mark_blocking_copies(trace, host, links)
    columns = _per_op(trace, model, table, roofline)
    works = tuple(sorted({*WORK_OF_KIND.values(), "other", "collective"}))
    if trace.on_device.any():
        drop_unlaunched(trace, links, columns)
        drop_false_elementwise(trace, links, model, table, columns)
        correct_lists(trace, links, model, assumed, columns)
        _share_among_kernels(trace, links, model, columns)
        correct_plain_fp32(trace, links, model, table, columns, roofline)
    wrong = drop_impossible(trace, links, model, table, columns)
    work = _classes(trace, links, model, table, works)
    if trace.on_device.any():
        _copies(trace, columns, roofline)
        drop_impossible_kernels(trace, _by_twin(trace, wrong, columns), columns)
        drop_work(columns, trace.on_device & (work == works.index("collective")))  # a link has another roofline
    return Attribution(trace=trace, host=host, links=links, roofline=roofline, work=work, works=works, **columns)


def _models(trace: Trace) -> tuple[Array, list[Op], Array]:
    """An index into the table of models for each operator; each (name, signature) is modelled once. With the table,
    the bytes per element that its tensor lists were assumed to have (0: none)."""
    model: Array = np.full(len(trace), -1, dtype=np.int64)
    ops = np.flatnonzero((trace.kind == OP) & (trace.signature >= 0) & (state_codes(trace) == STATES.index("op")))
    keys, inverse = np.unique(trace.name[ops].astype(np.int64) << 32 | trace.signature[ops], return_inverse=True)
    usual = _usual_type(trace)
    table: list[Op] = []
    assumed: list[float] = []
    numbers: Array = np.full(len(keys), -1, dtype=np.int64)
    for i, key in enumerate(keys.tolist()):
        name, signature = trace.names[key >> 32], trace.signatures[key & 0xFFFFFFFF]
        list_type = "float" if name.startswith(("aten::_f", "aten::_amp_f")) else usual  # optimisers step fp32 weights
        op = op_of(name, signature, list_type)
        if op is not None:
            numbers[i] = len(table)
            table.append(op)
            assumed.append(assumed_size(signature, list_type))
    model[ops] = numbers[inverse]
    return model, table, np.array(assumed)


def _usual_type(trace: Trace) -> str:
    """The floating-point type that most tensors of the trace have, by elements."""
    elements = {"float": 0}
    for signature in trace.signatures:
        for kind, count in floats_of(signature).items():
            elements[kind] = elements.get(kind, 0) + count
    return max(elements, key=lambda kind: elements[kind])


def _per_op(trace: Trace, model: Array, table: list[Op], roofline: Roofline) -> dict[str, Array]:
    """Work of each modelled operator, per call."""
    peaks = [peak_flops(roofline, op.dtype, matrix=op.on_matrix_units) for op in table]
    values = {
        "flops": [op.flops for op in table],
        "bytes": [op.bytes for op in table],
        "flops_s": [op.flops / peak if peak else np.nan for op, peak in zip(table, peaks, strict=True)],
        "bytes_s": [op.bytes / roofline.bytes_per_s if roofline.bytes_per_s else np.nan for op in table],
    }
    known = model >= 0
    columns = {}
    for name, numbers in values.items():
        columns[name] = np.full(len(trace), np.nan)
        columns[name][known] = np.array(numbers, dtype=float)[model[known]] if table else np.nan
    return columns


def _share_among_kernels(trace: Trace, links: Links, model: Array, columns: dict[str, Array]) -> None:
    """Kernels of one operator share its work in proportion to their time; the operator's own figures stay."""
    kernels = modelled_kernels(trace, links, model)
    op, seconds = links.op[kernels], trace.seconds[kernels]
    op_seconds = np.bincount(op, weights=seconds, minlength=len(trace))[op]
    share = np.divide(seconds, op_seconds, out=np.zeros(len(kernels)), where=op_seconds > 0)
    for values in columns.values():
        values[kernels] = values[op] * share


def _copies(trace: Trace, columns: dict[str, Array], roofline: Roofline) -> None:
    """A copy on the device reads and writes its bytes, a memset writes them; a host copy has another roofline."""
    host_copy = trace.matching(is_host_copy)
    for kind, factor in ((MEMCPY, 2.0), (MEMSET, 1.0)):
        events = np.flatnonzero((trace.kind == kind) & ~host_copy & (trace.size >= 0))
        columns["flops"][events], columns["flops_s"][events] = 0.0, 0.0
        columns["bytes"][events] = factor * trace.size[events]
        columns["bytes_s"][events] = (
            factor * trace.size[events] / roofline.bytes_per_s if roofline.bytes_per_s else np.nan
        )
    drop_work(columns, (trace.kind == MEMCPY) & host_copy)


def _by_twin(trace: Trace, wrong: Array, columns: dict[str, Array]) -> Array:
    """A kernel without an operator (a CUDA graph's) is given the mean work of the same kernel with the same grid
    elsewhere in the trace, unless its own model was found wrong; those that were given some are returned."""
    allowed = trace.on_device.copy()
    allowed[wrong] = False
    kernels = np.flatnonzero(allowed)
    if not len(kernels):
        return kernels
    seen: dict[str, int] = {}
    grids = [f"{detail.get('grid')} {detail.get('block')}" for detail in trace.details]
    shape = np.array([*(seen.setdefault(grid, len(seen)) for grid in grids), -1])  # the last is for no detail at all
    _, key = np.unique(
        trace.name[kernels].astype(np.int64) << 32 | (shape[trace.detail[kernels]] + 1), return_inverse=True
    )
    known = ~np.isnan(columns["flops"][kernels])
    count = np.bincount(key[known], minlength=key.max() + 1)
    for values in columns.values():
        of_kernels = values[kernels]
        total = np.bincount(key[known], weights=np.nan_to_num(of_kernels[known]), minlength=key.max() + 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / count
        values[kernels[~known]] = mean[key[~known]]
    return kernels[~known]


def _classes(trace: Trace, links: Links, model: Array, table: list[Op], works: tuple[str, ...]) -> Array:
    """By the operator's model where there is one, else by the name."""
    by_name = np.array([works.index(kernel_work(name)) for name in trace.names], dtype=np.int8)
    by_model = np.array([works.index(WORK_OF_KIND[op.kind]) for op in table], dtype=np.int8)
    work: Array = np.full(len(trace), -1, dtype=np.int8)
    own = model >= 0
    shown = trace.on_device | (trace.kind == OP)
    work[shown] = by_name[trace.name[shown]]
    if len(by_model):
        work[own] = by_model[model[own]]
        linked = modelled_kernels(trace, links, model)
        linked = linked[work[linked] != works.index("collective")]
        from_op = by_model[model[links.op[linked]]]
        vague = (from_op == works.index("elementwise")) & (work[linked] != works.index("other"))
        work[linked] = np.where(vague, work[linked], from_op)
    return work
