"""Bias, activation and dropout in one Triton kernel, and their backward with the bias's gradient in another.

Both draw the mask of philox.py, word for word. The bias's gradient is summed by each program for its own rows and added
up in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, dense, num_programs, on, power_of_two
from armillary.kernels.core.philox import LANES, WORD, keep_scale, threshold
from armillary.kernels.core.reductions_triton import column_sums
from armillary.kernels.core.requirements import interpreted
from armillary.kernels.pointwise.dropout_pairs_triton import backward_pairs, draw, forward_pairs
from armillary.kernels.pointwise.functions_triton import act, act_and_slope, act_kept, through

_FORWARD, _BACKWARD, _BACKWARD_LIGHT = (1024, 2048, 4), (2048, 2048, 8, 4), (1024, 4096, 4, 6)
"""columns and numbers a program takes at a time, its warps; programs a multiprocessor"""
_LIGHT, _HEAVY = ("none",), ("gelu", "gelu_tanh")
"""activations whose backward takes other sizes, and those where it is not quicker in pairs"""
_BF16_INFINITY = 0x7F80


def bias_act_dropout(x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float) -> Tensor:
    """bias_act_dropout.bias_act_dropout in one kernel."""
    result: Tensor = _run(x, bias, seed, activation, p)
    return result


@torch.library.custom_op(
    "armillary::bias_act_dropout",
    mutates_args=(),
    schema="(Tensor x, Tensor? bias, Tensor seed, str activation, float p) -> Tensor",
)
def _run(x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float) -> Tensor:
    y = _empty(x, bias, seed, activation, p)
    if not x.numel():
        return y
    x, bias = x.contiguous(), dense(bias)
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    block, held, warps = _tile(columns, *_FORWARD)
    pieces = ceil_div(columns, block)
    pairs = _in_pairs(x, p)
    if pairs and block < _FORWARD[0]:  # their bias is spread over the threads anew: more rows share it
        held *= 2
    kernel, least = (forward_pairs, _least(p) * 0x10001) if pairs else (_forward_kernel, _least(p) << 17)
    with on(x):
        kernel[(ceil_div(rows, held) * pieces,)](
            x,
            bias,
            seed,
            y,
            rows,
            columns,
            pieces,
            least,
            keep_scale(p),
            _over(p),
            BIAS=bias is not None,
            DROP=p > 0,
            ACT=_activation(activation, p),
            HELD=held,
            BLOCK=block,
            MASKED=bool(columns % block or rows % held),
            num_warps=warps,
            **_flags(pairs, columns),
        )
    return y


@_run.register_fake
def _empty(x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "armillary::bias_act_dropout_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor? bias, Tensor seed, str activation, float p) -> (Tensor, Tensor)",
)
def _run_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float
) -> tuple[Tensor, Tensor]:
    """(gradient of x, of bias or empty)."""
    dx, db = _empty_backward(dy, x, bias, seed, activation, p)
    if not x.numel():
        return dx, db.zero_()
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    *sizes, at_once = _BACKWARD_LIGHT if activation in _LIGHT else _BACKWARD
    block, held, warps = _tile(columns, *sizes)
    pieces = ceil_div(columns, block)
    programs = max(1, min(num_programs(x, at_once) // pieces, ceil_div(rows, held)))
    parts = x.new_empty(programs if bias is not None else 0, columns, dtype=torch.float32)
    dy, x = dy.contiguous(), x.contiguous()
    pairs = _in_pairs(x, p) and _in_pairs(dy, p) and activation not in _HEAVY
    kernel, least = (backward_pairs, _least(p) * 0x10001) if pairs else (_backward_kernel, _least(p) << 17)
    with on(x):
        kernel[(pieces, programs)](
            dy,
            x,
            dense(bias),
            seed,
            dx,
            parts,
            rows,
            columns,
            least,
            keep_scale(p),
            BIAS=bias is not None,
            DROP=p > 0,
            ACT=activation,
            HELD=held,
            BLOCK=block,
            MASKED=bool(columns % block or rows % held),
            num_warps=warps,
            **_flags(pairs, columns),
        )
    if bias is not None:
        column_sums(parts[None], db)
    return dx, db


@_run_backward.register_fake
def _empty_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, seed: Tensor, activation: str, p: float
) -> tuple[Tensor, Tensor]:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    return dx, x.new_empty(0) if bias is None else torch.empty_like(bias)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, seed, ctx.activation, ctx.p = inputs
    ctx.save_for_backward(x, bias, seed)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, bias, seed = ctx.saved_tensors
    dx, db = _run_backward(dy, x, bias, seed, ctx.activation, ctx.p)
    return dx, None if bias is None else db, None, None, None


_run.register_autograd(_gradients, setup_context=_keep)


def _tile(columns: int, widest: int, elements: int, warps: int) -> tuple[int, int, int]:
    """Columns and rows a program takes at a time, and its warps; as many columns as leave the fewest lanes idle."""
    block = max(LANES, min(widest, power_of_two(columns)))
    blocks = [block >> shift for shift in range(4) if block >> shift >= min(block, 256)]
    block = min(blocks, key=lambda one: (round(ceil_div(columns, one) * one / columns, 2), -one))
    return block, max(1, elements // block), warps


def _least(p: float) -> int:
    """The threshold; where all is dropped, the scale of 0 does it."""
    return threshold(p) % WORD


def _activation(name: str, p: float) -> str:
    """Where all is dropped, a sigmoid cannot take the scale in its stride: zeros need none."""
    return name if keep_scale(p) or name in ("relu", "relu2") else "none"


def _over(p: float) -> float:
    """1 / keep_scale(p); not used where that is 0."""
    return 1 / keep_scale(p) if keep_scale(p) else 1.0


def _in_pairs(x: Tensor, p: float) -> bool:
    """Whether pairs of bf16 can be read as words of 32 bits; a threshold beyond infinity is no number to compare to."""
    fits = x.dtype == torch.bfloat16 and x.shape[-1] % LANES == 0 and x.data_ptr() % 16 == 0
    return fits and _least(p) <= _BF16_INFINITY


def _flags(pairs: bool, columns: int) -> dict[str, bool]:
    """What only one of the kernels asks for."""
    return {"ASM": not interpreted()} if pairs else {"ALIGNED": columns % LANES == 0}


# --- kernels


@triton.jit
def _kept(seed, row, start, columns, threshold, ALIGNED: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a tile stay, rows `row` [HELD, 1] and columns from `start`. 15 bits are compared in the upper
    part of 32, where `threshold` stands too. Where rows are ALIGNED to a counter's lanes, one is drawn for all."""
    threshold = threshold.to(tl.uint32)
    if ALIGNED:
        counter = row * (columns // 8) + (start // 8 + tl.arange(0, BLOCK // 8))[None, :]
        r0, r1, r2, r3 = draw(seed, counter)
        words = tl.join(tl.join(r0, r2), tl.join(r1, r3))
        kept = tl.reshape(tl.join(words << 17, words << 1), [HELD, BLOCK]) >= threshold
    else:
        at = row * columns + (start + tl.arange(0, BLOCK))[None, :]
        r0, r1, r2, r3 = draw(seed, at // 8)
        lane = (at % 8).to(tl.int32)
        word = tl.where(lane < 4, tl.where(lane < 2, r0, r1), tl.where(lane < 6, r2, r3))
        kept = tl.where(lane % 2 == 0, word << 17, word << 1) >= threshold
    return kept


@triton.jit
def _forward_kernel(
    x_ptr,
    bias_ptr,
    seed_ptr,
    y_ptr,
    rows,
    columns,
    pieces,
    threshold,
    scale,
    over,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACT: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A program is HELD rows of one of `pieces` of BLOCK columns; `over` is 1 / scale."""
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    start = (tl.program_id(0) % pieces) * BLOCK
    row = (tl.program_id(0) // pieces).to(tl.int64) * HELD + tl.arange(0, HELD)[:, None]
    column = (start + tl.arange(0, BLOCK))[None, :]
    at, inside = row * columns + column, (row < rows) & (column < columns)
    x = (tl.load(x_ptr + at, mask=inside, other=0.0) if MASKED else tl.load(x_ptr + at)).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if DROP:
        kept = _kept(tl.load(seed_ptr), row, start, columns, threshold, ALIGNED, HELD, BLOCK)
        y = act_kept(x, kept, scale, over, ACT, FAST)
    else:
        y = act(x, ACT, FAST)
    y = y.to(y_ptr.dtype.element_ty)
    if MASKED:
        tl.store(y_ptr + at, y, mask=inside)
    else:
        tl.store(y_ptr + at, y)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    bias_ptr,
    seed_ptr,
    dx_ptr,
    parts_ptr,
    rows,
    columns,
    threshold,
    scale,
    BIAS: tl.constexpr,
    DROP: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACT: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Program (BLOCK columns, some rows, HELD at a time); `parts` gets what it adds to the bias's gradient."""
    start = tl.program_id(0) * BLOCK
    column = (start + tl.arange(0, BLOCK))[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)
    if DROP:
        seed = tl.load(seed_ptr)
    total = tl.zeros([HELD, BLOCK], tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(rows, HELD), tl.num_programs(1)):
        row = block * HELD + tl.arange(0, HELD).to(tl.int64)[:, None]
        inside = (row < rows) & (column < columns)
        x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        dx = tl.load(dy_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            x += bias
        if DROP:
            dx = dx * tl.where(_kept(seed, row, start, columns, threshold, ALIGNED, HELD, BLOCK), scale, 0.0)
        _, slope = act_and_slope(x, ACT, x_ptr.dtype.element_ty != tl.float32)
        dx = through(dx, slope, x, ACT)
        if BIAS:
            total += tl.where(inside, dx, 0.0)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if BIAS:
        at = start + tl.arange(0, BLOCK)
        part = tl.program_id(1).to(tl.int64) * columns
        tl.store(parts_ptr + part + at, tl.sum(total, axis=0), mask=at < columns)
