"""Rotary positions on packed QKV in Triton: one pass that rotates and splits, and its inverse for the backward pass.

A program takes some heads of one token, so that cos and sin are read once for all of them.
"""

from math import log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on, power_of_two
from armillary.kernels.core.prefetch_triton import STREAM

_HALVES = (16384, 64)  # elements per program and per thread
_WHOLE = (8192, 16)  # the same where heads are processed end to end
_SMALLEST = 16  # elements of the smallest piece of a head that is worth its own load
_SECTOR = 32  # bytes of a memory sector


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, group: int, head_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """rope.rope in one kernel."""
    return _rope(qkv, cos, sin, group, head_dim, interleaved)


@torch.library.custom_op(
    "armillary::rope",
    mutates_args=(),
    schema="(Tensor qkv, Tensor cos, Tensor sin, int group, int head_dim, bool interleaved)"
    " -> (Tensor, Tensor, Tensor)",
)
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
    "armillary::rope_backward",
    mutates_args=(),
    schema="(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
)
def _rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dqkv = _empty_backward(dq, dk, dv, cos, sin, interleaved)
    group = dq.shape[-2] // dk.shape[-2]
    q, k, v = (part.contiguous() for part in (dq, dk, dv))
    _launch(dqkv, q, k, v, cos, sin, group, interleaved, backward=True)
    return dqkv


@_rope_backward.register_fake
def _empty_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return dq.new_empty(*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, ctx.group, ctx.head_dim, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    return _rope_backward(dq, dk, dv, cos, sin, ctx.interleaved), None, None, None, None, None


_rope.register_autograd(_gradients, setup_context=_setup_context)


def _launch(
    qkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    group: int,
    interleaved: bool,
    *,
    backward: bool,
) -> None:
    if not qkv.numel():
        return
    dim, rotated = q.shape[-1], cos.shape[-1]
    tokens, slots = qkv.numel() // qkv.shape[-1], qkv.shape[-1] // dim
    # [tokens, R] in fp32; a table that several rows of the batch share is expanded
    cos, sin = (table.expand(*qkv.shape[:-1], 1, rotated).reshape(tokens, rotated).float() for table in (cos, sin))
    # Where halves begin inside a sector, processing them separately would read and write it twice: heads are then
    # processed end to end, and the other half of the rotated dims is read again.
    if not interleaved and rotated * qkv.element_size() % _SECTOR:
        front, front_more = pieces(2 * rotated)
        rest, rest_more = pieces(max(0, dim - front - front_more))
        elements, of_a_thread = _WHOLE
        heads_at_once = max(1, min(power_of_two(slots), elements // power_of_two(dim)))
        warps = 1 << max(0, round(log2(heads_at_once * dim / (32 * of_a_thread))))
        with on(qkv):
            _whole_kernel[(tokens, ceil_div(slots, heads_at_once))](
                qkv,
                q,
                k,
                v,
                cos,
                sin,
                slots,
                GROUP=group,
                DIM=dim,
                ROTATED=rotated,
                FRONT=front,
                FRONT_MORE=front_more,
                REST=rest,
                REST_MORE=rest_more,
                BACKWARD=backward,
                HEADS=heads_at_once,
                num_warps=min(16, warps),
            )
        return
    elements, of_a_thread = _HALVES
    heads_at_once = max(1, min(power_of_two(slots), elements // power_of_two(dim)))
    half, half_more = pieces(rotated)
    rest, rest_more = pieces(dim - 2 * rotated)
    with on(qkv):
        _kernel[(tokens, ceil_div(slots, heads_at_once))](
            qkv,
            q,
            k,
            v,
            cos,
            sin,
            slots,
            GROUP=group,
            DIM=dim,
            ROTATED=rotated,
            HALF=half,
            HALF_MORE=half_more,
            REST=rest,
            REST_MORE=rest_more,
            INTERLEAVED=interleaved,
            BACKWARD=backward,
            HEADS=heads_at_once,
            num_warps=max(1, min(16, heads_at_once * power_of_two(dim) // (32 * of_a_thread))),
        )


def pieces(count: int) -> tuple[int, int]:
    """Two powers of two whose sum holds `count`, the second 0 where one alone is as good: 48 -> (32, 16)."""
    power = power_of_two(count) if count else 0
    rest = power_of_two(count - power // 2)
    return (power // 2, rest) if _SMALLEST <= rest < power // 2 else (power, 0)


@triton.jit
def _rotated(first, second, cos, sin, is_value):
    return tl.where(is_value, first, first * cos - second * sin), tl.where(is_value, second, second * cos + first * sin)


@triton.jit
def _rotate(
    source,
    target,
    cos_ptr,
    sin_ptr,
    there,
    is_value,
    ROTATED: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Pairs START … START + SIZE of all heads, rotated."""
    pair = START + tl.arange(0, SIZE)[None, :]
    cos = tl.load(cos_ptr + pair, mask=pair < ROTATED, other=0.0)
    sin = tl.load(sin_ptr + pair, mask=pair < ROTATED, other=0.0)
    if BACKWARD:  # the inverse of a rotation is a rotation by the negative angle
        sin = -sin
    if INTERLEAVED:
        at = 2 * START + tl.arange(0, 2 * SIZE)[None, :]
        inside = there & (at < 2 * ROTATED)
        both = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [both.shape[0], SIZE, 2]))
        first, second = _rotated(first, second, cos, sin, is_value)
        both = tl.reshape(tl.join(first, second), [both.shape[0], 2 * SIZE])
        tl.store(target + at, both.to(target.dtype.element_ty), mask=inside, cache_modifier=STREAM)
    else:
        inside = there & (pair < ROTATED)
        first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + ROTATED + pair, mask=inside, other=0.0).to(tl.float32)
        first, second = _rotated(first, second, cos, sin, is_value)
        tl.store(target + pair, first.to(target.dtype.element_ty), mask=inside, cache_modifier=STREAM)
        tl.store(target + ROTATED + pair, second.to(target.dtype.element_ty), mask=inside, cache_modifier=STREAM)


@triton.jit
def _pass(source, target, there, START: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    """Dims START … START + SIZE of all heads, copied."""
    at = START + tl.arange(0, SIZE)[None, :]
    inside = there & (at < DIM)
    tl.store(target + at, tl.load(source + at, mask=inside, other=0.0), mask=inside, cache_modifier=STREAM)


@triton.jit
def _places(
    qkv_ptr, q_ptr, k_ptr, v_ptr, token, slot, slots, GROUP: tl.constexpr, DIM: tl.constexpr, BACKWARD: tl.constexpr
):
    """Where heads are read and written, and whether each is a value. Heads are numbered in output order, so that a
    program writes one contiguous range and may read from several."""
    kv_heads = slots // (GROUP + 2)
    if BACKWARD:
        head, place = slot // (GROUP + 2), slot % (GROUP + 2)
        packed_slot = slot
    else:
        kv_slot = slot - kv_heads * GROUP  # keys, then values
        head = tl.where(kv_slot < 0, slot // GROUP, tl.where(kv_slot < kv_heads, kv_slot, kv_slot - kv_heads))
        place = tl.where(kv_slot < 0, slot % GROUP, tl.where(kv_slot < kv_heads, GROUP, GROUP + 1))
        packed_slot = head * (GROUP + 2) + place
    is_value = place == GROUP + 1
    packed = qkv_ptr + (token * slots + packed_slot) * DIM
    key_or_value = (token * kv_heads + head) * DIM
    query = q_ptr + (token * kv_heads * GROUP + head * GROUP + place) * DIM
    apart = tl.where(place < GROUP, query, tl.where(is_value, v_ptr + key_or_value, k_ptr + key_or_value))
    if BACKWARD:
        return apart, packed, is_value
    return packed, apart, is_value


@triton.jit
def _kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_MORE: tl.constexpr,
    REST: tl.constexpr,
    REST_MORE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source, target, is_value = _places(qkv_ptr, q_ptr, k_ptr, v_ptr, token, slot, slots, GROUP, DIM, BACKWARD)
    there = slot < slots
    cos, sin = cos_ptr + token * ROTATED, sin_ptr + token * ROTATED
    if HALF > 0:
        _rotate(source, target, cos, sin, there, is_value, ROTATED, 0, HALF, INTERLEAVED, BACKWARD)
    if HALF_MORE > 0:
        _rotate(source, target, cos, sin, there, is_value, ROTATED, HALF, HALF_MORE, INTERLEAVED, BACKWARD)
    if REST > 0:
        _pass(source, target, there, 2 * ROTATED, REST, DIM)
    if REST_MORE > 0:
        _pass(source, target, there, 2 * ROTATED + REST, REST_MORE, DIM)


@triton.jit
def _loaded(source, there, START: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    """Dims START … START + SIZE of all heads."""
    at = START + tl.arange(0, SIZE)[None, :]
    return tl.load(source + at, mask=there & (at < DIM), other=0.0)


@triton.jit
def _stored(target, x, there, START: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr):
    at = START + tl.arange(0, SIZE)[None, :]
    tl.store(target + at, x.to(target.dtype.element_ty), mask=there & (at < DIM), cache_modifier=STREAM)


@triton.jit
def _rotated_in_place(
    source,
    cos_ptr,
    sin_ptr,
    there,
    is_value,
    ROTATED: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """The same, rotated where they are. The partner of a dim is read a second time, from L1."""
    at = START + tl.arange(0, SIZE)[None, :]
    upper, is_rotated = at >= ROTATED, at < 2 * ROTATED
    pair = at - tl.where(upper, ROTATED, 0)
    rotating = there & is_rotated & (is_value == 0)
    x = _loaded(source, there, START, SIZE, DIM)
    other = tl.load(source + at + tl.where(upper, -ROTATED, ROTATED), mask=rotating, other=0.0)
    cos = tl.load(cos_ptr + pair, mask=is_rotated, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=is_rotated, other=0.0)
    rotated = x.to(tl.float32) * cos + other.to(tl.float32) * tl.where(upper != BACKWARD, sin, -sin)
    return tl.where(rotating, rotated.to(x.dtype), x)


@triton.jit
def _whole_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    FRONT: tl.constexpr,
    FRONT_MORE: tl.constexpr,
    REST: tl.constexpr,
    REST_MORE: tl.constexpr,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Halves that begin inside a sector: the rotated dims are one piece, or two. Everything is loaded before anything
    is stored, because a load does not pass a store."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    source, target, is_value = _places(qkv_ptr, q_ptr, k_ptr, v_ptr, token, slot, slots, GROUP, DIM, BACKWARD)
    there = slot < slots
    cos, sin = cos_ptr + token * ROTATED, sin_ptr + token * ROTATED
    REST_AT: tl.constexpr = FRONT + FRONT_MORE
    if REST > 0:
        rest = _loaded(source, there, REST_AT, REST, DIM)
    if REST_MORE > 0:
        rest_more = _loaded(source, there, REST_AT + REST, REST_MORE, DIM)
    front = _rotated_in_place(source, cos, sin, there, is_value, ROTATED, 0, FRONT, DIM, BACKWARD)
    if FRONT_MORE > 0:
        more = _rotated_in_place(source, cos, sin, there, is_value, ROTATED, FRONT, FRONT_MORE, DIM, BACKWARD)
        _stored(target, more, there, FRONT, FRONT_MORE, DIM)
    _stored(target, front, there, 0, FRONT, DIM)
    if REST > 0:
        _stored(target, rest, there, REST_AT, REST, DIM)
    if REST_MORE > 0:
        _stored(target, rest_more, there, REST_AT + REST, REST_MORE, DIM)
