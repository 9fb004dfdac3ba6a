"""Search: the fastest of all valid layouts of a model on a cluster, and why it wins.

Memory is computed first for the full space, time for what fits. The Pareto front has every layout that no other beats
in both time and memory; dollars follow time, since all devices are paid for either way.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from armillary.errors import BadLayout
from armillary.planning.device_model.vectorised_layouts import (
    OFFLOADS,
    RECOMPUTES,
    Array,
    Ints,
    Layouts,
    concatenate,
    distinct,
    take_rows,
)
from armillary.planning.training.layout_prediction import Prediction, predict
from armillary.planning.training.memory_breakdown import CONTEXT_BYTES, FRAGMENTATION, Memory, fits, memory
from armillary.planning.training.search_space import constrained, hybrid, runnable, space, tried_dtypes
from armillary.planning.training.step_time import StepTime
from armillary.planning.training.train_case import TrainCase
from armillary.profiling.analysis.amdahl import AmdahlRow, amdahl
from armillary.units import bytes_text, seconds_text

SHOWN = 10
TERMS = ("compute", "exposed", "bubble", "overhead")
WORDS = {
    "compute": "computation",
    "exposed": "exposed communication",
    "bubble": "pipeline bubbles",
    "overhead": "overhead",
}


Counted = dict[tuple[Any, ...], tuple[Layouts, Memory, Ints]]
"""(devices, those of a fast domain, dtypes) -> the layouts, their memory, which no other figure of a chip changes, and
which of them differ only in what they recompute"""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Outcome of a search."""

    num_valid: int
    """layouts that divide model, devices and batch; `num_fitting` of them fit into memory"""
    num_fitting: int
    seconds: float
    best: Prediction
    """the fastest layouts, fastest first, one per set of parallel axes"""
    front: Prediction


def search(
    case: TrainCase,
    *,
    precisions: Sequence[str] | None = None,
    memory_bytes: float | None = None,
    shown: int = SHOWN,
    fixed: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The fastest valid layouts within `memory_bytes` (None: the device's). Layout fields in `fixed` keep their value,
    the others are searched."""
    began = time.perf_counter()
    layouts, usage = _counted(case, precisions, dict(fixed or {}))
    fitting = _fitting(case, layouts, usage, memory_bytes)
    priced = predict(case, layouts.take(fitting), take_rows(usage, fitting))
    best = priced.take(_distinct(priced, shown))
    front = priced.take(_front(priced.time.total, priced.memory.total))
    return SearchResult(
        num_valid=len(layouts), num_fitting=len(fitting), seconds=time.perf_counter() - began, best=best, front=front
    )


def fastest(case: TrainCase, counted: Counted | None = None) -> Prediction:
    """The first of `search`, for less: of layouts that differ only in what they recompute, those that recompute more
    than memory asks for are not priced, since recomputing never shortens a step (it adds as much to the time as to the
    windows that hide communication). `counted` keeps memory for further questions about the job on other chips."""
    cluster = case.cluster
    key = (cluster.num_devices, cluster.fast_domain, tuple(tried_dtypes(case)))
    known = counted.get(key) if counted is not None and cluster.chip.kind != "cpu" else None
    if known is None:
        layouts, usage = _counted(case, None, {})
        known = layouts, usage, _alike(layouts, but="recompute")
        if counted is not None:
            counted[key] = known
    layouts, usage, alike = known
    fitting = _fitting(case, layouts, usage)
    least = np.full(alike.max() + 1, len(RECOMPUTES))
    np.minimum.at(least, alike[fitting], layouts.recompute[fitting])
    fitting = fitting[layouts.recompute[fitting] == least[alike[fitting]]]
    priced = predict(case, layouts.take(fitting), take_rows(usage, fitting))
    return priced.take(_distinct(priced, 1))


def _alike(layouts: Layouts, *, but: str) -> Ints:
    """A number for every layout, the same for layouts that differ in field `but` alone."""
    code: Ints = np.zeros(len(layouts), dtype=np.int64)
    for name in (field.name for field in fields(Layouts) if field.name != but):
        column = getattr(layouts, name).astype(np.int64)
        if (column == column[0]).all():
            continue
        values, index = distinct(column)
        code = distinct(code * len(values) + index)[1]
    return code


def _fitting(case: TrainCase, layouts: Layouts, usage: Memory, memory_bytes: float | None = None) -> Ints:
    """Positions of the layouts that fit into a device; at least one."""
    limit = min(memory_bytes or float("inf"), case.cluster.chip.memory_bytes or float("inf"))
    fitting: Ints = np.nonzero(fits(case, layouts, usage, limit))[0]
    if not len(fitting):
        raise _nothing_fits(case, layouts, usage.total, limit)
    return fitting


def _counted(case: TrainCase, precisions: Sequence[str] | None, fixed: dict[str, Any]) -> tuple[Layouts, Memory]:
    """Every valid layout with its memory."""
    layouts = space(case, [fixed["precision"]] if "precision" in fixed else precisions)
    more = hybrid(case, layouts) if "shard" not in fixed else layouts.take(np.array([], dtype=np.int64))
    layouts = runnable(case, constrained(concatenate(layouts, more) if len(more) else layouts, fixed), fixed)
    return layouts, memory(case, layouts)


def _nothing_fits(case: TrainCase, layouts: Layouts, bytes_: Array, limit: float) -> BadLayout:
    """The least memory any layout needs and the number of devices that would have it; or that the host is too small."""
    if (bytes_ <= limit).any():
        name = OFFLOADS[int(layouts.offload[0])]
        other = "nvme" if name in ("optimizer", "both") else "none"
        return BadLayout(
            f"offload={name} of {case.model.name} needs more host memory than {case.cluster.text()} has, "
            f"whatever the layout; try --set layout.offload={other}"
        )
    least = float(bytes_.min())
    smallest = layouts.take(np.array([int(bytes_.argmin())]))
    allocated = float(memory(case, smallest).allocated[0])
    offloaded = replace(smallest, offload=np.array([OFFLOADS.index("both")]))
    out = fits(case, offloaded, memory(case, offloaded), limit)[0]
    usable = max((limit - CONTEXT_BYTES) / (1 + FRAGMENTATION), limit / 2)
    times = max(2, int(np.ceil(allocated / usable)))
    more = case.cluster.num_devices * 2 ** int(np.ceil(np.log2(times)))
    return BadLayout(
        f"no layout of {case.model.name} fits {case.cluster.text()}: the smallest needs {bytes_text(least)} of "
        f"{bytes_text(limit)} per device; try about {more} devices, "
        + ("or --set layout.offload=both" if out else "or chips with more memory")
    )


def _distinct(priced: Prediction, shown: int) -> Ints:
    """Positions of the fastest layouts, the best of each set with equal parallel axes and precision."""
    layouts = priced.layouts
    order = np.argsort(priced.time.total, kind="stable")
    fastest: dict[tuple[int, ...], int] = {}
    for i in order:
        key = tuple(int(getattr(layouts, name)[i]) for name in ("dp", "tp", "pp", "cp", "ep", "precision"))
        fastest.setdefault(key, int(i))
        if len(fastest) == shown:
            break
    return np.array(list(fastest.values()), dtype=np.int64)


def _front(seconds: Array, bytes_: Array) -> Ints:
    """Positions of the Pareto front: by time, each that needs less memory than all before it."""
    order = np.lexsort((bytes_, seconds))
    lowest = np.minimum.accumulate(bytes_[order])
    return order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]


# --- why


def why(result: SearchResult) -> list[str]:
    """Why the best wins: against each runner-up, the term that costs it most and the one that it saves."""
    best, lines = result.best, []
    for i in range(1, min(len(best.layouts), 4)):
        slower = float(best.time.total[i] / best.time.total[0] - 1)
        off = {term: float(getattr(best.time, term)[i] - getattr(best.time, term)[0]) for term in TERMS}
        worst, saved = max(off, key=lambda term: off[term]), min(off, key=lambda term: off[term])
        more = f"{seconds_text(max(off[worst], 0.0))} more {WORDS[worst]}"
        text = f"{_name(best, i)} is {slower * 100:.1f} % slower: {more}"
        if off[saved] < -1e-3 * float(best.time.total[0]):
            text += f", {seconds_text(-off[saved])} less {WORDS[saved]}"
        lines.append(text)
    return lines


def _name(prediction: Prediction, i: int) -> str:
    layout = prediction.layout(i)
    interleave = f" × {layout.interleave} chunks" if layout.interleave > 1 else ""
    axes = layout.text("tp", "pp", "cp", "ep", "dp")
    return f"{axes}{interleave}, micro-batch {layout.micro_batch}, {prediction.precision(i)}"


def limits(time: StepTime, i: int = 0) -> tuple[AmdahlRow, ...]:
    """What limits a step: its parts as shares, largest first, with the speed-up that doubling each would give."""
    total = float(time.total[i])
    parts = {
        "GEMMs": time.gemm,
        "attention": time.attention,
        "memory-bound operations": time.memory,
        "recompute": time.recompute,
        "pipeline bubbles": time.bubble,
        "optimizer": time.optimizer,
        "data": time.data,
        "offload": time.offload,
        "launches and waiting": time.launch + time.straggler + time.other + time.contention,
    }
    parts |= {f"{name} communication": cost.exposed for name, cost in time.comm_costs.items()}
    shares = {name: float(seconds[i]) / total for name, seconds in parts.items()}
    return amdahl({name: max(0.0, share) for name, share in shares.items() if share > 1e-4})
