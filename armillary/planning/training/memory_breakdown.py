"""Memory: bytes on the fullest device, by what they are for, for every layout at once.

What training keeps for every parameter is always there (planning.states); gradients, activations, logits and gathered
weights come and go (planning.moments), and the fullest moment counts. The first and the last pipeline stage are
compared: one holds most micro-batches, the other the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import Array, Bools, Ints, Layouts
from armillary.planning.training.activations import GPIPE, in_flight
from armillary.planning.training.offload import host_bytes, host_room, master_stays, optimizer_out
from armillary.planning.training.optimizer_states import shared_out, state_bytes, weight_bytes
from armillary.planning.training.parameters_per_device import Held, held
from armillary.planning.training.peak_memory import Moment, Stage
from armillary.planning.training.stages import split, stage_layers
from armillary.planning.training.train_case import TrainCase

CONTEXT_BYTES = 1.2e9
"""CUDA context, libraries and communication buffers of a process"""
CPU_CONTEXT_BYTES = 0.7e9
"""torch, tokenizers and the loader of a process that computes on a CPU, as seen on Linux"""
CPU_TRAINER_BYTES = {"fp32": 0.36e9, "16 bits": 0.27e9}
"""of them, what a trainer takes beyond an engine's process: exchanges, autograd, recordings, and blocks that malloc
cannot join, which are smaller in 16 bits. It grows over the first hundred steps: in fp32 seven trainers held 0.70 to
0.83 GB beside their tensors where an engine held 0.41 GB (two x86 cores, torch 2.13 for CPUs, 2026-11-17), in bf16 one
trainer of 24 steps some 0.1 GB less; with CUDA's libraries 0.83 and 0.64 GB in bf16. A fit on one small model"""
FRAGMENTATION = 0.04
"""share of the allocator's peak that lies between blocks"""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device of the fullest stage, at its fullest moment."""

    weights: Array
    """in the format they are used in"""
    gradients: Array
    """in the format they are summed in"""
    optimizer: Array
    """AdamW's two moments"""
    master: Array
    """fp32 copies of lower-precision weights"""
    activations: Array
    """kept for the backward pass"""
    loss: Array
    """logits and what the loss keeps"""
    buffers: Array
    """gathered weights and gradient buckets"""
    other: Array
    """context, libraries, fragmentation"""
    host: Array
    """what waits in host memory or on disk instead, no part of the sum"""
    moment: Ints
    """which moment it is, of moments.MOMENTS"""

    @property
    def allocated(self) -> Array:
        """What the framework's allocator counts: all but context and fragmentation."""
        return self.total - self.other

    @property
    def total(self) -> Array:
        return sum((getattr(self, name) for name in PARTS), np.zeros_like(self.weights))

    def parts(self, i: int = 0) -> dict[str, float]:
        """One layout's bytes by name."""
        return {name: float(getattr(self, name)[i]) for name in PARTS}


PARTS = tuple(field.name for field in fields(Memory) if field.name not in ("host", "moment"))


def memory(case: TrainCase, layouts: Layouts) -> Memory:
    """Bytes of every layout, on whichever of first, fullest and last stage has most."""
    stages = split(case, layouts)
    mine = held(case, layouts, stages)
    flying = in_flight(layouts, _micro_batches(case, layouts))
    first = _stage(case, layouts, replace(mine, layers=stages.first), flying, loss=False)
    final = np.where(stages.settled, stages.least_last, stages.fullest)
    last = _stage(case, layouts, replace(mine, layers=final), np.ones(len(layouts)), loss=True)
    most = _larger(first, last, (last.total > first.total) | (layouts.pp == 1))
    if (inner := stages.fullest > np.maximum(stages.first, final)).any():
        later = np.where(layouts.schedule == GPIPE, flying, np.maximum(flying - stages.fullest_at, 1.0))
        middle = _stage(case, layouts, replace(mine, ends=mine.ends * 0), later, loss=False)
        most = _larger(most, middle, inner & (middle.total > most.total))
    return most


def fits(case: TrainCase, layouts: Layouts, held: Memory, room: float | None = None) -> Bools:
    """Within a device's memory, or `room` where that is less, and what waits elsewhere within its share of the host."""
    most = min(room or np.inf, case.cluster.chip.memory_bytes or np.inf)
    within: Bools = (held.total <= most) & (held.host <= host_room(case, layouts))
    return within


def _larger(one: Memory, other: Memory, is_other: Bools) -> Memory:
    return Memory(
        **{
            field.name: np.where(is_other, getattr(other, field.name), getattr(one, field.name))
            for field in fields(Memory)
        }
    )


def by_stage(case: TrainCase, layouts: Layouts) -> list[Memory]:
    """Every pipeline stage of a single layout: early ones hold more micro-batches, the first the embedding, the last
    the output projection and the logits."""
    assert len(layouts) == 1, "stages are listed for one layout"
    counts, whole = stage_layers(case, layouts), held(case, layouts, split(case, layouts))
    first, found = in_flight(layouts, _micro_batches(case, layouts)), []
    for stage, layers in enumerate(counts):
        ends = whole.ends if stage in (0, len(counts) - 1) else whole.ends * 0
        flying = first if layouts.schedule[0] == GPIPE else np.maximum(first - stage, 1.0)
        mine = replace(whole, ends=ends, layers=np.array([layers]))
        found.append(_stage(case, layouts, mine, np.minimum(flying, first), loss=stage == len(counts) - 1))
    return found


def _micro_batches(case: TrainCase, layouts: Layouts) -> Array:
    """Of a rank's step."""
    number: Array = np.maximum(case.batch_tokens / (case.sequence * layouts.micro_batch * layouts.dp), 1.0)
    return number


def _stage(case: TrainCase, layouts: Layouts, mine: Held, flying: Array, *, loss: bool) -> Memory:
    states = state_bytes(case, layouts)
    out, stays = optimizer_out(layouts), master_stays(case, layouts, mine)
    always = {
        "weights": weight_bytes(case, layouts, mine, states),
        "optimizer": np.where(out, 0.0, shared_out(case, layouts, mine, states.moments, 1)),
        "master": np.where(out, stays, 1.0) * shared_out(case, layouts, mine, states.master, 1),
    }
    moments = Stage(
        case=case,
        layouts=layouts,
        mine=mine,
        states=states,
        flying=flying,
        micro_batches=_micro_batches(case, layouts),
        makes_logits=loss,
    ).moments()
    fullest = np.argmax([moment.total for moment in moments], axis=0)
    then = {
        field.name: np.choose(fullest, [getattr(moment, field.name) for moment in moments]) for field in fields(Moment)
    }
    parts = always | then | {"weights": always["weights"] + then["weights"]}
    allocated = sum(parts.values(), np.zeros(len(layouts)))
    return Memory(
        **parts,
        other=context_bytes(case, layouts) + FRAGMENTATION * allocated,
        moment=fullest,
        host=host_bytes(case, layouts, mine, flying),
    )


def context_bytes(case: TrainCase, layouts: Layouts) -> Array:
    """What a process holds before it trains anything, and beside its tensors."""
    if case.cluster.chip.kind != "cpu":
        return np.full(len(layouts), CONTEXT_BYTES)
    engine = case.measured.best("process", "resident_bytes", what="engine") if case.measured else None
    if engine is None:
        return np.full(len(layouts), CPU_CONTEXT_BYTES)
    return engine + np.where(WIDE[layouts.precision], CPU_TRAINER_BYTES["fp32"], CPU_TRAINER_BYTES["16 bits"])
