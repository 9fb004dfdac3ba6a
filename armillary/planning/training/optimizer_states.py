"""States: bytes a parameter of what training keeps for it, and among how many ranks each kind is shared out.

Weights, gradients, moments and master copies are 2 + 2 + 8 + 4 = 16 bytes a parameter in mixed precision; ZeRO stages
share them out one after the other (Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import Array, Bools, Layouts
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.train_case import TrainCase


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


def _alone(case: TrainCase, layouts: Layouts) -> Bools:
    """Where gradients need no summing, over ranks or micro-batches, and the software makes use of it."""
    single = (layouts.num_devices == 1) & (layouts.micro_batch * case.sequence >= case.batch_tokens)
    alone: Bools = single & case.software.narrow_alone
    return alone


def by_layer(case: TrainCase, layouts: Layouts) -> Bools:
    """Where torch's fully_shard keeps one copy of the weights, in fp32 shards, and gathers them layer by layer."""
    return _by_fully_shard(case, layouts) & (case.lora is None)


def frozen_by_layer(case: TrainCase, layouts: Layouts) -> Bools:
    """Where it does so with weights that adapters leave frozen, in the format they are multiplied in."""
    return _by_fully_shard(case, layouts) & (case.lora is not None)


def _by_fully_shard(case: TrainCase, layouts: Layouts) -> Bools:
    shared: Bools = (layouts.zero > 0) & (layouts.dp > 1)
    return shared & case.software.fully_shard & (not case.pure)


def casts_by_operator(case: TrainCase, layouts: Layouts) -> Bools:
    """Where weights are fp32 and autocast makes the copies that are multiplied, as they are needed (on a CPU)."""
    half: Bools = ~WIDE[layouts.precision] & ~by_layer(case, layouts)
    return half & case.software.plain_layers & (case.lora is None) & (not case.pure)


def sharers(layouts: Layouts) -> tuple[Array, Array]:
    """Ranks that share out the states of dense weights, and of routed ones."""
    dense = np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1)
    replicas = np.maximum(layouts.dp * layouts.cp * layouts.tp // (layouts.ep * layouts.expert_tp), 1)
    return dense, np.minimum(replicas, dense)


def trained(case: TrainCase, layouts: Layouts, mine: Held) -> tuple[Array, Array]:
    """(dense, routed) parameters of the device that get gradients."""
    if case.lora is None:
        return mine.dense, mine.routed
    return case.lora.held(layouts.tp) / layouts.pp, np.zeros(len(layouts))


def shared_out(case: TrainCase, layouts: Layouts, mine: Held, each: Array, stage: int) -> Array:
    """Bytes of a state of `each` bytes a trained parameter, which ZeRO shares out from `stage` on."""
    dense_shared, routed_shared = sharers(layouts)
    dense, routed = trained(case, layouts, mine)
    shared = layouts.zero >= stage
    total: Array = each * (dense / np.where(shared, dense_shared, 1) + routed / np.where(shared, routed_shared, 1))
    return total


def weight_bytes(case: TrainCase, layouts: Layouts, mine: Held, states: StateBytes) -> Array:
    """Of the weights that are multiplied and always there; fully_shard has none but its shards, where they are fp32."""
    dense_shared, routed_shared = sharers(layouts)
    third = (layouts.zero == 3) | frozen_by_layer(case, layouts)
    matrix = matrix_bytes(case, layouts, states)
    dense = mine.layer * mine.layers * matrix + mine.ends * states.weight
    if case.lora:
        dense = dense + case.lora.held(layouts.tp) * states.weight / layouts.pp
    routed = mine.routed * matrix
    total = dense / np.where(third, dense_shared, 1) + routed / np.where(third, routed_shared, 1)
    shards = np.where(states.master > 0, 0.0, shared_out(case, layouts, mine, states.weight, 1))
    bytes_: Array = np.where(by_layer(case, layouts), shards, total)
    return np.where(casts_by_operator(case, layouts), 0.0, bytes_)


def matrix_bytes(case: TrainCase, layouts: Layouts, states: StateBytes) -> Array:
    """Of one weight of a layer's matrices: frozen ones are kept in the format they are multiplied in, or fewer bits."""
    if case.lora is None:
        return states.weight
    return np.where(WIDE[layouts.precision] & (case.lora.base_bytes == 2.0), 4.0, case.lora.base_bytes)
