"""Rotary positions on heads whose halves begin inside a sector of memory, by a token's numbers from end to end.

A thread takes 16 bytes wherever they lie in a head, so that nothing is read or written in pieces; what a dim turns with
is read once more, out of L1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from armillary.kernels.launch_triton import STREAM


@triton.jit
def flat_kernel(
    qkv_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots, GROUP: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, BACKWARD: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Program (token, BLOCK of its numbers)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, dim = at // DIM, at % DIM
    head, place = slot // (GROUP + 2), slot % (GROUP + 2)
    kv_heads = slots // (GROUP + 2)
    packed = qkv_ptr + token * (slots * DIM) + at
    key_or_value = token * (kv_heads * DIM) + (head * DIM + dim)
    query = q_ptr + token * (kv_heads * GROUP * DIM) + ((head * GROUP + place) * DIM + dim)
    apart = tl.where(place < GROUP, query, tl.where(place == GROUP, k_ptr + key_or_value, v_ptr + key_or_value))
    source, target = (apart, packed) if BACKWARD else (packed, apart)
    there = at < slots * DIM
    x = tl.load(source, mask=there, other=0.0) if MASKED else tl.load(source)
    turning = (dim < 2 * TURNED) & (place <= GROUP)
    if MASKED:
        turning = turning & there
    upper = dim >= TURNED
    other = tl.load(source + tl.where(upper, -TURNED, TURNED), mask=turning, other=0.0).to(tl.float32)
    pair = token * TURNED + (dim - tl.where(upper, TURNED, 0))
    cos = tl.load(cos_ptr + pair, mask=turning, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=turning, other=0.0)
    turned = x.to(tl.float32) * cos + other * tl.where(upper != BACKWARD, sin, -sin)
    x = tl.where(turning, turned.to(x.dtype), x)
    if MASKED:
        tl.store(target, x, mask=there, cache_modifier=STREAM)
    else:
        tl.store(target, x, cache_modifier=STREAM)
