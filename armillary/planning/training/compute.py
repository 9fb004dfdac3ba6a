"""Compute time: seconds one device spends on a layer, the embedding or the output projection, per micro-batch.

Operations with their FLOPs and bytes come from spec. The layout shards each one, and the chip's efficiency curves price
it: GEMMs by size and dtype, attention by head dim and length, the rest by the bytes it moves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import Array, Bools, Ints, Layouts, distinct, plus, scaled
from armillary.planning.training.activations import IMBALANCE
from armillary.planning.training.fp8_fp4 import SIZES, casts, precision_of
from armillary.planning.training.op_sharding import local_gemm, sharding_of, share
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.delta_ops import CHUNK
from armillary.spec.arithmetic.eager_ops import eager_bytes
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import Batch, OpWithBackward, attention_shape
from armillary.spec.arithmetic.workload import embedding_operations, head_operations, layer_operations, make_batch
from armillary.spec.model import LayerKind, ModelConfig


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


def layer_work(case: TrainCase, kind: LayerKind, layouts: Layouts) -> Work:
    """One layer of `kind`, for every layout."""
    work = _by_batch(case, layouts, lambda batch: _layer_operations(case.model, kind, *batch), kind)
    return work if case.lora is None else plus(work, adapter_work(case, layouts))


@lru_cache(maxsize=1024)
def _layer_operations(
    model: ModelConfig, kind: LayerKind, size: int, sequence: int, dtype: str, flash: bool
) -> Sequence[OpWithBackward]:
    """Kept, since every node of a ranking asks for the same."""
    return layer_operations(model, kind, _batch(size, sequence, dtype, flash))


@lru_cache(maxsize=1024)
def _head_operations(model: ModelConfig, size: int, sequence: int, dtype: str, flash: bool) -> Sequence[OpWithBackward]:
    return head_operations(model, _batch(size, sequence, dtype, flash), loss=True)


def _batch(size: int, sequence: int, dtype: str, flash: bool) -> Batch:
    return make_batch([sequence] * size, dtype=dtype, flash=flash)


def adapter_work(case: TrainCase, layouts: Layouts) -> Work:
    """LoRA adapters of a mean layer: bytes over bandwidth, since the GEMMs of adapters are thin."""
    lora, zero = case.lora, np.zeros(len(layouts))
    assert lora is not None
    tokens = case.tokens(layouts) / case.model.num_layers
    size = np.where(WIDE[layouts.precision], 4.0, 2.0)

    def seconds(moved: tuple[float, float]) -> Array:
        numbers = tokens * (moved[0] + moved[1] / layouts.tp)
        return numbers * size / case.curves.bytes_per_s * case.software.memory

    forward, backward = (count / case.model.num_layers for count in lora.kernels)
    return replace(
        no_work(len(layouts)),
        memory_forward=seconds(lora.forward),
        memory_backward=seconds(lora.backward),
        kernels_forward=zero + forward,
        kernels_backward=zero + backward,
    )


def ends_work(case: TrainCase, layouts: Layouts) -> tuple[Work, Work]:
    """(embedding, output projection with the loss); torch compiles only the layers between them."""
    case = replace(case, compiled=False) if case.compiled else case
    first = _by_batch(case, layouts, lambda batch: embedding_operations(case.model, _batch(*batch)), None)
    last = _by_batch(case, layouts, lambda batch: _head_operations(case.model, *batch), None)
    if case.software.eager_layers and case.loss_chunk:
        last = _with_recompute(last, case.tokens(layouts) > case.loss_chunk)
    return first, scaled(last, 1.0 + case.extra_heads)


def _with_recompute(head: Work, chunked: Bools) -> Work:
    """The backward pass recomputes the logits of a chunked loss."""
    return replace(
        head,
        gemm_backward=head.gemm_backward + head.gemm_forward * chunked,
        memory_backward=head.memory_backward + head.memory_forward * chunked,
        kernels_backward=head.kernels_backward + head.kernels_forward * chunked,
    )


def _by_batch(case: TrainCase, layouts: Layouts, make, kind: LayerKind | None) -> Work:  # type: ignore[no-untyped-def]
    """Pieces are built once per micro-batch size and activation width, and sharded for all layouts that share them."""
    eager = case.software.eager_layers and not case.compiled
    wide = WIDE[layouts.precision].astype(np.int64)
    keys = layouts.micro_batch * 2 + wide if eager else wide  # eager operators are counted one batch at a time
    first, group = distinct(keys)
    if len(first) == 1:
        return _group_work(case, layouts, make, kind)
    total = Work(**{field.name: np.empty(len(layouts)) for field in fields(Work)})
    for i in range(len(first)):
        index = np.nonzero(group == i)[0]
        part = _group_work(case, layouts.take(index), make, kind)
        for field in fields(Work):
            getattr(total, field.name)[index] = getattr(part, field.name)
    return total


def _group_work(case: TrainCase, layouts: Layouts, make, kind: LayerKind | None) -> Work:  # type: ignore[no-untyped-def]
    """Layouts of one activation width: the pieces of each micro-batch size, side by side."""
    first, index = distinct(layouts.micro_batch)
    dtype = "fp32" if WIDE[layouts.precision[0]] else "bf16"
    by_size = [make((int(size), case.sequence, dtype, case.flash)) for size in layouts.micro_batch[first]]
    pieces = by_size[0] if len(by_size) == 1 else [_side_by_side(same, index) for same in zip(*by_size, strict=True)]
    return _pieces_work(case, pieces, layouts, kind)


def _side_by_side(pieces: Sequence[OpWithBackward], index: Ints) -> OpWithBackward:
    """One operation at several batch sizes as one whose FLOPs, bytes and sizes are arrays: piece `index[i]` at i."""
    backward = zip(*(piece.backward for piece in pieces), strict=True)
    return OpWithBackward(
        forward=_as_one([piece.forward for piece in pieces], index),
        backward=tuple(_as_one(ops, index) for ops in backward),
    )


def _as_one(ops: Sequence[Op], index: Ints) -> Op:
    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float)[index]

    assert len({(op.name, op.kind, op.dtype, len(op.shape)) for op in ops}) == 1, "one operation at several sizes"
    return replace(
        ops[0],
        flops=column([op.flops for op in ops]),
        bytes_read=column([op.bytes_read for op in ops]),
        bytes_written=column([op.bytes_written for op in ops]),
        shape=tuple(column(sizes) for sizes in zip(*(op.shape for op in ops), strict=True)),
    )


def _pieces_work(case: TrainCase, pieces: Sequence[OpWithBackward], layouts: Layouts, kind: LayerKind | None) -> Work:
    parts = [no_work(len(layouts))]
    eager = case.software.eager_layers and not case.compiled
    for piece in pieces:
        if piece.forward.kind == "matmul":
            parts.append(_matmul(case, piece, layouts))
        elif piece.forward.kind == "attention":
            assert kind is not None
            parts.append(_attention(case, piece, layouts, kind))
        elif not eager:
            parts.append(_memory_bound(case, piece, layouts))
        if eager:
            parts.append(_eager_operators(case, piece, layouts))
    return plus(*parts)


# --- GEMMs


def _matmul(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
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


def _attention(case: TrainCase, piece: OpWithBackward, layouts: Layouts, kind: LayerKind) -> Work:
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


def _memory_bound(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
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


def _eager_operators(case: TrainCase, piece: OpWithBackward, layouts: Layouts) -> Work:
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
