"""Work of nested operators: a wrapper has none of its own; one that does the work keeps the time of its parts."""

import numpy as np

from armillary.profiling.trace.host_calls import Host
from armillary.profiling.trace.trace import Array, Trace
from armillary.profiling.work.work import is_explicit, is_guess
from armillary.spec.arithmetic.ops import Op

_MOST = 0.3
"""share of an operator's bytes from which the inner operators do the work"""
_SCALAR = 32
"""bytes moved when one number is cast"""
_BESIDE = frozenset(f"aten::{name}{end}" for name in ("add", "sub", "mul", "div", "relu", "gelu") for end in ("", "_"))
"""elementwise operators inside a GEMM's operator (bias, scale): work of their own"""


def drop_wrappers(host: Host, model: Array, table: list[Op]) -> None:
    """A wrapper, which calls modelled operators for its work, gets no work of its own."""
    events = np.flatnonzero(model >= 0)
    above = _above(host, events)
    inner, outer = events[above >= 0], above[above >= 0]
    if not len(inner):
        return
    kinds = np.array([hash(op.kind) for op in table])
    explicit = np.array([is_explicit(op.name) for op in table], dtype=bool)
    listed = np.array(["_foreach_" in op.name for op in table], dtype=bool)
    moved = np.array([op.bytes for op in table])
    guess = np.array([is_guess(op.name) for op in table], dtype=bool)
    same = (kinds[model[inner]] == kinds[model[outer]]) & ~guess[model[inner]]
    inside = moved[model[inner]]
    counts = (same | ~explicit[model[outer]]) & (inside > _SCALAR)  # a number's cast is not the operator's work
    handed = np.bincount(outer, weights=np.where(counts, inside, 0.0), minlength=len(model))
    handed_on = (handed[outer] > 0) & (handed[outer] >= _MOST * moved[model[outer]])
    one_by_one = listed[model[outer]]  # a list of tensors, each handed to an operator of its own
    model[outer[handed_on | one_by_one]] = -1


def _above(host: Host, events: Array) -> Array:
    """The nearest operator with a model around each one; -1: none."""
    parents = host.parent[events]
    return np.where(parents >= 0, host.worker[parents], -1)


def take_in_parts(trace: Trace, host: Host, model: Array, table: list[Op]) -> None:
    """The time of an operator without a rule of its own, or of a sum inside a norm or softmax, belongs to the enclosing
    operator with a rule, except where it runs beside a GEMM."""
    if not table:
        return
    guess = np.array([is_guess(op.name) for op in table], dtype=bool)
    sums = np.array([op.kind == "reduction" for op in table], dtype=bool)
    gemm = np.array([op.on_matrix_units for op in table], dtype=bool)
    rows = np.array([op.kind in ("norm", "softmax", "loss") for op in table], dtype=bool)
    beside = np.array([name in _BESIDE for name in trace.names], dtype=bool)
    parts, outer = _around(host, model, guess | sums)
    apart = gemm[model[outer]] & beside[trace.name[parts]]
    taken = (outer >= 0) & ((guess[model[parts]] & ~apart) | rows[model[outer]])
    owner: Array = np.full(len(trace), -1, dtype=np.int64)
    owner[parts[taken]] = outer[taken]
    known = np.flatnonzero(host.worker >= 0)
    known = known[owner[host.worker[known]] >= 0]
    host.worker[known] = owner[host.worker[known]]
    model[parts[taken]] = -1


def _around(host: Host, model: Array, partial: Array) -> tuple[Array, Array]:
    """Operators that may be part of another, and the nearest with a model around each that is none; -1: none."""
    heads = np.flatnonzero(host.worker == np.arange(len(model)))
    up: Array = np.full(len(model), -1, dtype=np.int64)
    up[heads] = _above(host, heads)
    through: Array = model < 0
    through[~through] = partial[model[~through]]
    parts = np.flatnonzero((model >= 0) & through)
    outer = up[parts]
    while (wrapped := (outer >= 0) & through[outer]).any():
        outer[wrapped] = up[outer[wrapped]]
    return parts, outer
