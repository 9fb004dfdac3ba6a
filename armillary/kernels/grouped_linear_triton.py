"""Grouped products in Triton: tiles of rows that never cross an expert, weights by TMA as one tall matrix.

Programs work out on the device whose rows they have, so a launch depends on shapes only. A tile may read rows of its
neighbours, which it does not store; sums over rows (weight gradients) mask them in their last step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.launch import ceil_div, on, power_of_two

# P rows (copies of tokens), E experts, K inputs, N outputs
_GROUP = 8
_TALL = {"rows": 256, "columns": 128, "step": 64}, {"num_warps": 8, "num_stages": 3}
_WIDE = {"rows": 128, "columns": 256, "step": 64}, {"num_warps": 8, "num_stages": 4}
"""for forward products of many rows an expert, and for all else, as timed on an H200 (benchmarks/experts_h200.md)"""
_MANY = 2048
"""rows an expert beyond which tall tiles that are not full at their end hardly matter"""
_SMALL = {"rows": 32, "columns": 32, "step": 32}
"""for the interpreter, and sizes below a tile"""


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """`armillary.kernels.grouped_linear.grouped_linear`; whether all rows have an expert makes no difference here."""
    result: Tensor = _grouped_linear(x_PK, weight_ENK, ends_E)
    return result


@torch.library.custom_op(
    "armillary::grouped_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _product(x, weight, ends, transposed=True)


@_grouped_linear.register_fake
def _empty(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "armillary::grouped_linear_backward", mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor ends, bool dx, bool dweight) -> (Tensor, Tensor)",
)  # fmt: skip
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool
) -> tuple[Tensor, Tensor]:
    """What is not wanted comes back empty."""
    dy = dy.contiguous()
    back = _product(dy, weight, ends, transposed=False) if dx else x.new_empty(0)
    return back, _row_sums(dy, x, ends, len(weight)) if dweight else weight.new_empty(0)


@_backward.register_fake
def _empty_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if dx else 0), weight.new_empty(weight.shape if dweight else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x_wanted, weight_wanted, _ = ctx.needs_input_grad
    dx, dweight = _backward(dy, *ctx.saved_tensors, x_wanted, weight_wanted)
    return dx if x_wanted else None, dweight if weight_wanted else None, None


_grouped_linear.register_autograd(_gradients, setup_context=_keep)


# --- launches


def _product(a: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool) -> Tensor:
    """a @ weight[e]ᵀ ([E, columns, R]) or a @ weight[e] ([E, R, columns]) for the rows of each e."""
    a, weight = a.contiguous(), weight.contiguous()
    (P, R), experts = a.shape, len(weight)
    columns = weight.shape[1] if transposed else weight.shape[2]
    out = a.new_empty(P, columns)
    if not out.numel():
        return out
    block, settings = _blocks(a, rows=P // experts if transposed else 0)
    tall = weight.flatten(0, 1)
    shape = [block["columns"], block["step"]] if transposed else [block["step"], block["columns"]]
    down = ceil_div(P, block["rows"]) + experts  # every stretch but the first may begin a tile more
    with on(a):
        product_kernel[(down * ceil_div(columns, block["columns"]),)](
            TensorDescriptor.from_tensor(a, [block["rows"], block["step"]]), TensorDescriptor.from_tensor(tall, shape),
            out, ends, down, P, columns, R, E=experts, SLOTS=power_of_two(experts + 1), TRANSPOSED=transposed,
            EXACT=_precision(a), ROWS=block["rows"], COLUMNS=block["columns"], STEP=block["step"], GROUP=_GROUP,
            **settings,
        )  # fmt: skip
    return out


def _row_sums(dy: Tensor, x: Tensor, ends: Tensor, experts: int) -> Tensor:
    """dy[rows of e]ᵀ @ x[rows of e]: [E, N, K]."""
    x = x.contiguous()
    (P, N), K = dy.shape, x.shape[1]
    if not P:
        return dy.new_zeros(experts, N, K)
    out = dy.new_empty(experts, N, K)
    block, settings = _blocks(dy)
    grid = (experts * ceil_div(N, block["rows"]) * ceil_div(K, block["columns"]),)
    with on(dy):
        row_sums_kernel[grid](
            TensorDescriptor.from_tensor(dy, [block["step"], block["rows"]]),
            TensorDescriptor.from_tensor(x, [block["step"], block["columns"]]), out, ends, N, K,
            EXACT=_precision(dy), ROWS=block["rows"], COLUMNS=block["columns"], STEP=block["step"], GROUP=_GROUP,
            **settings,
        )  # fmt: skip
    return out


def _blocks(a: Tensor, rows: int = 0) -> tuple[dict[str, int], dict[str, int]]:
    """(sizes of a tile, launch options); fp32 takes twice the shared memory and has no tensor cores to feed."""
    if not a.is_cuda:
        return _SMALL, {}
    if a.dtype == torch.float32:
        return {"rows": 64, "columns": 64, "step": 32}, {"num_warps": 8, "num_stages": 3}
    return _TALL if rows >= _MANY else _WIDE


def _precision(a: Tensor) -> str:
    """fp32 inputs are multiplied as fp32, not as tf32."""
    return "ieee" if a.dtype == torch.float32 else "tf32"


# --- kernels


@triton.jit
def product_kernel(
    a_desc, weight_desc, out_ptr, ends_ptr, down, P, columns, R, E: tl.constexpr, SLOTS: tl.constexpr,
    TRANSPOSED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's rows. Rows behind the last expert's are one more stretch, which is written as zeros."""
    across = tl.cdiv(columns, COLUMNS)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = first + within % height, within // height * COLUMNS
    slot = tl.arange(0, SLOTS)
    ends = tl.load(ends_ptr + slot, mask=slot < E, other=0)
    ends = tl.where(slot < E, ends, P)
    starts = tl.load(ends_ptr + slot - 1, mask=(slot > 0) & (slot <= E), other=0)
    starts = tl.where(slot <= E, starts, P)
    lasts = tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0)  # tiles up to and with each stretch
    expert = tl.sum((lasts <= tile).to(tl.int32), 0)
    if expert <= E:
        is_mine = slot == expert
        start, end = tl.sum(tl.where(is_mine, starts, 0), 0), tl.sum(tl.where(is_mine, ends, 0), 0)
        before = tl.sum(tl.where(slot == expert - 1, lasts, 0), 0)
        row = start + (tile - before) * ROWS
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        steps = tl.where(expert < E, tl.cdiv(R, STEP), 0)
        for step in tl.range(0, steps):
            a = a_desc.load([row, step * STEP])
            if TRANSPOSED:
                acc = tl.dot(a, tl.trans(weight_desc.load([expert * columns + column, step * STEP])), acc,
                             input_precision=EXACT)
            else:  # columns of a beyond R are zeros, whatever the next expert's weight has there
                acc = tl.dot(a, weight_desc.load([expert * R + step * STEP, column]), acc, input_precision=EXACT)
        m, n = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        at = m.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < end) & (n[None, :] < columns))


@triton.jit
def row_sums_kernel(
    dy_desc, x_desc, out_ptr, ends_ptr, N, K, EXACT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's weight gradient: a sum over its rows."""
    down, across = tl.cdiv(N, ROWS), tl.cdiv(K, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    pid = tl.program_id(0) % (down * across)
    first = pid // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = pid % (GROUP * across)
    n0, k0 = (first + within % height) * ROWS, within // height * COLUMNS
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    whole = (end - start) // STEP
    for step in tl.range(0, whole):
        dy = dy_desc.load([start + step * STEP, n0])
        acc = tl.dot(tl.trans(dy), x_desc.load([start + step * STEP, k0]), acc, input_precision=EXACT)
    row = start + whole * STEP
    if row < end:
        mine = row + tl.arange(0, STEP) < end
        dy, x = dy_desc.load([row, n0]), x_desc.load([row, k0])
        dy, x = tl.where(mine[:, None], dy, 0.0), tl.where(mine[:, None], x, 0.0)
        acc = tl.dot(tl.trans(dy), x.to(dy.dtype), acc, input_precision=EXACT)
    n, k = n0 + tl.arange(0, ROWS), k0 + tl.arange(0, COLUMNS)
    at = expert.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))
