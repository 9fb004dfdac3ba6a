"""Overhead: the optimiser, launches the device waits for, and what a step costs by itself."""

from __future__ import annotations

import numpy as np

from armillary.planning.device_model.layout_arrays import FULL, Array, Layouts
from armillary.planning.training.compute import Work
from armillary.planning.training.fp8_fp4 import weights_s
from armillary.planning.training.offload import optimizer_out
from armillary.planning.training.parameters_per_device import Held
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.layer_ops import adamw

STEP_S = 5e-3
"""reading a batch, the learning rate, logging and a barrier, once a step"""
STRAGGLE = 0.008
"""slowest of many nodes against their mean, a doubling of nodes: what synchronous steps lose at scale"""
JITTER = 0.08
"""the same of ranks on one processor, a doubling of ranks: no core is left for the threads of their exchanges, the
loader and the system, so now one rank is late and now another (3 to 20 % of a step between two), and all wait"""
GRAD_NORM_BYTES = 4
"""read again of every gradient for its norm"""
RECORDED = 2.8
"""calls of torch for each that moves something: views, and operators that call another (2.5 to 3.1 were recorded)"""
GRAPH_LAUNCH_S = 1.1e-6
"""a kernel launched from a CUDA graph (benchmarks/ceilings_h200.md)"""


def optimizer_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """AdamW over the weights this rank updates, and one more reading of the gradients for their norm: bytes /
    bandwidth; the norm alone where states wait on the host (planning.offload). New weights are rounded once."""
    replicas = np.maximum(layouts.dp * layouts.cp * layouts.tp // (layouts.ep * layouts.expert_tp), 1)
    shared = np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1)
    count = mine.dense / shared + mine.routed / np.where(layouts.zero > 0, np.minimum(replicas, shared), 1)
    if case.lora is not None:
        count = case.lora.held(layouts.tp) / layouts.pp / shared
    one = adamw("optimizer", 1, weight_dtype="bf16")
    each = np.where(optimizer_out(layouts), 0.0, one.bytes) + GRAD_NORM_BYTES
    seconds: Array = count * each / case.curves.bytes_per_s * case.software.memory
    return seconds + weights_s(case, layouts, mine)


def straggle_s(case: TrainCase, layouts: Layouts, busy: Array) -> Array:
    """Every exchange waits for the slowest node: share·log2(nodes) of the busy time; on a processor for the slowest
    rank."""
    if case.software.plain_layers:
        late: Array = JITTER * np.log2(layouts.num_devices) * busy
        return late
    per_node = case.cluster.node.num_chips if case.cluster.node else case.cluster.fast_domain
    nodes = np.maximum(layouts.num_devices / max(per_node, 1), 1.0)
    seconds: Array = STRAGGLE * np.log2(nodes) * busy
    return seconds


def launch_s(case: TrainCase, layouts: Layouts, work: Work, device: Array) -> Array:
    """Time by which a micro-batch's launches outlast its kernels: the host runs ahead, so only the excess shows; where
    routing waits for the host in every layer, it cannot, and all of it shows. Experts in one kernel read on the device
    how many rows they have: then only exchanges wait. On a processor the host is the device: every call shows."""
    if case.software.plain_layers:
        forwards = 1 + np.where(layouts.recompute == FULL, 1.0 / layouts.recompute_every, 0.0)
        calls = RECORDED * (work.kernels_forward * forwards + work.kernels_backward)
        spent: Array = calls * case.curves.call_s * case.software.host
        return spent
    each = GRAPH_LAUNCH_S if case.software.graphs else case.curves.launch_s
    host = (work.kernels_forward + work.kernels_backward) * each * case.software.host
    routed = case.model.num_moe_layers > 0 and not case.software.flex_dispatch
    waits = routed & ((layouts.ep > 1) | (not case.software.fused_experts))
    seconds: Array = np.where(waits, host, np.maximum(0.0, host - device))
    return seconds


def data_s(case: TrainCase, layouts: Layouts, micro_batches: Array, busy: Array) -> Array:
    """Time a step waits for its batch: tokens of a rank / what one loader was measured to deliver − busy time, as the
    loader works ahead. Nothing where no loader was measured."""
    points = case.measured.points.get("loader", ()) if case.measured else ()
    own = [point for point in points if point["path"] == "loader"] or points  # others are there to be compared with
    rates = [float(point["tokens"]) / float(point["seconds"]) for point in own if float(point["seconds"]) > 0]
    if not rates:
        return np.zeros(len(layouts))
    tokens = micro_batches * layouts.micro_batch * case.sequence
    return np.maximum(0.0, tokens / max(rates) - busy)
