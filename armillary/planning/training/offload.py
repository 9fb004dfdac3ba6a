"""Offload: which bytes are in host memory or on disk instead of on the device, and how long a step waits for them.

Gradients go to the host and weights come back while AdamW runs there, bound by host memory bandwidth. On GPUs with full
weights our trainer hides it behind the next forward pass, whose first layer waits only for the first weights.
Activations are copied beside forward and backward pass; only the excess is exposed.
"""

import numpy as np

from armillary.planning.device_model.vectorised_layouts import OFFLOADS, PRECISIONS, Array, Bools, Layouts
from armillary.planning.training.activations import stored_layer_bytes
from armillary.planning.training.optimizer_states import sharded_bytes, updated_parameters
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue

HOST_STATE_BYTES = 12.0
"""host bytes per parameter: its weight and two moments in fp32"""
HOST_BYTES = 36.0
"""host memory traffic per parameter: AdamW reads 16 and writes 12, the link writes a gradient and reads a weight"""
CPU_BYTES = 44.0
"""the same where the device is a CPU, which copies gradients and weights itself"""
HOST_BYTES_PER_S = 100e9
"""host memory bandwidth that AdamW reaches per device, where it was not measured"""
DISK_BYTES = 24.0
"""bytes of a file read and written per parameter"""
MAPPED_BYTES_PER_S = 6.3e9
"""largest rate of a memory-mapped file, even where the page cache holds it: measured on one machine (16 cores beside an
H200, other processes running: 6.3 GB/s for 27.8 GB per step, 7.1 for 9.7)"""
LINK_SHARE, UNKNOWN_LINK = 0.8, 12e9
"""share of a link's peak that copies reach; bytes/s of an unknown link"""
STAGING = 2 * (1 << 25) * 4.0
"""most bytes of the pinned buffers that receive gradients"""
_OPTIMIZER = [OFFLOADS.index(name) for name in ("optimizer", "both", "nvme")]
_ACTIVATIONS = [OFFLOADS.index(name) for name in ("activations", "both")]
_NVME, _BF16 = OFFLOADS.index("nvme"), PRECISIONS.index("bf16")


def optimizer_offloaded(layouts: Layouts) -> Bools:
    return np.isin(layouts.offload, _OPTIMIZER)


def activations_offloaded(layouts: Layouts) -> Bools:
    return np.isin(layouts.offload, _ACTIVATIONS)


# --- bytes


def resident_master_share(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Share of the fp32 master weights that stays on the device though the optimizer is offloaded. Our trainer: all,
    where they are sharded or cast (several devices, a CPU, dtypes other than bf16); on one GPU only the embedding,
    which is looked up in fp32."""
    if not case.software.fully_shard:
        return np.zeros(len(layouts))
    leaves = (layouts.num_devices == 1) & (layouts.precision == _BF16) & (case.lora is None)
    leaves = leaves & (not case.software.eager_layers) & (not case.pure)
    # an untied embedding has no 16-bit form beside it
    table = params.ends if case.model.tied else params.ends / 4
    return np.where(leaves, table / np.maximum(params.total, 1.0), 1.0)


def host_bytes(case: TrainCase, layouts: Layouts, params: DeviceParameters, in_flight: Array) -> Array:
    """Bytes in host memory or on disk per device."""
    states = sharded_bytes(case, layouts, params, np.full(len(layouts), HOST_STATE_BYTES), 1)
    staging = np.minimum(STAGING, 2 * states / HOST_STATE_BYTES * 4.0)
    moved = in_flight * _moved(case, layouts, params.layers)
    return np.where(optimizer_offloaded(layouts), states + staging, 0.0) + moved


def _moved(case: TrainCase, layouts: Layouts, layers: Array) -> Array:
    """Bytes of activations per micro-batch that leave the device: all but the last layer's."""
    bytes_: Array = stored_layer_bytes(case, layouts) * np.maximum(layers - 1, 0.0)
    return np.where(activations_offloaded(layouts), bytes_, 0.0)


# --- seconds


def offload_s(
    case: TrainCase, layouts: Layouts, params: DeviceParameters, micro_batches: Array, forward: Array, backward: Array
) -> Array:
    """Seconds that a step waits; `forward` and `backward` are the passes of a micro-batch."""
    moved = _moved(case, layouts, params.layers)
    if case.cluster.chip.kind == "cpu":  # it copies them itself, out and back
        exposed = 4 * moved / case.curves.bytes_per_s
    else:
        copied = moved / link_rate(case)
        exposed = np.maximum(0.0, copied - forward) + np.maximum(0.0, copied - backward)
    return micro_batches * exposed + optimizer_s(case, layouts, params, forward)


def optimizer_s(case: TrainCase, layouts: Layouts, params: DeviceParameters, forward: Array) -> Array:
    """Time of AdamW on the host that the next forward pass does not hide: its layers wait for their weights."""
    adamw = host_adamw_s(case, layouts, params)
    layers = np.maximum(params.layers, 1.0)
    overlapped = np.maximum(adamw + forward / layers, adamw / layers + forward) - forward
    seconds: Array = np.where(_overlaps(case, layouts), overlapped, adamw)
    return np.where(optimizer_offloaded(layouts), seconds, 0.0)


def _overlaps(case: TrainCase, layouts: Layouts) -> Bools:
    """Whether our trainer runs AdamW on the host beside the next step: a single stage, unsharded weights, and layers
    that are not compiled, which can wait for their weights."""
    sharded = (layouts.zero > 0) & (layouts.dp * layouts.cp > 1)
    able = case.software.fully_shard and case.cluster.chip.kind != "cpu" and not case.compiled
    return (layouts.pp == 1) & ~sharded & able


def host_adamw_s(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """Bytes / bandwidth of host memory, link or disk, whichever is slowest."""
    count = updated_parameters(case, layouts, params)
    if case.cluster.chip.kind == "cpu":
        seconds = count * CPU_BYTES / case.curves.bytes_per_s
    else:
        seconds = np.maximum(count * HOST_BYTES / host_rate(case), count * 4.0 / link_rate(case))
    rate = np.where(_is_cached(case, count), MAPPED_BYTES_PER_S, min(MAPPED_BYTES_PER_S, _disk_rate(case)))
    return np.where(layouts.offload == _NVME, np.maximum(seconds, count * DISK_BYTES / rate), seconds)


def link_rate(case: TrainCase) -> float:
    """Bytes/s between host and device in one direction: measured, else a share of the link's peak."""
    points = case.measured.points.get("host_copy", ()) if case.measured else ()
    rates = [float(point["bytes_per_s"]) for point in points if point.get("pinned")]
    link = catalogue.find_link(case.cluster.chip.host_link)
    peak = link.bytes_per_s if link and link.bytes_per_s else UNKNOWN_LINK
    return max(rates) if rates else peak * LINK_SHARE


def host_rate(case: TrainCase) -> float:
    """Bytes/s that AdamW moves on the host: measured, else a default."""
    measured = case.measured.best("host_copy", "bytes_per_s", direction="adamw") if case.measured else None
    return measured or HOST_BYTES_PER_S


def _disk_rate(case: TrainCase) -> float:
    """Bytes/s per device of its node's disks, reading and writing at once."""
    node = case.cluster.node
    tier = catalogue.storage(node.storage) if node and node.storage else None
    if node is None or tier is None:
        return MAPPED_BYTES_PER_S
    return min(tier.read_bytes_per_s, tier.write_bytes_per_s) * node.num_drives / node.num_chips


def host_capacity(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes per device of its node's memory, or of its disks; infinite where unknown."""
    node = case.cluster.node
    if node is None:
        return np.full(len(layouts), np.inf)
    memory, disks = ((size or np.inf) / node.num_chips for size in (node.memory_bytes, node.storage_bytes))
    return np.where(layouts.offload == _NVME, disks, memory)


def _is_cached(case: TrainCase, count: Array) -> Bools:
    """Whether the page cache can hold the file: then no disk is read, and writes run beside the steps."""
    node = case.cluster.node
    memory = node.memory_bytes / node.num_chips if node and node.memory_bytes else 0.0
    return count * HOST_STATE_BYTES < 0.8 * memory
