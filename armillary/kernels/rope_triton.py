"""Rotary positions on packed QKV in Triton: one pass that turns and takes apart, and the same pass backwards.

A program takes some heads of one token, so that cos and sin are read once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on, power_of_two

_ELEMENTS, _WARPS = 16384, 8
"""numbers a program turns"""


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """rope.rope in one kernel."""
    q, k, v = _rope(qkv, cos, sin, group, head_dim, interleaved)
    return q, k, v


@torch.library.custom_op(
    "armillary::rope", mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, int group, int head_dim, bool interleaved)"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def _rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _empty_rope(qkv, cos, sin, group, head_dim, interleaved)
    _launch(qkv.contiguous(), q, k, v, cos, sin, group, interleaved, backward=False)
    return q, k, v


@_rope.register_fake
def _empty_rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = qkv.shape[-1] // (head_dim * (group + 2))
    q = qkv.new_empty(*qkv.shape[:-1], kv_heads * group, head_dim)
    k, v = (qkv.new_empty(*qkv.shape[:-1], kv_heads, head_dim) for _ in range(2))
    return q, k, v


@torch.library.custom_op(
    "armillary::rope_backward", mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)  # fmt: skip
def _rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dqkv = _empty_backward(dq, dk, dv, cos, sin, interleaved)
    group = dq.shape[-2] // dk.shape[-2]
    q, k, v = (part.contiguous() for part in (dq, dk, dv))
    _launch(dqkv, q, k, v, cos, sin, group, interleaved, backward=True)
    return dqkv


@_rope_backward.register_fake
def _empty_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return dq.new_empty(*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, ctx.group, ctx.head_dim, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return _rope_backward(dq, dk, dv, cos, sin, ctx.interleaved), None, None, None, None, None


_rope.register_autograd(_gradients, setup_context=_keep)


def _launch(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, group: int, interleaved: bool, *,
    backward: bool,
) -> None:  # fmt: skip
    if not qkv.numel():
        return
    dim, turned = q.shape[-1], cos.shape[-1]
    tokens, slots = qkv.numel() // qkv.shape[-1], qkv.shape[-1] // dim
    cos, sin = (_per_token(table, qkv.shape[:-1]) for table in (cos, sin))
    half = power_of_two(turned)
    elements = _ELEMENTS if dim == power_of_two(dim) else _ELEMENTS // 2
    held = max(1, min(power_of_two(slots), elements // power_of_two(dim)))
    with on(qkv):
        _kernel[(tokens, ceil_div(slots, held))](
            qkv, q, k, v, cos, sin, slots, GROUP=group, DIM=dim, TURNED=turned, HALF=half,
            REST=power_of_two(dim - 2 * turned) if dim > 2 * turned else 0, INTERLEAVED=interleaved,
            BACKWARD=backward, HELD=held, num_warps=_WARPS,
        )  # fmt: skip


def _per_token(table: Tensor, shape: torch.Size) -> Tensor:
    """cos or sin as [tokens, R] fp32; a table that several rows of the batch share is spread."""
    return table.expand(*shape, 1, table.shape[-1]).reshape(-1, table.shape[-1]).float()


@triton.jit
def _kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots, GROUP: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * HELD + tl.arange(0, HELD)[:, None]
    kv_heads = slots // (GROUP + 2)
    head, place = slot // (GROUP + 2), slot % (GROUP + 2)
    is_value = place == GROUP + 1
    packed = qkv_ptr + (token * slots + slot) * DIM
    key_or_value = (token * kv_heads + head) * DIM
    query = q_ptr + (token * kv_heads * GROUP + head * GROUP + place) * DIM
    apart = tl.where(place < GROUP, query, tl.where(is_value, v_ptr + key_or_value, k_ptr + key_or_value))
    source, target = packed, apart
    if BACKWARD:
        source, target = apart, packed
    there = slot < slots

    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cos_ptr + token * TURNED + pair, mask=pair < TURNED, other=0.0)
    sin = tl.load(sin_ptr + token * TURNED + pair, mask=pair < TURNED, other=0.0)
    if BACKWARD:  # the inverse of a rotation turns the other way
        sin = -sin
    if INTERLEAVED:
        at = tl.arange(0, 2 * HALF)[None, :]
        inside = there & (at < 2 * TURNED)
        both = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [HELD, HALF, 2]))
        turned_first = tl.where(is_value, first, first * cos - second * sin)
        turned_second = tl.where(is_value, second, second * cos + first * sin)
        both = tl.reshape(tl.join(turned_first, turned_second), [HELD, 2 * HALF])
        tl.store(target + at, both.to(q_ptr.dtype.element_ty), mask=inside)
    else:
        inside = there & (pair < TURNED)
        first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + TURNED + pair, mask=inside, other=0.0).to(tl.float32)
        turned_first = tl.where(is_value, first, first * cos - second * sin)
        turned_second = tl.where(is_value, second, second * cos + first * sin)
        tl.store(target + pair, turned_first.to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(target + TURNED + pair, turned_second.to(q_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = tl.arange(0, REST)[None, :]
        inside = there & (rest < DIM - 2 * TURNED)
        passed = tl.load(source + 2 * TURNED + rest, mask=inside, other=0.0)
        tl.store(target + 2 * TURNED + rest, passed, mask=inside)
