"""Memory on the fullest device by purpose, for every layout at once.

What training stores per parameter is always there (optimizer_states); gradients, activations, logits and all-gathered
weights are temporary (peak_memory), and their peak counts. The first and the last pipeline stage are compared: one has
the most micro-batches in flight, the other the logits.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import Array, Bools, Ints, Layouts, map_arrays, take_rows
from armillary.planning.training.activations import GPIPE, micro_batches_in_flight
from armillary.planning.training.offload import host_bytes, host_capacity, optimizer_offloaded, resident_master_share
from armillary.planning.training.optimizer_states import sharded_bytes, state_bytes, weight_bytes
from armillary.planning.training.peak_memory import Snapshot, Stage
from armillary.planning.training.stages import DeviceParameters, device_parameters, split, stage_layers
from armillary.planning.training.train_case import TrainCase

CONTEXT_BYTES = 1.2e9
"""CUDA context, libraries and communication buffers per process"""
CPU_CONTEXT_BYTES = 0.7e9
"""torch, tokenizers and the loader of a process that computes on a CPU, measured on Linux"""
CPU_TRAINER_BYTES = {"fp32": 0.36e9, "16 bits": 0.27e9}
"""what a trainer uses beyond an engine's process: communication, autograd, recordings, and fragments of malloc, which
are smaller in 16 bits. It grows over the first hundred steps: in fp32 seven trainers used 0.70 to 0.83 GB beside their
tensors where an engine used 0.41 GB (two x86 cores, torch 2.13 for CPUs, 2026-11-17), in bf16 one trainer of 24 steps
some 0.1 GB less; with CUDA's libraries 0.83 and 0.64 GB in bf16. A fit on one small model"""
FRAGMENTATION = 0.04
"""share of the allocator's peak lost between blocks"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device of the fullest stage, at its peak: master weights are fp32 copies of lower-precision ones,
    buffers are all-gathered weights and gradient buckets, other is context, libraries and fragmentation."""

    weights: Array
    gradients: Array
    """in the dtype in which they are summed"""
    optimizer: Array
    master: Array
    activations: Array
    loss: Array
    buffers: Array
    other: Array
    host: Array
    """offloaded to host memory or disk; not part of the sum"""
    peak_at: Ints
    """index into peak_memory.SNAPSHOTS"""

    @property
    def allocated(self) -> Array:
        """What the framework's allocator counts: all but context and fragmentation."""
        return self.total - self.other

    @property
    def total(self) -> Array:
        return sum((getattr(self, name) for name in PARTS), np.zeros_like(self.weights))

    def parts(self, i: int = 0) -> dict[str, float]:
        """Bytes of one layout by name."""
        return {name: float(getattr(self, name)[i]) for name in PARTS}


PARTS = tuple(field.name for field in fields(Memory) if field.name not in ("host", "peak_at"))


def memory(case: TrainCase, layouts: Layouts) -> Memory:
    """Bytes of every layout, on the fullest of first, middle and last stage."""
    stages = split(case, layouts)
    params = device_parameters(case, layouts, stages)
    in_flight = micro_batches_in_flight(layouts, case.micro_batches(layouts))
    final = np.where(stages.is_exact, stages.least_last, stages.fullest)
    most = _stage(case, layouts, replace(params, layers=final), np.ones(len(layouts)), loss=True)
    at = np.nonzero(layouts.pp > 1)[0]
    if len(at):
        early = take_rows(replace(params, layers=stages.first), at)
        first = _stage(case, layouts.take(at), early, in_flight[at], loss=False)
        most = _with_larger(most, at, first, ~(most.total[at] > first.total))
    at = np.nonzero(stages.fullest > np.maximum(stages.first, final))[0]
    if len(at):
        later = np.where(layouts.schedule == GPIPE, in_flight, np.maximum(in_flight - stages.fullest_at, 1.0))
        inner = take_rows(replace(params, ends=params.ends * 0), at)
        middle = _stage(case, layouts.take(at), inner, later[at], loss=False)
        most = _with_larger(most, at, middle, middle.total > most.total[at])
    return most


def fits(case: TrainCase, layouts: Layouts, usage: Memory, limit: float | None = None) -> Bools:
    """Whether usage is within a device's memory, or `limit` where that is less, and the offloaded part within its share
    of the host."""
    most = min(limit or np.inf, case.cluster.chip.memory_bytes or np.inf)
    return (usage.total <= most) & (usage.host <= host_capacity(case, layouts))


def _with_larger(most: Memory, at: Ints, part: Memory, is_larger: Bools) -> Memory:
    """`most`, with the rows of `part`, which stand at `at`, where they are larger."""

    def put(values: Array, some: Array) -> Array:
        values = values.copy()
        values[at[is_larger]] = some[is_larger]
        return values

    return map_arrays(put, most, part)


def by_stage(case: TrainCase, layouts: Layouts) -> list[Memory]:
    """Every pipeline stage of a single layout: early ones have more micro-batches in flight, the first the embedding,
    the last the output projection and the logits."""
    assert len(layouts) == 1, "stages are listed for one layout"
    counts, fullest = stage_layers(case, layouts), device_parameters(case, layouts, split(case, layouts))
    first, stages = micro_batches_in_flight(layouts, case.micro_batches(layouts)), []
    for stage, layers in enumerate(counts):
        ends = fullest.ends if stage in (0, len(counts) - 1) else fullest.ends * 0
        in_flight = first if layouts.schedule[0] == GPIPE else np.maximum(first - stage, 1.0)
        params = replace(fullest, ends=ends, layers=np.array([layers]))
        stages.append(_stage(case, layouts, params, np.minimum(in_flight, first), loss=stage == len(counts) - 1))
    return stages


def _stage(case: TrainCase, layouts: Layouts, params: DeviceParameters, in_flight: Array, *, loss: bool) -> Memory:
    states = state_bytes(case, layouts)
    out, resident = optimizer_offloaded(layouts), resident_master_share(case, layouts, params)
    always = {
        "weights": weight_bytes(case, layouts, params, states),
        "optimizer": np.where(out, 0.0, sharded_bytes(case, layouts, params, states.optimizer, 1)),
        "master": np.where(out, resident, 1.0) * sharded_bytes(case, layouts, params, states.master, 1),
    }
    snapshots = Stage(
        case=case,
        layouts=layouts,
        params=params,
        states=states,
        in_flight=in_flight,
        micro_batches=case.micro_batches(layouts),
        makes_logits=loss,
    ).snapshots()
    peak = np.argmax([snapshot.total for snapshot in snapshots], axis=0)
    at_peak = {
        field.name: np.choose(peak, [getattr(snapshot, field.name) for snapshot in snapshots])
        for field in fields(Snapshot)
    }
    parts = always | at_peak | {"weights": always["weights"] + at_peak["weights"]}
    allocated = sum(parts.values(), np.zeros(len(layouts)))
    return Memory(
        **parts,
        other=context_bytes(case, layouts) + FRAGMENTATION * allocated,
        peak_at=peak,
        host=host_bytes(case, layouts, params, in_flight),
    )


def context_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes of a process before it trains anything, and beside its tensors."""

    if case.cluster.chip.kind != "cpu":
        return np.full(len(layouts), CONTEXT_BYTES)
    engine = case.measured.best("process", "resident_bytes", what="engine") if case.measured else None
    if engine is None:
        return np.full(len(layouts), CPU_CONTEXT_BYTES)
    return engine + np.where(WIDE[layouts.precision], CPU_TRAINER_BYTES["fp32"], CPU_TRAINER_BYTES["16 bits"])
