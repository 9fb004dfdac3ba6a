"""Overhead: the optimiser, launches the device waits for, copies to the host, and what a step costs by itself."""

from __future__ import annotations

import numpy as np

from armillary.planning.case import TrainCase
from armillary.planning.compute import Work
from armillary.planning.layouts import OFFLOADS, Array, Layouts
from armillary.planning.weights import Held
from armillary.spec import catalogue
from armillary.spec.layer_ops import adamw

STEP_S = 5e-3
"""reading a batch, the learning rate, logging and a barrier, once a step"""
STRAGGLE = 0.008
"""slowest of many nodes against their mean, a doubling of nodes: what synchronous steps lose at scale"""
GRAD_NORM_BYTES = 4
"""read again of every gradient for its norm"""
GRAPH_LAUNCH_S = 1.1e-6
"""a kernel launched from a CUDA graph (benchmarks/ceilings_h200.md)"""
HOST_ADAM_BYTES_PER_S = 100e9
"""host memory bandwidth an optimiser on the CPU reaches for one device's share"""
_OPTIMIZER_OUT = [OFFLOADS.index(name) for name in ("optimizer", "both", "nvme")]
_ACTIVATIONS_OUT = [OFFLOADS.index(name) for name in ("activations", "both")]


def optimizer_s(case: TrainCase, layouts: Layouts, mine: Held) -> Array:
    """AdamW over the weights this rank updates, and one more reading of the gradients for their norm: bytes /
    bandwidth; on the host where its states wait there."""
    replicas = np.maximum(layouts.dp * layouts.cp * layouts.tp // (layouts.ep * layouts.expert_tp), 1)
    shared = np.where(layouts.zero > 0, layouts.shard * layouts.cp, 1)
    count = mine.dense / shared + mine.routed / np.where(layouts.zero > 0, np.minimum(replicas, shared), 1)
    if case.lora is not None:
        count = case.lora.held(layouts.tp) / layouts.pp / shared
    one = adamw("optimizer", 1, weight_dtype="bf16")
    each = one.bytes + GRAD_NORM_BYTES
    on_device = count * each / case.curves.bytes_per_s * case.software.memory
    out = np.isin(layouts.offload, _OPTIMIZER_OUT)
    over = count * 6 / _host_rate(case)  # gradients down in fp32, weights up in bf16
    seconds: Array = np.where(out, count * each / HOST_ADAM_BYTES_PER_S + over, on_device)
    return seconds


def straggle_s(case: TrainCase, layouts: Layouts, busy: Array) -> Array:
    """Every exchange waits for the slowest node: share·log2(nodes) of the busy time."""
    per_node = case.cluster.node.num_chips if case.cluster.node else case.cluster.fast_domain
    nodes = np.maximum(layouts.num_devices / max(per_node, 1), 1.0)
    seconds: Array = STRAGGLE * np.log2(nodes) * busy
    return seconds


def launch_s(case: TrainCase, work: Work, device: Array) -> Array:
    """Time by which a micro-batch's launches outlast its kernels: the host runs ahead, so only the excess shows; where
    routing waits for the host in every layer, it cannot, and all of it shows."""
    each = GRAPH_LAUNCH_S if case.software.graphs else case.curves.launch_s
    host = (work.kernels_forward + work.kernels_backward) * each * case.software.host
    waits = case.model.num_moe_layers > 0 and not case.software.flex_dispatch
    return host if waits else np.maximum(0.0, host - device)


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


def offload_s(case: TrainCase, layouts: Layouts, kept: Array, window: Array) -> Array:
    """Activations of a step out to the host and back, where the computation does not hide it."""
    out = np.isin(layouts.offload, _ACTIVATIONS_OUT)
    seconds: Array = np.where(out, np.maximum(0.0, 2 * kept / _host_rate(case) - window), 0.0)
    return seconds


def _host_rate(case: TrainCase) -> float:
    link = catalogue.links().get(case.cluster.chip.host_link)
    speed = link.bytes_per_s if link and link.bytes_per_s else 12e9
    return speed * 0.8
