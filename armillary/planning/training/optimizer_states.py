"""Bytes per parameter of what training stores, and the number of ranks that shard each kind.

Weights, gradients, moments and master weights are 2 + 2 + 8 + 4 = 16 bytes per parameter in mixed precision; the ZeRO
stages shard them one after the other (Rajbhandari et al., arXiv 1910.02054).
"""

from dataclasses import dataclass

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import Array, Bools, Layouts
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes per parameter, by kind of state."""

    weight: Array
    gradient: Array
    optimizer: Array
    master: Array


def state_bytes(case: TrainCase, layouts: Layouts) -> StateBytes:
    """Weight, gradient, moments, master: mixed precision 2, 2, 8, 4; fp32 4, 4, 8, 0; pure 16 bit 2, 2, 4, 0."""
    wide = WIDE[layouts.precision]
    two_or_four = np.where(wide, 4.0, 2.0)
    if case.pure:
        return StateBytes(weight=two_or_four, gradient=two_or_four, optimizer=2 * two_or_four, master=0.0 * two_or_four)
    gradient = np.where(wide, 4.0, np.where(_alone(case, layouts), 2.0, case.software.summed_bytes))
    master = np.where(wide, 0.0, 4.0)
    return StateBytes(weight=two_or_four, gradient=gradient, optimizer=0 * gradient + 8.0, master=master)


def _alone(case: TrainCase, layouts: Layouts) -> Bools:
    """Whether gradients are neither summed over ranks nor accumulated over micro-batches, and the software uses it."""
    single = (layouts.num_devices == 1) & (layouts.micro_batch * case.sequence >= case.batch_tokens)
    return single & case.software.narrow_alone


def fsdp_full(case: TrainCase, layouts: Layouts) -> Bools:
    """Whether fully_shard stores the weights only as fp32 shards and all-gathers them layer by layer."""
    return _uses_fsdp(case, layouts) & (case.lora is None)


def fsdp_frozen(case: TrainCase, layouts: Layouts) -> Bools:
    """Whether fully_shard does so with frozen weights, in the dtype of their GEMMs."""
    return _uses_fsdp(case, layouts) & (case.lora is not None)


def _uses_fsdp(case: TrainCase, layouts: Layouts) -> Bools:
    shared: Bools = (layouts.zero > 0) & (layouts.dp > 1)
    return shared & case.software.fully_shard & (not case.pure)


def casts_by_operator(case: TrainCase, layouts: Layouts) -> Bools:
    """Whether weights are fp32 and autocast makes the 16-bit copies as they are needed (on a CPU)."""
    narrow: Bools = ~WIDE[layouts.precision] & ~fsdp_full(case, layouts)
    return narrow & case.software.eager_layers & (case.lora is None) & (not case.pure)


def trained_parameters(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> tuple[Array, Array]:
    """(dense, routed) parameters of the device with gradients."""
    if case.lora is None:
        return params.dense, params.routed
    return case.lora.per_device(layouts.tp) / layouts.pp, np.zeros(len(layouts))


def updated_parameters(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Parameters whose optimizer states are on the device, which it updates."""
    dense, routed = trained_parameters(case, layouts, params)
    dense_shared, routed_shared = layouts.state_shards
    return dense / dense_shared + routed / routed_shared


def sharded_bytes(case: TrainCase, layouts: Layouts, params: DeviceParameters, each: Array, stage: int) -> Array:
    """Bytes of a state with `each` bytes per trained parameter, sharded from ZeRO `stage` on."""
    dense_shared, routed_shared = layouts.state_shards
    dense, routed = trained_parameters(case, layouts, params)
    shared = layouts.zero >= stage
    return each * (dense / np.where(shared, dense_shared, 1) + routed / np.where(shared, routed_shared, 1))


def weight_bytes(case: TrainCase, layouts: Layouts, params: DeviceParameters, states: StateBytes) -> Array:
    """Weights in the dtype of the GEMMs that are always there; fully_shard stores only its shards, if they are fp32."""
    dense_shared, routed_shared = layouts.state_shards
    third = (layouts.zero == 3) | fsdp_frozen(case, layouts)
    matrix = matrix_bytes(case, layouts, states)
    dense = params.layer * params.layers * matrix + params.ends * states.weight
    if case.lora:
        dense = dense + case.lora.per_device(layouts.tp) * states.weight / layouts.pp
    routed = params.routed * matrix
    total = dense / np.where(third, dense_shared, 1) + routed / np.where(third, routed_shared, 1)
    shards = np.where(states.master > 0, 0.0, sharded_bytes(case, layouts, params, states.weight, 1))
    bytes_: Array = np.where(fsdp_full(case, layouts), shards, total)
    return np.where(casts_by_operator(case, layouts), 0.0, bytes_)


def matrix_bytes(case: TrainCase, layouts: Layouts, states: StateBytes) -> Array:
    """Bytes per weight of a layer's matrices: frozen ones are stored in the dtype of their GEMMs, or in fewer bits."""

    if case.lora is None:
        return states.weight
    return np.where(WIDE[layouts.precision] & (case.lora.base_bytes == 2.0), 4.0, case.lora.base_bytes)
