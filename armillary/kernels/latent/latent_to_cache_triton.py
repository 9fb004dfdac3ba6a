"""One launch from the latent projection to latent attention: RMS norm, rotary positions, cache write.

A program takes one part of some tokens: part 0 is the row of the cache, the others are query parts of a few heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, is_bare, on, power_of_two

# B tokens of a program, H heads, C rank of the latent, A angles, 2·A dims with rotary positions


@triton.jit
def _rotated(rows, to, there, c, s, A: tl.constexpr, A_PAD: tl.constexpr, INTERLEAVED: tl.constexpr, X: tl.constexpr):
    """Rotate rows at pointers [X, 1], written to `to`; cos and sin [1, A_PAD]."""
    kind = to.dtype.element_ty
    if INTERLEAVED:  # neighbours are read and written together
        dim = tl.arange(0, 2 * A_PAD)[None, :]
        there = there & (dim < 2 * A)
        x = tl.load(rows + dim, mask=there, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [X, A_PAD, 2]))
        both = tl.join(first * c - second * s, second * c + first * s)
        tl.store(to + dim, tl.reshape(both, [X, 2 * A_PAD]).to(kind), mask=there)
    else:
        dim = tl.arange(0, A_PAD)[None, :]
        there = there & (dim < A)
        first = tl.load(rows + dim, mask=there, other=0.0).to(tl.float32)
        second = tl.load(rows + A + dim, mask=there, other=0.0).to(tl.float32)
        tl.store(to + dim, (first * c - second * s).to(kind), mask=there)
        tl.store(to + A + dim, (second * c + first * s).to(kind), mask=there)


@triton.jit
def _kernel(
    kv,
    q,
    cache,
    slots,
    cos,
    sin,
    weight,
    q_out,
    eps,
    kv_stride,
    q_stride,
    q_head_stride,
    page_stride,
    slot_stride,
    HEADS: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    C_PAD: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (token, part). EARLY: it is launched while the previous kernel runs, and launches the next one early."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    PARTS: tl.constexpr = 1 + (HEADS + H - 1) // H
    part, token = tl.program_id(0) % PARTS, (tl.program_id(0) // PARTS).to(tl.int64)
    angle = tl.arange(0, A_PAD)[None, :]
    cosine = tl.load(cos + token * A + angle, mask=angle < A, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * A + angle, mask=angle < A, other=0.0).to(tl.float32)
    if part == 0:
        slot = tl.load(slots + token).to(tl.int64)
        row = cache + (slot // PAGE) * page_stride + (slot % PAGE) * slot_stride
        c = tl.arange(0, C_PAD)
        there = (c < C) & (slot >= 0)
        x = tl.load(kv + token * kv_stride + c, mask=there, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
        tl.store(row + c, x.to(cache.dtype.element_ty), mask=there)
        zero = tl.zeros([1, 1], tl.int32)
        _rotated(
            kv + token * kv_stride + C + zero,
            row + C + zero,
            (slot + zero) >= 0,
            cosine,
            sine,
            A,
            A_PAD,
            INTERLEAVED,
            1,
        )
    else:
        head = (part - 1) * H + tl.arange(0, H)[:, None]
        _rotated(
            q + token * q_stride + head * q_head_stride,
            q_out + (token * HEADS + head) * (2 * A),
            head < HEADS,
            cosine,
            sine,
            A,
            A_PAD,
            INTERLEAVED,
            H,
        )


_HEADS = 32  # heads per program


def latent_to_cache(
    kv_TE: Tensor,
    q_TNR: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TA: Tensor,
    sin_TA: Tensor,
    weight_C: Tensor,
    eps: float,
    interleaved: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `armillary.kernels.latent.latent_to_cache.latent_to_cache`."""
    q = (_launched if is_bare(kv_TE) else _latent_to_cache)(
        kv_TE, q_TNR, cache, slots_T, cos_TA, sin_TA, weight_C, eps, interleaved
    )
    return q, cache


def _launched(
    kv: Tensor,
    q: Tensor,
    cache: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    eps: float,
    interleaved: bool,
) -> Tensor:
    (tokens, heads, width), rank = q.shape, weight.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    assert cache.stride(2) == 1, "the numbers of a row are adjacent"
    kv, q = (x if x.stride(-1) == 1 else x.contiguous() for x in (kv, q))
    early, at_once = can_start_early(q.device), min(_HEADS, power_of_two(heads))
    with on(q):
        _kernel[(tokens * (1 + ceil_div(heads, at_once)),)](
            kv,
            q,
            cache,
            *(x.contiguous() for x in (slots, cos, sin, weight)),
            out,
            eps,
            kv.stride(0),
            *q.stride()[:2],
            *cache.stride()[:2],
            HEADS=heads,
            H=at_once,
            C=rank,
            C_PAD=power_of_two(rank),
            A=width // 2,
            A_PAD=power_of_two(width // 2),
            PAGE=cache.shape[1],
            INTERLEAVED=interleaved,
            EARLY=early,
            num_warps=2,
            **early_launch(early),
        )
    return out


_latent_to_cache = torch.library.custom_op("armillary::latent_to_cache", _launched, mutates_args=("cache",))


@_latent_to_cache.register_fake
def _(kv, q, cache, slots, cos, sin, weight, eps, interleaved):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
