"""Search space: every layout of a model on all devices of a cluster that the layout rules allow.

dp × zero × tp × pp × interleave × cp × ep × micro-batch × recompute × precision. Axes that must divide are enumerated,
the others are combined freely, as arrays.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from armillary.errors import BadInput, BadLayout
from armillary.planning.device_model.vectorised_layouts import (
    CODES,
    FULL,
    NONE,
    PRECISIONS,
    SCHEDULES,
    SELECTIVE,
    Ints,
    Layouts,
    grid,
)
from armillary.planning.training.offload import activations_offloaded
from armillary.planning.training.train_case import TrainCase
from armillary.spec.hardware import Chip
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import layout_problems
from armillary.spec.precision import GAIN

MOST_TP, MOST_CP, MOST_MICRO_BATCH = 64, 64, 64
LEAST_PIECE = 256
"""fewest tokens of a sequence per context-parallel rank"""
FREE = ("offload", "fp8_scaling", "recompute_every", "bucket_bytes", "sequence_parallel", "shard", "schedule")
"""fields that the space does not vary: they have the requested value"""
_AXES = ("dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave")
_Axes = tuple[int, int, int, int, int, int, int]


def space(case: TrainCase, precisions: Sequence[str] | None = None) -> Layouts:
    """Every valid layout on all devices of the case's cluster."""
    axes = np.array(list(_axes(case)), dtype=np.int64)
    if not len(axes):
        raise BadInput(
            f"no layout divides {case.model.name}, {case.cluster.num_devices} devices and a batch of "
            f"{case.batch_tokens} tokens; try a batch that is a multiple of sequence × devices"
        )
    codes = [PRECISIONS.index(name) for name in precisions or tried_dtypes(case)]
    free = np.array(list(product([0, 1, 2, 3], [NONE, SELECTIVE, FULL], codes)), dtype=np.int64)
    columns: dict[str, Ints] = {name: np.repeat(axes[:, i], len(free)) for i, name in enumerate(_AXES)}
    columns |= {name: np.tile(free[:, i], len(axes)) for i, name in enumerate(("zero", "recompute", "precision"))}
    interleaved = columns["interleave"] > 1
    layouts = grid(schedule=np.where(interleaved, SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")), **columns)
    return layouts.take(np.nonzero((layouts.zero == 0) | (layouts.dp * layouts.cp > 1))[0])


def constrained(layouts: Layouts, fixed: Mapping[str, Any]) -> Layouts:
    """Of the layouts, those with these values; fields that the space does not vary are set to them."""
    for name, value in fixed.items():
        code = CODES[name].index(value) if name in CODES else value
        if name == "schedule" and value != "interleaved":  # the space has one schedule without chunks: rename it
            layouts = layouts.take(np.nonzero(layouts.interleave == 1)[0])
        if name in FREE and value != "interleaved":
            column = np.full(len(layouts), code) if value is not None else layouts.dp
            layouts = replace(layouts, **{name: column})
        else:
            layouts = layouts.take(np.nonzero(getattr(layouts, name) == code)[0])
    if not len(layouts):
        text = ", ".join(f"layout.{name}={value}" for name, value in fixed.items())
        left = "it" if len(fixed) == 1 else "one of them"
        raise BadLayout(f"no valid layout has {text}; leave {left} to the search")
    return layouts


def runnable(case: TrainCase, layouts: Layouts, fixed: Mapping[str, Any]) -> Layouts:
    """Of the layouts, those that our trainer can run, where it is the software."""
    if not case.software.fully_shard:
        return layouts
    names = ("dp", "cp", "zero", "pp", "schedule", "recompute", "offload")
    requested: dict[str, Any] = {"dp": 2, **{name: value for name, value in fixed.items() if name in names}}
    rules = Case(model=case.model, by_trainer=True)
    for problem in layout_problems(Layout(**requested), rules):
        if problem.rule in ("selective_offload", "selective_split", "zero3_split"):
            raise BadLayout(problem.text)
    halves = (layouts.pp > 1) & (layouts.schedule == SCHEDULES.index("zero_bubble"))
    gathered = (layouts.zero == 3) & (layouts.dp * layouts.cp > 1) & halves
    combines = (layouts.recompute != SELECTIVE) | ~(activations_offloaded(layouts) | halves)
    return layouts.take(np.nonzero(combines & ~gathered)[0])


def hybrid(case: TrainCase, layouts: Layouts) -> Layouts:
    """The ZeRO 3 layouts with weights sharded inside a node only (HSDP), where that divides."""
    size = np.maximum(case.cluster.fast_domain // (layouts.tp * layouts.cp), 1)
    real = (layouts.zero == 3) & (size > 1) & (size < layouts.dp) & (layouts.dp % size == 0)
    return replace(layouts, shard=size).take(np.nonzero(real)[0])


def tried_dtypes(case: TrainCase) -> list[str]:
    """Dtypes that a search tries by default: on a measured CPU the fastest by its own ceilings, else what the chip
    has."""
    if case.measured is None or case.cluster.chip.kind != "cpu":
        return supported(case.cluster.chip)
        return supported(case.cluster.chip)
    narrow, wide = (case.curves.sustained(name) for name in ("bf16", "fp32"))
    return ["bf16" if narrow >= GAIN * wide else "fp32"]


def supported(chip: Chip) -> list[str]:
    """Dtypes of GEMMs that training is tried in: 16 bits, and 8 where the chip is faster in them."""
    base = "bf16" if chip.peak("bf16") or not chip.peak("fp16") else "fp16"
    if not (chip.peak("bf16") or chip.peak("fp16")):
        return ["fp32"]
    return [base, "fp8"] if (chip.peak("fp8") or 0) > 1.5 * (chip.peak(base) or 0) else [base]


# --- axes that must divide


def _axes(case: TrainCase) -> Iterator[_Axes]:
    devices, sequences = case.cluster.num_devices, max(case.batch_tokens // case.sequence, 1)
    for tp in _tensor_sizes(case):
        for cp in _context_sizes(case, tp):
            for pp in _divisors(devices // (tp * cp) if devices % (tp * cp) == 0 else 0):
                dp = devices // (tp * cp * pp)
                if pp > case.model.num_layers + 2 or sequences % dp:
                    continue
                yield from _inner(case, dp, tp, pp, cp, sequences // dp)


def _inner(case: TrainCase, dp: int, tp: int, pp: int, cp: int, sequences: int) -> Iterator[_Axes]:
    for ep in _expert_sizes(case, dp * cp * (tp if case.software.experts_over_tp else 1)):
        for micro_batch in _divisors(sequences, MOST_MICRO_BATCH):
            for interleave in _interleaves(case, pp, sequences // micro_batch):
                yield dp, tp, pp, cp, ep, micro_batch, interleave


def _tensor_sizes(case: TrainCase) -> list[int]:
    """tp that divides heads, KV heads and MLPs by the layout rules, at most twice the fast domain."""
    most = min(MOST_TP, case.cluster.num_devices, 2 * max(case.cluster.fast_domain, 1))
    rules = Case(model=case.model, sequence=case.sequence)
    sizes = [tp for tp in range(1, most + 1) if case.cluster.num_devices % tp == 0]
    broken = {tp: {problem.rule for problem in layout_problems(Layout(tp=tp), rules)} for tp in sizes}
    return [tp for tp in sizes if not broken[tp] & {"tp", "tokens"}]


def _context_sizes(case: TrainCase, tp: int) -> list[int]:
    most = min(MOST_CP, max(1, case.sequence // LEAST_PIECE), case.cluster.num_devices // tp)
    return [cp for cp in range(1, most + 1) if cp == 1 or case.sequence % (2 * cp * tp) == 0]


def _expert_sizes(case: TrainCase, ranks: int) -> list[int]:
    if case.model.moe is None or not case.model.num_moe_layers:
        return [1]
    return [ep for ep in _divisors(case.model.moe.num_experts) if ranks % ep == 0]


def _interleaves(case: TrainCase, pp: int, micro_batches: int) -> list[int]:
    """Chunks per stage: equal chunks, with or without the ends as places; micro-batches run in groups of pp."""
    if pp == 1 or micro_batches % pp:
        return [1]
    layers = case.model.num_layers
    chunks = range(2, (layers + 2) // pp + 1)
    return [1, *(v for v in chunks if layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0)]


def _divisors(number: int, most: int | None = None) -> list[int]:
    """Every divisor up to `most`, in order."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0] if number > 0 else []
    divisors = sorted({*small, *(number // n for n in small)})
    return [n for n in divisors if most is None or n <= most]
