"""Offload: which bytes wait on the host or on disk instead of on the device, and what a step then stands still for.

Gradients go down and weights come up while AdamW runs on the host, whose memory is the narrowest part; our trainer on
GPUs that hold whole weights hides it behind the next forward pass, whose first layer waits for the first weights only.
Activations travel beside the passes; what exceeds them shows.
"""

from __future__ import annotations

import numpy as np

from armillary.planning.device_model.layout_arrays import OFFLOADS, PRECISIONS, Array, Bools, Layouts
from armillary.planning.training.activations import stored_layer_bytes
from armillary.planning.training.optimizer_states import shared_out, sharers, trained
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.train_case import TrainCase
from armillary.spec import catalogue

HOST_STATE_BYTES = 12.0
"""a parameter on the host: its weight and two moments in fp32"""
HOST_BYTES = 36.0
"""of host memory moved for a parameter: AdamW reads 16 and writes 12, the link writes a gradient and reads a weight"""
CPU_BYTES = 44.0
"""where the device is a CPU, which copies gradients and weights itself"""
HOST_BYTES_PER_S = 100e9
"""host memory bandwidth that AdamW reaches for one device's share, where nobody measured it"""
DISK_BYTES = 24.0
"""of a file read and written for a parameter"""
MAPPED_BYTES_PER_S = 6.3e9
"""of a mapped file at most, also where memory could hold it: taken from one machine (16 cores beside an H200, other
processes running: 6.3 GB/s of 27.8 GB a step, 7.1 of 9.7)"""
LINK_SHARE, UNKNOWN_LINK = 0.8, 12e9
"""of a link's peak that copies reach; bytes/s where nothing is known"""
STAGING = 2 * (1 << 25) * 4.0
"""the buffers that gradients come down to, at most"""
_OPTIMIZER = [OFFLOADS.index(name) for name in ("optimizer", "both", "nvme")]
_ACTIVATIONS = [OFFLOADS.index(name) for name in ("activations", "both")]
_NVME, _BF16 = OFFLOADS.index("nvme"), PRECISIONS.index("bf16")


def optimizer_out(layouts: Layouts) -> Bools:
    out: Bools = np.isin(layouts.offload, _OPTIMIZER)
    return out


def activations_out(layouts: Layouts) -> Bools:
    out: Bools = np.isin(layouts.offload, _ACTIVATIONS)
    return out


# --- bytes


def master_stays(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """The share of fp32 weights that the device keeps though the optimiser is out. Our trainer: all where they are what
    is cut or cast (several devices, a CPU, other formats than bf16); on one GPU the embedding alone, which is looked up
    in fp32."""
    if not case.software.fully_shard:
        return np.zeros(len(layouts))
    leaves = (layouts.num_devices == 1) & (layouts.precision == _BF16) & (case.lora is None)
    leaves = leaves & (not case.software.plain_layers) & (not case.pure)
    # untied, it has no 16-bit form beside it
    table = mine.ends if case.model.tied else mine.ends / 4
    share: Array = np.where(leaves, table / np.maximum(mine.total, 1.0), 1.0)
    return share


def host_bytes(case: TrainCase, layouts: Layouts, mine: Held, flying: Array) -> Array:
    """What waits in host memory or on disk."""
    each = np.full(len(layouts), HOST_STATE_BYTES)
    states = shared_out(case, layouts, mine, each, 1)
    staging = np.minimum(STAGING, 2 * states / HOST_STATE_BYTES * 4.0)
    moved = flying * _moved(case, layouts, mine.layers)
    total: Array = np.where(optimizer_out(layouts), states + staging, 0.0) + moved
    return total


def _moved(case: TrainCase, layouts: Layouts, layers: Array) -> Array:
    """Activations of a micro-batch that leave the device: all but the last layer's."""
    bytes_: Array = stored_layer_bytes(case, layouts) * np.maximum(layers - 1, 0.0)
    return np.where(activations_out(layouts), bytes_, 0.0)


# --- seconds


def offload_s(
    case: TrainCase, layouts: Layouts, mine: Held, micro_batches: Array, forward: Array, backward: Array
) -> Array:
    """What a step stands still: `forward` and `backward` are a micro-batch's passes."""
    moved = _moved(case, layouts, mine.layers)
    if case.cluster.chip.kind == "cpu":  # reads and writes them itself, out and back
        shown = 4 * moved / case.curves.bytes_per_s
    else:
        copied = moved / link_rate(case)
        shown = np.maximum(0.0, copied - forward) + np.maximum(0.0, copied - backward)
    seconds: Array = micro_batches * shown + optimizer_s(case, layouts, mine, forward)
    return seconds


def optimizer_s(case: TrainCase, layouts: Layouts, mine: Held, forward: Array) -> Array:
    """Of AdamW on the host, what the next forward pass does not hide: its layers follow the weights."""
    whole = host_adamw_s(case, layouts, mine)
    layers = np.maximum(mine.layers, 1.0)
    together = np.maximum(whole + forward / layers, whole / layers + forward)
    seconds: Array = np.where(_beside(case, layouts), together - forward, whole)
    return np.where(optimizer_out(layouts), seconds, 0.0)


def _beside(case: TrainCase, layouts: Layouts) -> Bools:
    """Where our trainer lets the host run beside the next step: one stage, weights whole between steps, plain layers
    that can wait for theirs."""
    sharded = (layouts.zero > 0) & (layouts.dp * layouts.cp > 1)
    able = case.software.fully_shard and case.cluster.chip.kind != "cpu" and not case.compiled
    beside: Bools = (layouts.pp == 1) & ~sharded & able
    return beside


def host_adamw_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """bytes / bandwidth of the host's memory, the link or the disk, whichever is slowest."""
    dense_shared, routed_shared = (np.where(layouts.zero > 0, n, 1) for n in sharers(layouts))
    dense, routed = trained(case, layouts, mine)
    count = dense / dense_shared + routed / routed_shared
    if case.cluster.chip.kind == "cpu":
        seconds = count * CPU_BYTES / case.curves.bytes_per_s
    else:
        seconds = np.maximum(count * HOST_BYTES / host_rate(case), count * 4.0 / link_rate(case))
    rate = np.where(_is_cached(case, count), MAPPED_BYTES_PER_S, min(MAPPED_BYTES_PER_S, _disk_rate(case)))
    disk = count * DISK_BYTES / rate
    found: Array = np.where(layouts.offload == _NVME, np.maximum(seconds, disk), seconds)
    return found


def link_rate(case: TrainCase) -> float:
    """Bytes/s between host and device, one way: measured where it was, else a share of the link's peak."""
    points = case.measured.points.get("host_copy", ()) if case.measured else ()
    rates = [float(point["bytes_per_s"]) for point in points if point.get("pinned")]
    link = catalogue.links().get(case.cluster.chip.host_link)
    peak = link.bytes_per_s if link and link.bytes_per_s else UNKNOWN_LINK
    return max(rates) if rates else peak * LINK_SHARE


def host_rate(case: TrainCase) -> float:
    """Bytes/s that AdamW on the host moves: measured where it was."""
    found = case.measured.best("host_copy", "bytes_per_s", direction="adamw") if case.measured else None
    return found or HOST_BYTES_PER_S


def _disk_rate(case: TrainCase) -> float:
    """Of one device's share of its node's disks, reading and writing at once."""
    node = case.cluster.node
    tier = catalogue.storage(node.storage) if node and node.storage else None
    if node is None or tier is None:
        return MAPPED_BYTES_PER_S
    return min(tier.read_bytes_per_s, tier.write_bytes_per_s) * node.num_drives / node.num_chips


def host_room(case: TrainCase, layouts: Layouts) -> Array:
    """Bytes of a device's share of its node's memory, or of its disks; endless where that is not known."""
    node = case.cluster.node
    if node is None:
        return np.full(len(layouts), np.inf)
    memory, disks = ((size or np.inf) / node.num_chips for size in (node.memory_bytes, node.storage_bytes))
    return np.where(layouts.offload == _NVME, disks, memory)


def _is_cached(case: TrainCase, count: Array) -> Bools:
    """Whether the system can keep the file in memory: it then reads no disk, and writes to it beside the steps."""
    node = case.cluster.node
    room = node.memory_bytes / node.num_chips if node and node.memory_bytes else 0.0
    cached: Bools = count * HOST_STATE_BYTES < 0.8 * room
    return cached
