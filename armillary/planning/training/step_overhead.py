"""Overhead per step: optimizer, kernel launches, stragglers, data loading and fixed costs."""

import numpy as np

from armillary.planning.device_model.vectorised_layouts import FULL, Array, Layouts
from armillary.planning.training.fp8_fp4 import weights_s
from armillary.planning.training.offload import optimizer_offloaded
from armillary.planning.training.op_times import Work
from armillary.planning.training.optimizer_states import updated_parameters
from armillary.planning.training.stages import DeviceParameters
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.non_gemm_ops import adamw

STEP_S = 5e-3
"""seconds per step for reading a batch, setting the learning rate, logging and a barrier"""
STRAGGLER = 0.008
"""loss per doubling of the number of nodes, as a share of busy time: the slowest of many nodes against their mean"""
CPU_STRAGGLER = 0.08
"""the same per doubling of ranks that share one CPU: no core is free for the threads of communication, loader and
system, so a different rank is late each time (3 to 20 % of a step between two ranks), and all wait"""
GRAD_NORM_BYTES = 4
"""bytes per gradient read for the gradient norm"""
CALLS_PER_OPERATOR = 2.8
"""recorded torch calls per operator that moves data: views, and operators that call others (2.5 to 3.1 measured)"""
EAGER_LAUNCH_S = 12e-6
"""host time per kernel of a framework in eager Python: autograd, dispatcher and launch (as in serving/engines.toml)"""
GRAPH_LAUNCH_S = 1.1e-6
"""seconds per kernel launch from a CUDA graph (benchmarks/ceilings_h200.md)"""


def optimizer_s(case: TrainCase, layouts: Layouts, params: DeviceParameters) -> Array:
    """AdamW over the weights this rank updates, and one more read of the gradients for their norm: bytes / bandwidth;
    the norm alone where the states are offloaded (planning.training.offload). fp8 weights are cast once."""
    count = updated_parameters(case, layouts, params)
    adamw_bytes = adamw("optimizer", 1, weight_dtype="bf16").bytes
    each = np.where(optimizer_offloaded(layouts), 0.0, adamw_bytes) + GRAD_NORM_BYTES
    seconds: Array = count * each / case.curves.bytes_per_s * case.software.memory
    return seconds + weights_s(case, layouts, params)


def straggler_s(case: TrainCase, layouts: Layouts, busy: Array) -> Array:
    """Every collective waits for the slowest node: share·log2(nodes) of the busy time; on one CPU for the slowest
    rank."""
    if case.software.eager_layers:
        return CPU_STRAGGLER * np.log2(layouts.num_devices) * busy
    per_node = case.cluster.node.num_chips if case.cluster.node else case.cluster.fast_domain
    nodes = np.maximum(layouts.num_devices / max(per_node, 1), 1.0)
    return STRAGGLER * np.log2(nodes) * busy


def launch_s(case: TrainCase, layouts: Layouts, work: Work, device: Array) -> Array:
    """Time by which the launches of a micro-batch exceed its kernels. The host runs ahead, so only the excess is
    exposed; where routing synchronises with the host in every layer, all of it is. Fused experts read the number of
    rows on the device, so only expert parallelism synchronises. On a CPU every call is exposed."""
    if case.software.eager_layers:
        forwards = 1 + np.where(layouts.recompute == FULL, 1.0 / layouts.recompute_every, 0.0)
        calls = CALLS_PER_OPERATOR * (work.kernels_forward * forwards + work.kernels_backward)
        return calls * case.curves.autograd_call_s * case.software.host
    host = (work.kernels_forward + work.kernels_backward) * kernel_launch_s(case) * case.software.host
    known = case.software.flex_dispatch or case.software.static_shapes
    routed = case.model.num_moe_layers > 0 and not known
    waits = routed & ((layouts.ep > 1) | (not case.software.fused_experts))
    return np.where(waits, host, np.maximum(0.0, host - device))


def kernel_launch_s(case: TrainCase) -> float:
    """Host time per kernel: our trainer's launches, another framework's eager calls, or a CUDA graph's."""
    if case.software.graphs:
        return GRAPH_LAUNCH_S
    return case.curves.launch_s if case.software.fully_shard else max(case.curves.launch_s, EAGER_LAUNCH_S)


def data_s(case: TrainCase, layouts: Layouts, micro_batches: Array, busy: Array) -> Array:
    """Time a step waits for its batch: tokens per rank / measured tokens/s of the loader − busy time, since the loader
    prefetches. 0 where no loader was measured."""
    points = case.measured.points.get("loader", ()) if case.measured else ()
    own = [point for point in points if point["path"] == "loader"] or points  # other paths are for comparison
    rates = [float(point["tokens"]) / float(point["seconds"]) for point in own if float(point["seconds"]) > 0]
    if not rates:
        return np.zeros(len(layouts))
    return np.maximum(0.0, micro_batches * layouts.micro_batch * case.sequence / max(rates) - busy)
