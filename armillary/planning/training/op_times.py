"""Seconds of one operation on one device, forward and backward: GEMMs by size and dtype, attention by head dim and
length, the rest by the bytes it moves, and eager torch's operators beside each. The layout shards an operation, and the
chip's efficiency curves price it."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import Array, Ints, Layouts
from armillary.planning.training.activations import IMBALANCE
from armillary.planning.training.fp8_fp4 import SIZES, casts, precision_of
from armillary.planning.training.op_sharding import local_gemm, sharding_of, share
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.delta_ops import CHUNK
from armillary.spec.arithmetic.eager_ops import eager_bytes
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import OpWithBackward, attention_shape
from armillary.spec.model import LayerKind


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds and kernel launches of one micro-batch on one device, by kind of operation; memory-bound ones are norms,
    activations, rotations, routing and casts."""

    gemm_forward: Array
    gemm_backward: Array
    attention_forward: Array
    attention_backward: Array
    memory_forward: Array
    memory_backward: Array
    selective_recompute: Array
    last_projection: Array
    """forward GEMM at the end of a dense layer, whose result no backward pass reads"""
    kernels_forward: Array
    kernels_backward: Array
    tp_gemm: Array
    """GEMMs that can hide tensor-parallel communication, forward and backward"""

    @property
    def forward(self) -> Array:
        return self.gemm_forward + self.attention_forward + self.memory_forward

    @property
    def backward(self) -> Array:
        return self.gemm_backward + self.attention_backward + self.memory_backward


_WORK = tuple(field.name for field in fields(Work))


def no_work(count: int) -> Work:
    return Work(**dict.fromkeys(_WORK, np.zeros(count)))  # one array: sums make new ones


UNFUSED_EXPERTS = 1.8
"""time of routed GEMMs with one kernel per expert over fused ones: sorting, padding, uneven rows; a device with a
single expert has one GEMM on all of its rows, in whatever order, and only waits for the rank with the most"""
FUSED_TRAFFIC, EAGER_TRAFFIC = 1.6, 2.2
"""bytes that real layers move over the compulsory ones: unfused casts, transposes and sums; more where norms and
activation functions are not fused kernels"""


# --- GEMMs


def matmul(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
    """Forward [m, n, k], dX [m, k, n], dW [k, n, m]; in 8 or 4 bits the operands are cast first, plain and
    transposed."""
    op, software = piece.forward, case.software
    experts = case.model.moe.num_experts if case.model.moe else 0
    gemm = local_gemm(op, layouts, experts)
    precision = precision_of(case, op.name, layouts, gemm)
    unfused = sharding_of(op.name) == "experts" and not software.fused_experts
    slower = _slower_experts(case, layouts) if unfused else 1.0
    forward = gemm_s(case, precision, gemm.groups, gemm.m, gemm.n, gemm.k, grouped=not unfused)
    dx = gemm_s(case, precision, gemm.groups, gemm.m, gemm.k, gemm.n, grouped=not unfused)
    dw = gemm_s(case, precision, gemm.groups, gemm.k, gemm.n, gemm.m, grouped=not unfused)
    if case.lora is not None:
        dw = np.zeros_like(dw)
    cast = casts(case, op.name, layouts, precision, gemm)
    launches = gemm.groups if unfused else np.ones(len(layouts))
    return replace(
        no_work(len(layouts)),
        gemm_forward=forward * software.gemm * slower,
        gemm_backward=(dx + dw) * software.gemm * slower,
        memory_forward=case.curves.memory_bound_s(cast.forward) * software.memory * slower,
        memory_backward=case.curves.memory_bound_s(cast.backward) * software.memory * slower,
        kernels_forward=launches * (1 + cast.kernels_forward),
        kernels_backward=launches * (2 + cast.kernels_backward),
        tp_gemm=(forward + dx + dw) * software.gemm * (sharding_of(op.name) in ("column", "row")),
        last_projection=forward * software.gemm * _ends_layer(case, op.name),
    )


def _slower_experts(case: TrainCase, layouts: Layouts) -> Array:
    """Factor on the time of routed GEMMs, and of what surrounds them, where each expert has a kernel of its own."""
    experts = case.model.moe.num_experts if case.model.moe else 1
    return case.software.experts * np.where(experts > layouts.ep, UNFUSED_EXPERTS, IMBALANCE)


def _ends_layer(case: TrainCase, name: str) -> bool:
    """Whether nothing but the residual sum follows in the layer."""
    return name == "mlp.down" and case.model.norm_at == "before" and case.model.parallel == "none"


def gemm_s(
    case: TrainCase, precision: Ints, groups: Array, m: Array, n: Array, k: Array, *, grouped: bool = True
) -> Array:
    """max(FLOPs / achieved rate, bytes / bandwidth) + kernel overhead. Not `grouped`: one kernel per group, each with a
    last wave of its own."""
    curves = case.curves
    size = SIZES[precision]
    per_kernel = groups if grouped else np.ones_like(groups)
    flops_s = 2 * groups * m * n * k / curves.gemm_flops(precision, m, n, k, per_kernel)
    output = np.where(WIDE[precision], 4.0, 2.0)
    bytes_s = groups * (m * k * size + k * n * size + m * n * output) / curves.bytes_per_s
    return np.maximum(flops_s, bytes_s) + curves.kernel_s * groups / per_kernel


# --- attention and memory-bound operations


def attention(case: TrainCase, piece: OpWithBackward, layouts: Layouts, kind: LayerKind) -> Work:
    """Flash: FLOPs over the rate attention reaches. Unfused: two GEMMs with the scores written and read between."""
    local, software, curves = share("heads", layouts), case.software, case.curves
    shape = attention_shape(case.model, kind)
    dim = (shape.qk_dim + shape.v_dim) / 2
    zero = np.zeros(len(layouts))
    back = piece.backward[0]
    if case.flash:
        keys = _keys(case, kind) / layouts.cp  # a step of the ring attends to the keys of one rank
        rates = [
            curves.attention_flops(keys, dim, backward=is_back, precision=layouts.precision)
            for is_back in (False, True)
        ]
        forward = piece.forward.flops * local / rates[0] + curves.kernel_s
        backward = back.flops * local / rates[1] + curves.kernel_s
        recomputed, kernels = zero, 1.0
    else:
        rows = np.full(len(layouts), float(case.sequence))
        rate = curves.gemm_flops(layouts.precision, rows, rows, np.full(len(layouts), dim), shape.heads / layouts.tp)
        forward = piece.forward.flops * local / rate + curves.memory_bound_s(piece.forward.bytes * local)
        backward = back.flops * local / rate + curves.memory_bound_s(back.bytes * local)
        recomputed, kernels = forward, 4.0
    return replace(
        no_work(len(layouts)),
        attention_forward=forward * software.attention,
        attention_backward=backward * software.attention,
        selective_recompute=recomputed * software.attention,
        kernels_forward=zero + kernels,
        kernels_backward=zero + kernels,
    )


def _keys(case: TrainCase, kind: LayerKind) -> float:
    """Keys a query attends to, on which the efficiency of attention depends: the sequence, the window, or the chunk of
    a gated delta-net layer and the pairs of a 2-simplicial one (guesses: their rates have not been measured)."""
    if kind.attention == "gated_delta":
        return float(CHUNK)
    if kind.attention == "2-simplicial":
        assert case.model.simplicial is not None
        windows = (case.model.simplicial.window_1, case.model.simplicial.window_2)
        return float(math.prod(min(case.sequence, window) for window in windows))
    limited = kind.attention in ("sliding", "chunked") and case.model.window
    return float(min(case.sequence, case.model.window or 0) if limited else case.sequence)


def memory_bound(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
    sharding, software = sharding_of(piece.forward.name), case.software
    local, zero = share(sharding, layouts), np.zeros(len(layouts))
    unfused = sharding == "experts" and not software.fused_experts
    times = software.memory * (_slower_experts(case, layouts) if unfused else 1.0)
    traffic = FUSED_TRAFFIC if software.fused_layers or case.compiled else EAGER_TRAFFIC
    moved = local * (1.0 if software.fused_blocks else traffic) * (_with_biases(case, piece) if unfused else 1.0)
    forward = case.curves.memory_bound_s(piece.forward.bytes * moved) * times
    backward = sum((case.curves.memory_bound_s(op.bytes * moved) for op in piece.backward), zero) * times
    sorted_again = _sorts_again(case, piece, layouts)
    more = [_sort_s(case, op, local) * sorted_again for op in (piece.forward, *piece.backward)]
    return replace(
        no_work(len(layouts)),
        memory_forward=forward + more[0],
        memory_backward=backward + sum(more[1:], zero),
        selective_recompute=forward * _is_cheap(case, piece),
        kernels_forward=1 + sorted_again,
        kernels_backward=len(piece.backward) * (1 + sorted_again),
    )


def _sorts_again(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Array:
    """1 where rows that a plain all-to-all brought, ordered by their rank, are sorted by expert, and sorted back before
    they return (Megatron-LM's all-to-all dispatcher, ours); DeepEP and HybridEP deliver them in order."""
    moe = case.model.moe
    plain = moe is not None and not case.software.flex_dispatch and piece.forward.name in _SENT
    experts = moe.num_experts if moe is not None else 0
    return np.where(plain & (layouts.ep > 1) & (experts > layouts.ep), 1.0, 0.0)


_SENT = ("moe.dispatch", "moe.combine")


def _sort_s(case: TrainCase, op: Op, local: Array) -> Array:
    """Seconds to read and write the rows that dispatch writes, or that combine reads."""
    rows = np.maximum(op.bytes_read, op.bytes_written)
    return case.curves.memory_bound_s(2 * rows * local) * case.software.memory


def _with_biases(case: TrainCase, piece: OpWithBackward) -> float:
    """Bytes of the experts' activation function with passes that add the biases of both GEMMs (2·ffn and hidden wide,
    read and written), over its own: 2·ffn read and ffn written."""
    moe = case.model.moe
    if moe is None or not moe.expert_bias or piece.forward.name != "moe.act":
        return 1.0
    return 1 + (4 * moe.ffn + 2 * case.model.hidden) / (3 * moe.ffn)


def _is_cheap(case: TrainCase, piece: OpWithBackward) -> bool:
    """Whether selective recompute recomputes it rather than store it."""
    return piece.forward.kind in ("norm", "elementwise") and case.flash


def eager_operators(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
    """The memory-bound operators that eager torch runs for a piece, beside its GEMM or attention."""
    moved = eager_bytes(case.model, piece.forward)
    sharding = sharding_of(piece.forward.name)
    local = share(sharding, layouts)
    if piece.forward.kind == "matmul":  # cp ranks hold full weights; experts are sharded by ep
        local = 1.0 / (layouts.ep * layouts.expert_tp) if sharding == "experts" else local * layouts.cp
    forward, backward = (
        num_bytes * local / case.curves.eager_rate(layouts.precision) * case.software.memory
        for num_bytes in (moved.forward, moved.backward)
    )
    calls = np.ones(len(layouts))
    return replace(
        no_work(len(layouts)),
        memory_forward=forward,
        memory_backward=backward,
        selective_recompute=forward * _is_cheap(case, piece),
        kernels_forward=calls * moved.calls_forward,
        kernels_backward=calls * moved.calls_backward,
    )
