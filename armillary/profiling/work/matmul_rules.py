"""Rules for GEMMs: plain, batched, grouped by expert, and the recurrent layers that are made of them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import prod

from armillary.profiling.trace.op_call import Call, NoModel, Shape, Tensor
from armillary.spec.arithmetic import ops
from armillary.spec.arithmetic.ops import Op


def gemm(first: int) -> Callable[[Call], Op]:
    """[b,] m, k @ [b,] k, n; the operands are arguments `first` and the next."""

    def rule(call: Call) -> Op:
        a, b = call.tensor(first), call.tensor(first + 1)
        if len(a.shape) not in (2, 3):
            raise NoModel
        batch = a.shape[0] if len(a.shape) == 3 else 1
        n = b.shape[-1] if len(b.shape) > 1 else 1
        op = ops.batched_matmul(
            call.name,
            batch,
            a.shape[-2],
            n,
            a.shape[-1],
            dtype=a.dtype,
            weight_dtype=b.dtype,
            out_dtype="bf16" if a.dtype == "fp8" else "",
        )
        return replace(op, bytes_read=a.bytes + b.bytes)

    return rule


def linear(call: Call) -> Op:
    """x [..., k] with a weight [n, k]."""
    x, w = call.tensor(0), call.tensor(1)
    if len(w.shape) > 2 or x.shape[-1] != w.shape[-1]:
        raise NoModel
    n = w.shape[0] if len(w.shape) == 2 else 1
    return ops.matmul(call.name, prod(x.shape[:-1]), n, x.shape[-1], dtype=x.dtype, weight_dtype=w.dtype)


def dot(call: Call) -> Op:
    a = call.tensor(0)
    return ops.reduction(call.name, 2 * a.count, dtype=a.dtype)


def grouped(call: Call) -> Op:
    """One GEMM per expert. Rows [rows, k] with weights [g, k, n]; both with a group's dim; or the gradient of the
    weights, [m, rows] with [rows, n], the rows in groups."""
    a, b = call.tensor(0), call.tensor(1)
    out = "bf16" if a.dtype == "fp8" else ""
    if len(a.shape) == len(b.shape) == 3:
        return gemm(0)(call)
    if len(a.shape) == 2 and len(b.shape) == 3:
        op = ops.grouped_matmul(call.name, a.shape[0], b.shape[2], a.shape[1], groups=b.shape[0], dtype=a.dtype)
        return replace(op, bytes_written=a.shape[0] * b.shape[2] * ops.size_of(out or a.dtype))
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    groups = 1 if len(a.shape) == 3 else _groups(call)
    batch = a.shape[0] if len(a.shape) == 3 else 1  # 3 × 2 dims: the columns of b are in groups
    written = (m * n if batch > 1 else groups * m * n) * ops.size_of(out or a.dtype)
    return call.op("matmul", 2 * m * n * k, a.bytes + b.bytes, written, a.dtype)


def _groups(call: Call) -> int:
    """Experts: the ends of their rows are a list of int32."""
    ends = [t for t in call.tensors[2:] if len(t.shape) == 1 and t.size == 4]
    return ends[-1].count if ends else 1


def recurrent(*, weights: slice | None = None, gemms: int = 1) -> Callable[[Call], Op]:
    """Every matrix of the layer meets every step of every sequence; `weights` are arguments where they are no list."""

    def rule(call: Call) -> Op:
        x = call.tensor(0)
        given = call.args[weights] if weights else (call.lists() or [()])[0]
        matrices = [w for w in given if isinstance(w, Tensor) and len(w.shape) == 2]
        if len(matrices) < 2:
            raise NoModel
        steps, count = prod(x.shape[:-1]), sum(w.count for w in matrices)
        hidden = steps * matrices[1].shape[-1]
        return call.op("matmul", gemms * 2 * steps * count, gemms * (x.count + count) * x.size, hidden * x.size)

    return rule


# --- Inductor's templates


def template(call: Call) -> Op:
    """triton_tem: operands in either orientation and the result, whose shape says which is which."""
    shapes = [t for t in call.tensors if len(t.shape) >= 2]
    out, rest = shapes[-1], shapes[:-1]
    batched = "bmm" in call.name
    batch = out.shape[0] if batched and len(out.shape) == 3 else 1
    m, n = _flat(out.shape, batched)
    for a, b in permutations(rest, 2):
        inner = _inner(_flat(a.shape, batched), _flat(b.shape, batched), m, n)
        if inner:
            return ops.batched_matmul(
                call.name, batch, m, n, inner, dtype=a.dtype, weight_dtype=b.dtype, out_dtype=out.dtype
            )
    raise NoModel


def _flat(shape: Shape, batched: bool) -> tuple[int, int]:
    return (shape[-2] if batched else prod(shape[:-1])), shape[-1]


def _inner(a: tuple[int, int], b: tuple[int, int], m: int, n: int) -> int:
    """k of (m, k) and (k, n), each as given or transposed; 0 where they do not fit."""
    left = {y for x, y in (a, a[::-1]) if x == m}
    right = {y for x, y in (b, b[::-1]) if x == n}
    return max(left & right, default=0)
