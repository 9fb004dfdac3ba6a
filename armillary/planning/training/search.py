"""Search: the best layouts of a model on a cluster, out of all that are valid, and why the best is best.

Memory is priced first for the whole space, time for what fits. The front holds every layout that nothing beats in both
time and memory; dollars follow time, since all devices are paid for either way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from armillary.errors import BadLayout
from armillary.planning.device_model.layout_arrays import OFFLOADS, Array, Ints, Layouts, joined, taken
from armillary.planning.training.memory_breakdown import CONTEXT_BYTES, FRAGMENTATION, fits, memory
from armillary.planning.training.prediction import Prediction, predict
from armillary.planning.training.search_space import constrained, hybrid, runnable, space
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found."""

    num_valid: int
    """layouts that divide model, devices and batch"""
    num_fitting: int
    """of them, those that fit into memory"""
    seconds: float
    """the search took"""
    best: Prediction
    """the quickest layouts, quickest first, no two alike in their axes"""
    front: Prediction
    """the Pareto front of time and memory, quickest first"""


def search(
    case: TrainCase,
    *,
    precisions: Sequence[str] | None = None,
    memory_bytes: float | None = None,
    shown: int = SHOWN,
    fixed: Mapping[str, Any] | None = None,
) -> Found:
    """The best of all valid layouts that stay within `memory_bytes` (none: the device's). What is `fixed` (a field of
    the layout -> its value) is kept, the rest searched."""
    began = time.perf_counter()
    kept = dict(fixed or {})
    layouts = space(case, [kept["precision"]] if "precision" in kept else precisions)
    more = hybrid(case, layouts) if "shard" not in kept else layouts.take(np.array([], dtype=np.int64))
    layouts = runnable(case, constrained(joined(layouts, more) if len(more) else layouts, kept), kept)
    held = memory(case, layouts)
    bytes_ = held.total
    room = min(memory_bytes or float("inf"), case.cluster.chip.memory_bytes or float("inf"))
    fitting = np.nonzero(fits(case, layouts, held, room))[0]
    if not len(fitting):
        raise _nothing_fits(case, layouts, bytes_, room)
    priced = predict(case, layouts.take(fitting), taken(held, fitting))
    best = priced.take(_distinct(priced, shown))
    front = priced.take(_front(priced.time.total, priced.memory.total))
    return Found(
        num_valid=len(layouts), num_fitting=len(fitting), seconds=time.perf_counter() - began, best=best, front=front
    )


def _nothing_fits(case: TrainCase, layouts: Layouts, bytes_: Array, room: float) -> BadLayout:
    """The least any layout needs, and how many devices would hold it; or the host, where devices would."""
    if (bytes_ <= room).any():
        name = OFFLOADS[int(layouts.offload[0])]
        other = "nvme" if name in ("optimizer", "both") else "none"
        return BadLayout(
            f"offload={name} of {case.model.name} keeps more beside {case.cluster.text()} than its hosts "
            f"have room for, whatever the layout; try --set layout.offload={other}"
        )
    least = float(bytes_.min())
    smallest = layouts.take(np.array([int(bytes_.argmin())]))
    held = float(memory(case, smallest).allocated[0])
    away = replace(smallest, offload=np.array([OFFLOADS.index("both")]))
    out = fits(case, away, memory(case, away), room)[0]
    usable = max((room - CONTEXT_BYTES) / (1 + FRAGMENTATION), room / 2)
    times = max(2, int(np.ceil(held / usable)))
    more = case.cluster.num_devices * 2 ** int(np.ceil(np.log2(times)))
    return BadLayout(
        f"no layout of {case.model.name} fits {case.cluster.text()}: the least needs {bytes_text(least)} of "
        f"{bytes_text(room)} a device; try about {more} devices, "
        + ("or --set layout.offload=both" if out else "or chips with more memory")
    )


def _distinct(priced: Prediction, shown: int) -> Ints:
    """Positions of the quickest layouts, the best of each set that shares its parallel axes and precision."""
    layouts = priced.layouts
    order = np.argsort(priced.time.total, kind="stable")
    seen: set[tuple[int, ...]] = set()
    kept: list[int] = []
    for i in order:
        key = tuple(int(getattr(layouts, name)[i]) for name in ("dp", "tp", "pp", "cp", "ep", "precision"))
        if key not in seen:
            seen.add(key)
            kept.append(int(i))
        if len(kept) == shown:
            break
    return np.array(kept, dtype=np.int64)


def _front(seconds: Array, bytes_: Array) -> Ints:
    """Positions of what nothing beats in both: by time, keep each that needs less memory than all before it."""
    order = np.lexsort((bytes_, seconds))
    lowest = np.minimum.accumulate(bytes_[order])
    first = np.concatenate([[True], lowest[1:] < lowest[:-1]])
    positions: Ints = order[first]
    return positions


# --- why


def why(found: Found) -> list[str]:
    """Why the best wins: against each runner-up, the term that costs it most and the one that it saves."""
    best, lines = found.best, []
    for i in range(1, min(len(best.layouts), 4)):
        behind = float(best.time.total[i] / best.time.total[0] - 1)
        off = {term: float(getattr(best.time, term)[i] - getattr(best.time, term)[0]) for term in TERMS}
        worst, saved = max(off, key=lambda term: off[term]), min(off, key=lambda term: off[term])
        more = f"{seconds_text(max(off[worst], 0.0))} more {WORDS[worst]}"
        text = f"{_name(best, i)} is {behind * 100:.1f} % slower: {more}"
        if off[saved] < -1e-3 * float(best.time.total[0]):
            text += f", {seconds_text(-off[saved])} less {WORDS[saved]}"
        lines.append(text)
    return lines


def _name(found: Prediction, i: int) -> str:
    layout = found.layout(i)
    interleave = f" × {layout.interleave} chunks" if layout.interleave > 1 else ""
    axes = layout.text("tp", "pp", "cp", "ep", "dp")
    return f"{axes}{interleave}, micro-batch {layout.micro_batch}, {found.precision(i)}"


def limits(time: StepTime, i: int = 0) -> tuple[AmdahlRow, ...]:
    """What limits a step next: its parts as shares, largest first, with what doubling each would buy."""
    total = float(time.total[i])
    parts = {
        "matrix products": time.gemm,
        "attention": time.attention,
        "memory-bound operations": time.memory,
        "recomputation": time.recompute,
        "pipeline bubbles": time.bubble,
        "optimiser": time.optimizer,
        "data": time.data,
        "the host, where states wait": time.offload,
        "launches and waiting": time.launch + time.straggle + time.other + time.contention,
    }
    parts |= {f"{name} exchanges": one.exposed for name, one in time.exchanges.items()}
    shares = {name: float(seconds[i]) / total for name, seconds in parts.items()}
    return amdahl({name: max(0.0, share) for name, share in shares.items() if share > 1e-4})
