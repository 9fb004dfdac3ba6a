"""One launch from the fused projection to paged attention: split, QK norm, rotary positions, cache write.

A program takes a few tokens of one KV head: its queries, its key, its value. Every row is read once, as the two halves
that are rotated with each other and the rest, and is written once: queries to their own tensor, keys and values to
their page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, is_bare, on, power_of_two
from armillary.kernels.paged.qkv_to_cache import QkvOptions

# a tile of rows is [tokens, heads, dims]; R dims are rotated with R others


@triton.jit
def _read(
    rows,
    there,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
):
    """Rows at pointers [B, H, 1] in three parts: the two that are rotated with each other, and the rest."""
    pair = tl.arange(0, R_PAD)[None, None, :]
    extra = tl.arange(0, REST_PAD)[None, None, :]
    if INTERLEAVED:
        both = tl.arange(0, 2 * R_PAD)[None, None, :]
        x = tl.load(rows + both, mask=there & (both < 2 * R), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [B, H, R_PAD, 2]))
    else:
        first = tl.load(rows + pair, mask=there & (pair < R), other=0.0).to(tl.float32)
        second = tl.load(rows + R + pair, mask=there & (pair < R), other=0.0).to(tl.float32)
    rest = tl.load(rows + 2 * R + extra, mask=there & (extra < REST), other=0.0).to(tl.float32)
    return first, second, rest


@triton.jit
def _clipped(x, clip):
    return tl.clamp(x, -clip, clip, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _write(
    rows,
    there,
    first,
    second,
    rest,
    scale,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """The inverse of `_read`, in the dtype of `rows`; divided by `scale` for a quantised cache."""
    if HAS_SCALE:
        first = _clipped(first / scale, LARGEST)
        second = _clipped(second / scale, LARGEST)
        rest = _clipped(rest / scale, LARGEST)
    kind = rows.dtype.element_ty
    pair = tl.arange(0, R_PAD)[None, None, :]
    extra = tl.arange(0, REST_PAD)[None, None, :]
    if R > 0:
        if INTERLEAVED:
            both = tl.arange(0, 2 * R_PAD)[None, None, :]
            x = tl.reshape(tl.join(first, second), [B, H, 2 * R_PAD])
            tl.store(rows + both, x.to(kind), mask=there & (both < 2 * R))
        else:
            tl.store(rows + pair, first.to(kind), mask=there & (pair < R))
            tl.store(rows + R + pair, second.to(kind), mask=there & (pair < R))
    if REST > 0:
        tl.store(rows + 2 * R + extra, rest.to(kind), mask=there & (extra < REST))


@triton.jit
def _scaled(x, mean, inverse, weight, dim, size: tl.constexpr, PLUS_ONE: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """The norm applied to a part of the dims."""
    x = (x - mean) * inverse
    if HAS_WEIGHT:
        w = tl.load(weight + dim, mask=dim < size, other=0.0).to(tl.float32)[None, None, :]
        x = x * (w + 1.0) if PLUS_ONE else x * w
    return x


@triton.jit
def _normed(
    first,
    second,
    rest,
    weight,
    eps,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
):
    """RMS (NORM 1) or layer norm (NORM 2) of rows in three parts."""
    D: tl.constexpr = 2 * R + REST
    pair, extra = tl.arange(0, R_PAD), tl.arange(0, REST_PAD)
    mean = tl.zeros([1, 1, 1], tl.float32)
    a, b, c = first, second, rest
    if NORM == 2:
        mean = ((tl.sum(first, 2) + tl.sum(second, 2) + tl.sum(rest, 2)) / D)[:, :, None]
        a = tl.where((pair < R)[None, None, :], first - mean, 0.0)
        b = tl.where((pair < R)[None, None, :], second - mean, 0.0)
        c = tl.where((extra < REST)[None, None, :], rest - mean, 0.0)
    square = tl.sum(a * a + b * b, 2)
    if REST > 0:
        square += tl.sum(c * c, 2)
    inverse = tl.rsqrt(square / D + eps)[:, :, None]
    first_dim = 2 * pair if INTERLEAVED else pair
    second_dim = 2 * pair + 1 if INTERLEAVED else pair + R
    first = _scaled(first, mean, inverse, weight, first_dim, 2 * R, PLUS_ONE, HAS_WEIGHT)
    second = _scaled(second, mean, inverse, weight, second_dim, 2 * R, PLUS_ONE, HAS_WEIGHT)
    rest = _scaled(rest, mean, inverse, weight, 2 * R + extra, D, PLUS_ONE, HAS_WEIGHT)
    return first, second, rest


@triton.jit(do_not_specialize=["num_tokens"])
def _kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    scales,
    q_scale,
    slots,
    cache,
    q_out,
    num_tokens,
    eps,
    clip,
    qkv_stride,
    page_stride,
    kv_stride,
    head_stride,
    slot_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    G_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    Q_WEIGHT: tl.constexpr,
    K_WEIGHT: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_Q_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (B tokens, KV head); heads vary first, so that concurrent programs read and write neighbouring memory.
    EARLY: it is launched while the previous kernel runs, and launches the next one early."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    D: tl.constexpr = 2 * R + REST
    head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS * B + tl.arange(0, B)
    live = (token < num_tokens)[:, None, None]
    row = token[:, None, None].to(tl.int64) * qkv_stride + head * ((GROUP + 2) * D)
    member = tl.arange(0, G_PAD)[None, :, None]
    q_there = live & (member < GROUP)
    qa, qb, qc = _read(qkv + row + member * D, q_there, R, R_PAD, REST, REST_PAD, INTERLEAVED, B, G_PAD)
    ka, kb, kc = _read(qkv + row + GROUP * D, live, R, R_PAD, REST, REST_PAD, INTERLEAVED, B, 1)
    va, vb, vc = _read(qkv + row + (GROUP + 1) * D, live, R, R_PAD, REST, REST_PAD, INTERLEAVED, B, 1)
    if HAS_CLIP:
        qa, qb, qc = _clipped(qa, clip), _clipped(qb, clip), _clipped(qc, clip)
        ka, kb, kc = _clipped(ka, clip), _clipped(kb, clip), _clipped(kc, clip)
        va, vb, vc = _clipped(va, clip), _clipped(vb, clip), _clipped(vc, clip)
    if NORM > 0:
        qa, qb, qc = _normed(qa, qb, qc, q_weight, eps, R, R_PAD, REST, REST_PAD, INTERLEAVED, NORM, PLUS_ONE, Q_WEIGHT)
        ka, kb, kc = _normed(ka, kb, kc, k_weight, eps, R, R_PAD, REST, REST_PAD, INTERLEAVED, NORM, PLUS_ONE, K_WEIGHT)
    if R > 0:
        pair = tl.arange(0, R_PAD)[None, None, :]
        at, there = token[:, None, None] * R + pair, live & (pair < R)
        c = tl.load(cos + at, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=there, other=0.0).to(tl.float32)
        qa, qb = qa * c - qb * s, qb * c + qa * s
        ka, kb = ka * c - kb * s, kb * c + ka * s
    if HAS_Q_SCALE:
        factor = tl.load(q_scale + token, mask=token < num_tokens, other=0.0).to(tl.float32)[:, None, None]
        qa, qb, qc = qa * factor, qb * factor, qc * factor

    q_row = (token[:, None, None].to(tl.int64) * (HEADS * GROUP) + head * GROUP + member) * D
    _write(q_out + q_row, q_there, qa, qb, qc, 1.0, R, R_PAD, REST, REST_PAD, INTERLEAVED, B, G_PAD, False, LARGEST)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1).to(tl.int64)[:, None, None]
    place = cache + (slot // PAGE) * page_stride + head * head_stride + (slot % PAGE) * slot_stride
    k_scale, v_scale = 1.0, 1.0
    if HAS_SCALES:
        k_scale, v_scale = tl.load(scales + head), tl.load(scales + HEADS + head)
    valid = live & (slot >= 0)
    _write(place, valid, ka, kb, kc, k_scale, R, R_PAD, REST, REST_PAD, INTERLEAVED, B, 1, HAS_SCALES, LARGEST)
    _write(
        place + kv_stride,
        valid,
        va,
        vb,
        vc,
        v_scale,
        R,
        R_PAD,
        REST,
        REST_PAD,
        INTERLEAVED,
        B,
        1,
        HAS_SCALES,
        LARGEST,
    )


NORMS = {"none": 0, "rms": 1, "layer": 2}


def qkv_cache(
    qkv: Tensor, cache: Tensor, slots_T: Tensor, cos_TR: Tensor | None, sin_TR: Tensor | None, options: QkvOptions
) -> tuple[Tensor, Tensor]:
    """See `armillary.kernels.paged.qkv_to_cache.qkv_cache`."""
    q = (_launched if is_bare(qkv) else _qkv_cache)(
        qkv,
        cache,
        slots_T,
        cos_TR,
        sin_TR,
        options.q_weight,
        options.k_weight,
        options.scales_2K,
        options.q_scale_T,
        NORMS[options.norm],
        options.eps,
        options.plus_one,
        options.interleaved,
        options.clip or 0.0,
    )
    return q, cache


def _launched(
    qkv: Tensor,
    cache: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    scales: Tensor | None,
    q_scale: Tensor | None,
    norm: int,
    eps: float,
    plus_one: bool,
    interleaved: bool,
    clip: float,
) -> Tensor:
    tokens, heads, size = qkv.shape[0], cache.shape[2], cache.shape[4]
    group = qkv.shape[1] // (heads * size) - 2
    q = torch.empty(tokens, heads * group, size, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    for weight in (q_weight, k_weight):
        assert weight is None or weight.numel() == size, "a norm that spans all heads is left to the reference"
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    rotated = cos.shape[-1] if cos is not None else 0
    rest, at_once, warps = size - 2 * rotated, *tiling(tokens, group)
    early = can_start_early(qkv.device)
    pointers = [qkv, *(qkv if x is None else x.contiguous() for x in (cos, sin, q_weight, k_weight, scales, q_scale))]
    with on(qkv):
        _kernel[(ceil_div(tokens, at_once) * heads,)](
            *pointers,
            slots.contiguous(),
            cache,
            q,
            tokens,
            eps,
            clip,
            qkv.stride(0),
            *cache.stride()[:4],
            HEADS=heads,
            GROUP=group,
            G_PAD=power_of_two(group),
            R=rotated,
            R_PAD=power_of_two(rotated),
            REST=rest,
            REST_PAD=power_of_two(rest),
            PAGE=cache.shape[3],
            NORM=norm,
            PLUS_ONE=plus_one,
            Q_WEIGHT=q_weight is not None,
            K_WEIGHT=k_weight is not None,
            HAS_CLIP=clip > 0,
            HAS_SCALES=scales is not None,
            HAS_Q_SCALE=q_scale is not None,
            LARGEST=torch.finfo(cache.dtype).max,
            INTERLEAVED=interleaved and rotated > 0,
            B=at_once,
            EARLY=early,
            num_warps=warps,
            **early_launch(early),
        )
    return q


_qkv_cache = torch.library.custom_op("armillary::qkv_cache", _launched, mutates_args=("cache",))


def tiling(tokens: int, group: int) -> tuple[int, int]:
    """Tokens per program, and its warps; one token per program where programs are few or have many rows anyway."""
    if tokens < 2048:
        return 1, 1 if group <= 4 else 2
    return 4 if group <= 4 else 1, 1


@_qkv_cache.register_fake
def _(qkv, cache, slots, cos, sin, q_weight, k_weight, scales, q_scale, norm, eps, plus_one, interleaved, clip):
    heads, size = cache.shape[2], cache.shape[4]
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // size - 2 * heads, size)
