"""Compute: seconds that one device spends on a layer, or on the two ends of the model, for one micro-batch.

Operations, their FLOPs and bytes come from spec; each is cut by the layout and priced on the chip's curves: products by
size and number format, attention by head dim and length, the rest by the bytes it moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.layout_arrays import Array, Bools, Ints, Layouts, distinct
from armillary.planning.training.fp8_fp4 import SIZES, casts, precision_of
from armillary.planning.training.sharding import cut_of, product, share
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.eager_ops import moved
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import Batch, Piece, attention_shape
from armillary.spec.arithmetic.workload import embedding_pieces, head_pieces, layer_pieces, make_batch
from armillary.spec.model import LayerKind


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one micro-batch on one device, by what they are spent on, and kernels launched."""

    gemm_forward: Array
    """matrix products of the forward pass"""
    gemm_backward: Array
    """of the backward pass: two a product"""
    attention_forward: Array
    """attention of the forward pass"""
    attention_backward: Array
    """of the backward pass"""
    memory_forward: Array
    """norms, activations, rotations, routing, casts: bound by memory"""
    memory_backward: Array
    """of the backward pass"""
    again_selective: Array
    """what selective recomputation repeats"""
    kernels_forward: Array
    """kernels launched"""
    kernels_backward: Array
    """kernels launched"""
    tp_products: Array
    """seconds of the products beside which tensor-parallel exchanges can run, both passes"""

    @property
    def forward(self) -> Array:
        return self.gemm_forward + self.attention_forward + self.memory_forward

    @property
    def backward(self) -> Array:
        return self.gemm_backward + self.attention_backward + self.memory_backward

    def scaled(self, times: Array | float) -> Work:
        return Work(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    def plus(self, other: Work) -> Work:
        return Work(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def nothing(count: int) -> Work:
    return Work(**{field.name: np.zeros(count) for field in fields(Work)})


APART = 1.8
"""time of routed products and passes that are kernels of their own, over fused ones: sorting, padding, uneven rows"""
PASSES, EAGER_PASSES = 1.6, 2.2
"""bytes that real layers move over what is compulsory: casts, transposes and sums that nobody fused; more where norms
and activation functions are not kernels of their own"""


def layer_work(case: TrainCase, kind: LayerKind, layouts: Layouts) -> Work:
    """One layer of `kind`, for every layout."""
    found = _by_batch(case, layouts, lambda batch: layer_pieces(case.model, kind, batch), kind)
    return found if case.lora is None else found.plus(adapter_work(case, layouts))


def adapter_work(case: TrainCase, layouts: Layouts) -> Work:
    """The adapters of a mean layer: bytes over bandwidth, since their products are thin."""
    lora, zero = case.lora, np.zeros(len(layouts))
    assert lora is not None
    tokens = layouts.micro_batch * case.sequence / layouts.cp / case.model.num_layers
    size = np.where(WIDE[layouts.precision], 4.0, 2.0)

    def seconds(moved: tuple[float, float]) -> Array:
        numbers = tokens * (moved[0] + moved[1] / layouts.tp)
        return numbers * size / case.curves.bytes_per_s * case.software.memory

    forward, backward = (count / case.model.num_layers for count in lora.kernels)
    return replace(
        nothing(len(layouts)),
        memory_forward=seconds(lora.forward),
        memory_backward=seconds(lora.backward),
        kernels_forward=zero + forward,
        kernels_backward=zero + backward,
    )


def ends_work(case: TrainCase, layouts: Layouts) -> tuple[Work, Work]:
    """(embedding, output projection with loss); only the layers between them are compiled."""
    case = replace(case, compiled=False) if case.compiled else case
    first = _by_batch(case, layouts, lambda batch: embedding_pieces(case.model, batch), None)
    last = _by_batch(case, layouts, lambda batch: head_pieces(case.model, batch, loss=True), None)
    if case.software.plain_layers and case.loss_chunk:
        last = _made_again(last, layouts.micro_batch * case.sequence / layouts.cp > case.loss_chunk)
    return first, last.scaled(1.0 + case.extra_heads)


def _made_again(head: Work, chunked: Bools) -> Work:
    """Logits in chunks are not kept: the backward pass makes them again."""
    return replace(
        head,
        gemm_backward=head.gemm_backward + head.gemm_forward * chunked,
        memory_backward=head.memory_backward + head.memory_forward * chunked,
        kernels_backward=head.kernels_backward + head.kernels_forward * chunked,
    )


def _by_batch(case: TrainCase, layouts: Layouts, make, kind: LayerKind | None) -> Work:  # type: ignore[no-untyped-def]
    """Pieces are made once a micro-batch size and width of numbers, and cut for all layouts that share them."""
    total = nothing(len(layouts))
    wide = WIDE[layouts.precision]
    keys = layouts.micro_batch * 2 + wide
    for key in keys[distinct(keys)[0]]:
        index = np.nonzero(keys == key)[0]
        dtype = "fp32" if key % 2 else "bf16"
        batch = make_batch([case.sequence] * int(key // 2), dtype=dtype, flash=case.flash)
        found = _pieces_work(case, make(batch), layouts.take(index), batch, kind)
        for field in fields(Work):
            getattr(total, field.name)[index] = getattr(found, field.name)
    return total


def _pieces_work(
    case: TrainCase, pieces: Sequence[Piece], layouts: Layouts, batch: Batch, kind: LayerKind | None
) -> Work:
    work = nothing(len(layouts))
    plain = case.software.plain_layers and not case.compiled
    for piece in pieces:
        if piece.forward.kind == "matmul":
            work = work.plus(_matmul(case, piece, layouts))
        elif piece.forward.kind == "attention":
            assert kind is not None
            work = work.plus(_attention(case, piece, layouts, batch, kind))
        elif not plain:
            work = work.plus(_memory(case, piece, layouts))
        if plain:
            work = work.plus(_operators(case, piece, layouts))
    return work


# --- products


def _matmul(case: TrainCase, piece: Piece, layouts: Layouts) -> Work:
    """Forward [m, n, k], dX [m, k, n], dW [k, n, m]; in 8 or 4 bits the operands are cast first, both ways round."""
    op, software = piece.forward, case.software
    experts = case.model.moe.num_experts if case.model.moe else 0
    mine = product(op, layouts, experts)
    precision = precision_of(case, op.name, layouts, mine)
    apart = cut_of(op.name) == "experts" and not software.fused_experts
    forward = product_s(case, precision, mine.groups, mine.m, mine.n, mine.k, apart=apart)
    dx = product_s(case, precision, mine.groups, mine.m, mine.k, mine.n, apart=apart)
    dw = product_s(case, precision, mine.groups, mine.k, mine.n, mine.m, apart=apart)
    if case.lora is not None:
        dw = np.zeros_like(dw)
    cast = casts(case, op.name, layouts, precision, mine)
    launches = mine.groups if apart else np.ones(len(layouts))
    slower = software.experts * APART if apart else 1.0
    return replace(
        nothing(len(layouts)),
        gemm_forward=forward * software.gemm * slower,
        gemm_backward=(dx + dw) * software.gemm * slower,
        memory_forward=case.curves.pass_s(cast.forward) * software.memory * slower,
        memory_backward=case.curves.pass_s(cast.backward) * software.memory * slower,
        kernels_forward=launches * (1 + cast.kernels_forward),
        kernels_backward=launches * (2 + cast.kernels_backward),
        tp_products=(forward + dx + dw) * software.gemm * (cut_of(op.name) in ("column", "row")),
    )


def product_s(
    case: TrainCase, precision: Ints, groups: Array, m: Array, n: Array, k: Array, *, apart: bool = False
) -> Array:
    """max(FLOPs / reached rate, bytes / bandwidth) + a kernel; `apart`: each group is a kernel of its own, whose last
    wave is as empty as if it were alone."""
    curves = case.curves
    size = SIZES[precision]
    together = np.ones_like(groups) if apart else groups
    flops_s = 2 * groups * m * n * k / curves.gemm_flops(precision, m, n, k, together)
    made = np.where(WIDE[precision], 4.0, 2.0)
    bytes_s = groups * (m * k * size + k * n * size + m * n * made) / curves.bytes_per_s
    seconds: Array = np.maximum(flops_s, bytes_s) + curves.kernel_s * groups / together
    return seconds


# --- attention and the rest


def _attention(case: TrainCase, piece: Piece, layouts: Layouts, batch: Batch, kind: LayerKind) -> Work:
    """Fused: FLOPs over what attention reaches. Unfused: two products with the scores written and read between."""
    mine, software, curves = share("heads", layouts), case.software, case.curves
    shape = attention_shape(case.model, kind)
    dim = (shape.qk_dim + shape.v_dim) / 2
    zero = np.zeros(len(layouts))
    back = piece.backward[0]
    if batch.flash:
        keys = _keys(case, kind) / layouts.cp  # a step of the ring meets one rank's keys
        rates = [
            curves.attention_flops(keys, dim, backward=is_back, precision=layouts.precision)
            for is_back in (False, True)
        ]
        forward = piece.forward.flops * mine / rates[0] + curves.kernel_s
        backward = back.flops * mine / rates[1] + curves.kernel_s
        again, kernels = zero, 1.0
    else:
        rows = np.full(len(layouts), float(case.sequence))
        rate = curves.gemm_flops(layouts.precision, rows, rows, np.full(len(layouts), dim), shape.heads / layouts.tp)
        forward = piece.forward.flops * mine / rate + curves.pass_s(piece.forward.bytes * mine)
        backward = back.flops * mine / rate + curves.pass_s(back.bytes * mine)
        again, kernels = forward, 4.0
    return replace(
        nothing(len(layouts)),
        attention_forward=forward * software.attention,
        attention_backward=backward * software.attention,
        again_selective=again * software.attention,
        kernels_forward=zero + kernels,
        kernels_backward=zero + kernels,
    )


def _keys(case: TrainCase, kind: LayerKind) -> float:
    """Keys a query may meet, which attention's efficiency depends on: the sequence, or the window."""
    limited = kind.attention in ("sliding", "chunked") and case.model.window
    return float(min(case.sequence, case.model.window or 0) if limited else case.sequence)


def _memory(case: TrainCase, piece: Piece, layouts: Layouts) -> Work:
    cut, software = cut_of(piece.forward.name), case.software
    mine = share(cut, layouts)
    times = software.memory * (software.experts * APART if cut == "experts" and not software.fused_experts else 1.0)
    forward = _pass(case, piece.forward, mine) * times
    backward = sum((_pass(case, op, mine) for op in piece.backward), np.zeros(len(layouts))) * times
    zero = np.zeros(len(layouts))
    return replace(
        nothing(len(layouts)),
        memory_forward=forward,
        memory_backward=backward,
        again_selective=forward * _is_cheap(case, piece),
        kernels_forward=zero + 1,
        kernels_backward=zero + len(piece.backward),
    )


def _is_cheap(case: TrainCase, piece: Piece) -> bool:
    """What selective recomputation makes again rather than keep."""
    return piece.forward.kind in ("norm", "elementwise") and case.flash


def _pass(case: TrainCase, op: Op, mine: Array) -> Array:
    software = case.software
    fused = software.fused_layers or case.compiled
    passes = 1.0 if software.whole_blocks else PASSES if fused else EAGER_PASSES
    return case.curves.pass_s(op.bytes * mine * passes)


def _operators(case: TrainCase, piece: Piece, layouts: Layouts) -> Work:
    """The operators that torch runs for a piece beside its products and attention."""
    found = moved(case.model, piece.forward)
    cut = cut_of(piece.forward.name)
    mine = share(cut, layouts)
    if piece.forward.kind == "matmul":  # weights are whole on every rank of a ring, experts apart by ep
        mine = 1.0 / (layouts.ep * layouts.expert_tp) if cut == "experts" else mine * layouts.cp
    forward, backward = (
        moves * mine / case.curves.plain_rate(layouts.precision) * case.software.memory
        for moves in (found.forward, found.backward)
    )
    calls = np.ones(len(layouts))
    return replace(
        nothing(len(layouts)),
        memory_forward=forward,
        memory_backward=backward,
        again_selective=forward * _is_cheap(case, piece),
        kernels_forward=calls * found.calls_forward,
        kernels_backward=calls * found.calls_backward,
    )
