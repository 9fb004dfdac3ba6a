"""Compute time: seconds one device spends on a layer, the embedding or the output projection, per micro-batch.

Operations with their FLOPs and bytes come from spec; op_times.py prices each, and layouts of equal batch share one sum.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache

import numpy as np

from armillary.planning.device_model.efficiency import WIDE
from armillary.planning.device_model.vectorised_layouts import Array, Bools, Ints, Layouts, distinct, plus, scaled
from armillary.planning.training.op_times import Work, attention, eager_operators, matmul, memory_bound, no_work
from armillary.planning.training.train_case import TrainCase
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import Batch, OpWithBackward
from armillary.spec.arithmetic.workload import embedding_operations, head_operations, layer_operations, make_batch
from armillary.spec.model import LayerKind, ModelConfig


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
            parts.append(matmul(case, piece, layouts))
        elif piece.forward.kind == "attention":
            assert kind is not None
            parts.append(attention(case, piece, layouts, kind))
        elif not eager:
            parts.append(memory_bound(case, piece, layouts))
        if eager:
            parts.append(eager_operators(case, piece, layouts))
    return plus(*parts)
