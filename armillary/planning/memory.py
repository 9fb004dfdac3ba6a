"""Memory: bytes on the fullest device, by what they are for, for every layout at once.

Weights, gradients, moments and master copies are 2 + 2 + 8 + 4 = 16 bytes a parameter in mixed precision; ZeRO stages
share them out one after the other (Rajbhandari et al., arXiv 1910.02054). The first and the last pipeline stage are
compared: one holds most micro-batches, the other the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from armillary.planning.activations import GPIPE, activation_bytes, in_flight
from armillary.planning.case import TrainCase
from armillary.planning.compute import WIDE
from armillary.planning.layouts import OFFLOADS, Array, Layouts
from armillary.planning.stages import split
from armillary.planning.weights import Held, held

CONTEXT_BYTES = 1.2e9
"""CUDA context, libraries and communication buffers of a process"""
FRAGMENTATION = 0.04
"""share of the allocator's peak that lies between blocks"""
LOGIT_BYTES, EAGER_LOGIT_BYTES, ADAPTED_LOGIT_BYTES = 6.0, 12.0, 16.0
"""of one logit in the loss: 16 bits as made and 32 as softmax; unfused also its gradient in 32 and 16; and with an
adapter on the output projection the adapter's share and the sum"""
_OPTIMIZER_OUT = [OFFLOADS.index(name) for name in ("optimizer", "both", "nvme")]
_ACTIVATIONS_OUT = [OFFLOADS.index(name) for name in ("activations", "both")]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device of the fullest stage."""

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

    @property
    def allocated(self) -> Array:
        """What the framework's allocator counts: all but context and fragmentation."""
        return self.total - self.other

    @property
    def total(self) -> Array:
        return sum((getattr(self, field.name) for field in fields(self)), np.zeros_like(self.weights))

    def parts(self, i: int = 0) -> dict[str, float]:
        """One layout's bytes by name."""
        return {field.name: float(getattr(self, field.name)[i]) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter of what training keeps for it."""

    weight: Array
    gradient: Array
    moments: Array
    master: Array


def state_bytes(case: TrainCase, layouts: Layouts) -> StateBytes:
    """Mixed precision 2, 2, 8, 4; fp32 4, 4, 8, 0; pure 16 bit 2, 2, 4, 0."""
    wide = WIDE[layouts.precision]
    two_or_four = np.where(wide, 4.0, 2.0)
    if case.pure:
        return StateBytes(weight=two_or_four, gradient=two_or_four, moments=2 * two_or_four, master=0.0 * two_or_four)
    gradient = np.where(wide, 4.0, np.where(_alone(case, layouts), 2.0, case.software.summed_bytes))
    master = np.where(wide, 0.0, 4.0)
    return StateBytes(weight=two_or_four, gradient=gradient, moments=0 * gradient + 8.0, master=master)


def _alone(case: TrainCase, layouts: Layouts) -> Array:
    """Where gradients need no summing, over ranks or micro-batches, and the software makes use of it."""
    single = (layouts.num_devices == 1) & (layouts.micro_batch * case.sequence >= case.batch_tokens)
    alone: Array = single & case.software.narrow_alone
    return alone


def memory(case: TrainCase, layouts: Layouts) -> Memory:
    """Bytes of every layout, on whichever of first and last stage has more."""
    stages = split(case.model, layouts)
    mine = held(case, layouts, stages)
    m = np.maximum(case.batch_tokens / (case.sequence * layouts.micro_batch * layouts.dp), 1.0)
    first = _stage(case, layouts, mine, in_flight(layouts, m), loss=False)
    last = _stage(case, layouts, mine, np.ones(len(layouts)), loss=True)
    worse = (last.total > first.total) | (layouts.pp == 1)
    return Memory(**{field.name: np.where(worse, getattr(last, field.name), getattr(first, field.name))
                     for field in fields(Memory)})  # fmt: skip


def by_stage(case: TrainCase, layouts: Layouts) -> list[Memory]:
    """Every pipeline stage of a single layout: early ones hold more micro-batches, the first the embedding, the last
    the output projection and the logits."""
    assert len(layouts) == 1, "stages are listed for one layout"
    stages, pp = split(case.model, layouts), int(layouts.pp[0])
    whole = held(case, layouts, stages)
    m = np.maximum(case.batch_tokens / (case.sequence * layouts.micro_batch * layouts.dp), 1.0)
    first, found = in_flight(layouts, m), []
    for stage in range(pp):
        ends = whole.ends if stage in (0, pp - 1) else whole.ends * 0
        layers = stages.fullest if stages.even[0] or stage < pp - 1 else np.maximum(stages.least_last, 1.0)
        flying = first if layouts.schedule[0] == GPIPE else np.maximum(first - stage, 1.0)
        mine = replace(whole, ends=ends, layers=layers)
        found.append(_stage(case, layouts, mine, np.minimum(flying, first), loss=stage == pp - 1))
    return found


def _stage(case: TrainCase, layouts: Layouts, mine: Held, flying: Array, *, loss: bool) -> Memory:
    states = state_bytes(case, layouts)
    dense_shared, routed_shared = _sharers(layouts)
    out = np.isin(layouts.offload, _OPTIMIZER_OUT)
    trained, weights = _trained(case, layouts, mine), _weights(case, layouts, mine, states)

    def shared_out(each: Array, stage: int) -> Array:
        shared = layouts.zero >= stage
        dense = trained[0] / np.where(shared, dense_shared, 1)
        return each * (dense + trained[1] / np.where(shared, routed_shared, 1))

    activations = activation_bytes(case, layouts, mine.layers, flying)
    two_layers = np.minimum(activations, 2 * activations / np.maximum(mine.layers, 1))
    activations = np.where(np.isin(layouts.offload, _ACTIVATIONS_OUT), two_layers, activations)
    parts = {
        "weights": weights,
        "gradients": shared_out(states.gradient, 2),
        "optimizer": np.where(out, 0.0, shared_out(states.moments, 1)),
        "master": np.where(out, 0.0, shared_out(states.master, 1)),
        "activations": activations,
        "loss": _loss(case, layouts) if loss else np.zeros(len(layouts)),
        "buffers": _buffers(case, layouts, mine, states),
    }
    allocated = sum(parts.values(), np.zeros(len(layouts)))
    return Memory(**parts, other=CONTEXT_BYTES + FRAGMENTATION * allocated)


def _sharers(layouts: Layouts) -> tuple[Array, Array]:
    """Ranks that share out the states of dense weights, and of routed ones."""
    dense = np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1)
    replicas = np.maximum(layouts.dp * layouts.cp * layouts.tp // (layouts.ep * layouts.expert_tp), 1)
    return dense, np.minimum(replicas, dense)


def _trained(case: TrainCase, layouts: Layouts, mine: Held) -> tuple[Array, Array]:
    """(dense, routed) parameters of the device that get gradients."""
    if case.lora is None:
        return mine.dense, mine.routed
    return case.lora.held(layouts.tp) / layouts.pp, np.zeros(len(layouts))


def _weights(case: TrainCase, layouts: Layouts, mine: Held, states: StateBytes) -> Array:
    dense_shared, routed_shared = _sharers(layouts)
    third = layouts.zero == 3
    matrix = _matrix_bytes(case, layouts, states)
    dense = mine.layer * mine.layers * matrix + mine.ends * states.weight
    if case.lora:
        dense = dense + case.lora.held(layouts.tp) * states.weight / layouts.pp
    routed = mine.routed * matrix
    total: Array = dense / np.where(third, dense_shared, 1) + routed / np.where(third, routed_shared, 1)
    return total


def _matrix_bytes(case: TrainCase, layouts: Layouts, states: StateBytes) -> Array:
    """Of one weight of a layer's matrices: frozen ones are kept in the format they are multiplied in, or fewer bits."""
    if case.lora is None:
        return states.weight
    return np.where(WIDE[layouts.precision] & (case.lora.base_bytes == 2.0), 4.0, case.lora.base_bytes)


def _loss(case: TrainCase, layouts: Layouts) -> Array:
    tokens = layouts.micro_batch * case.sequence / layouts.cp
    rows = np.minimum(tokens, case.loss_chunk) if case.loss_chunk else tokens
    return logit_bytes(case) * rows * case.model.vocab / layouts.tp * (1 + case.extra_heads)


def logit_bytes(case: TrainCase) -> float:
    """Bytes that the loss keeps of one logit."""
    if case.software.fused_layers:
        return LOGIT_BYTES
    return ADAPTED_LOGIT_BYTES if case.lora else EAGER_LOGIT_BYTES


def _buffers(case: TrainCase, layouts: Layouts, mine: Held, states: StateBytes) -> Array:
    """zero 3: two layers gathered and one layer's whole gradient (frozen layers have none); zero 1 and 2: a bucket on
    its way."""
    dense_shared, routed_shared = _sharers(layouts)
    layer = mine.layer * (1 - 1 / dense_shared) + mine.experts * (1 - 1 / routed_shared)  # beside the device's own part
    weight = _matrix_bytes(case, layouts, states)
    whole = np.minimum(2.0, mine.layers) * layer * weight + (0.0 if case.lora else layer * states.gradient)
    trained = sum(_trained(case, layouts, mine), np.zeros(len(layouts)))
    bucket = np.where(layouts.zero > 0, np.minimum(2.0 * layouts.bucket_bytes, trained * states.gradient), 0.0)
    bytes_: Array = np.where(layouts.zero == 3, whole, bucket)
    return bytes_
