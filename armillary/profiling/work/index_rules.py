"""Rules for gather and scatter: the traffic is that of the indexed rows or elements, never the full tensor.

A list of indices has no shapes in most traces; then a write is known by its values, and a read is not known at all.
"""

from collections.abc import Callable
from math import prod

import numpy as np

from armillary.profiling.trace.op_call import Call, NoModel, Tensor
from armillary.spec.arithmetic import non_gemm_ops
from armillary.spec.arithmetic.ops import Op


def select(call: Call) -> Op:
    """index_select(x, dim, index)."""
    x, index = call.tensor(0), call.tensors[-1]
    picked = index.count * _row(call, x) * x.size
    return call.op("copy", 0, picked + index.bytes, picked)


def _row(call: Call, x: Tensor) -> int:
    """Elements that one index along argument 1's dim names; the fewest, where the dim is not in the trace."""
    dim = call.numbers(1)
    return x.count // (x.shape[dim[0]] if dim else max(x.shape))


def gather(call: Call) -> Op:
    """One element per index."""
    x, index = call.tensor(0), call.tensors[-1]
    picked = index.count * x.size
    return call.op("copy", 0, picked + index.bytes, picked)


def subscript(call: Call) -> Op:
    """x[i, j]: known where the trace has the indices' shapes."""
    x, indices = call.tensor(0), (call.lists() or [()])[0]
    if not indices or len(indices) > len(x.shape) or indices[0].shape == x.shape:
        raise NoModel  # the last is a mask: how much it lets through is not in a trace
    picked = prod(np.broadcast_shapes(*(i.shape for i in indices))) * prod(x.shape[len(indices) :])
    return call.op("copy", 0, picked * x.size + sum(i.bytes for i in indices), picked * x.size)


def place(*, adds: bool = False) -> Callable[[Call], Op]:
    """index_copy_(x, dim, index, rows): read and written once, and once more read where they are added."""

    def rule(call: Call) -> Op:
        x, index, rows = call.tensor(0), call.tensor(2), call.tensor(3)
        moved = rows.count * x.size
        read = rows.bytes + index.bytes + (moved if adds else 0)
        return _placed(call, rows.count if adds else 0, read, moved)

    return rule


def fill(call: Call) -> Op:
    """index_fill_(x, dim, index, number)."""
    x, index = call.tensor(0), call.tensor(2)
    return _placed(call, 0, index.bytes, index.count * _row(call, x) * x.size)


def put(call: Call) -> Op:
    """x[indices] = values. A single value may be written to any number of places."""
    x, values = call.tensor(0), call.tensor(2)
    if values.count <= 1:
        raise NoModel
    adds = call.flag(3)
    moved = values.count * x.size
    return _placed(call, values.count if adds else 0, values.bytes + (moved if adds else 0), moved)


def scatter(*, adds: bool = False) -> Callable[[Call], Op]:
    """scatter_(x, dim, index, values): one element per index."""

    def rule(call: Call) -> Op:
        x, index = call.tensor(0), call.tensor(2)
        moved = index.count * x.size
        values = moved if call.has_tensor(3) else 0
        return _placed(call, index.count if adds else 0, index.bytes + values + (moved if adds else 0), moved)

    return rule


def _placed(call: Call, flops: float, read: float, written: float) -> Op:
    """Not in place, the tensor is copied first."""
    copied = 0.0 if call.name.endswith("_") else call.tensor(0).bytes
    return call.op("copy", flops, read + copied, written + copied)


# --- embeddings


def embedding(call: Call) -> Op:
    w, index = call.tensor(0), call.tensor(1)
    return non_gemm_ops.embedding(call.name, index.count, w.shape[-1], dtype=w.dtype)


def embedding_backward(call: Call) -> Op:
    dy, index = call.tensor(0), call.tensor(1)
    vocab = (call.numbers(2) or (index.count,))[0]
    op = non_gemm_ops.embedding_backward(call.name, index.count, dy.shape[-1], vocab, dtype=dy.dtype)
    return call.op("embedding", op.flops, op.bytes_read, vocab * dy.shape[-1] * dy.size)  # zeros are written too


def embedding_bag(call: Call) -> Op:
    """Rows read and summed to one per bag."""
    w, index, offsets = (call.tensor(i) for i in range(3))
    row = w.shape[-1] * w.size
    bags = offsets.count if len(index.shape) == 1 else index.shape[0]
    read = index.count * row + index.bytes + offsets.bytes
    return call.op("embedding", index.count * w.shape[-1], read, bags * row)


def embedding_bag_backward(call: Call) -> Op:
    """(gradient of the bags, index, offsets, …, rows of the table): every row of the table's gradient is written."""
    dy, index = call.tensor(0), call.tensor(1)
    vocab = (call.numbers(5) or (index.count,))[0]
    row = dy.shape[-1] * dy.size
    return call.op("embedding", index.count * dy.shape[-1], dy.bytes + index.bytes, max(vocab, index.count) * row)
