"""Triton kernels of linear + cross-entropy: a chunk of logits becomes its losses and, in place, its gradient."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on, power_of_two


def to_gradient_(
    z_mV: Tensor,
    targets_m: Tensor,
    losses_m: Tensor,
    ignore_index: int,
    softcap: float,
    scale: float,
    *,
    write: bool,
    warps: int = 32,
    stages: int = 3,
) -> None:
    """Write the losses; `write` also replaces the logits by d loss / d logits, in place. Rows may be padded, so that
    each begins on 16 bytes; the padding is ignored and overwritten."""
    vocab, padded, each = z_mV.shape[1], z_mV.stride(0), 16 // z_mV.element_size()
    warps = min(warps, max(4, power_of_two(ceil_div(vocab, 32 * each))))
    with on(z_mV):
        gradient_kernel[(len(z_mV),)](
            z_mV,
            targets_m,
            losses_m,
            vocab,
            padded,
            ignore_index,
            softcap,
            scale,
            scale * math.log2(math.e),
            CAPPED=softcap != 0.0,
            RAW=softcap == 0.0 and scale > 0,
            UNIT=scale == 1.0 and softcap == 0.0,
            WRITE=write,
            EXACT=vocab == padded,
            EVEN=padded % (32 * warps * each) == 0,
            LANES=32 * warps,
            EACH=each,
            STAGES=stages,
            num_warps=warps,
        )


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor in another dtype; torch would round the factor to x's dtype first."""
    out = torch.empty_like(x, dtype=dtype)
    block = 8192
    if x.numel():
        with on(x):
            scale_kernel[(ceil_div(x.numel(), block),)](x, factor, out, x.numel(), BLOCK=block, num_warps=8)
    return out


@triton.jit
def scale_kernel(x_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _logit(z, softcap, scale, CAPPED: tl.constexpr):
    z = z.to(tl.float32) * scale
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
    return z


@triton.jit
def _load(pointers, at, V, padded, EXACT: tl.constexpr, EVEN: tl.constexpr):
    """Whole vectors of 16 bytes; -inf from V on."""
    z = tl.load(pointers) if EVEN else tl.load(pointers, mask=at < padded, other=float("-inf"))
    z = z.to(tl.float32)
    return z if EXACT else tl.where(at < V, z, float("-inf"))


@triton.jit
def gradient_kernel(
    z_ptr,
    target_ptr,
    loss_ptr,
    V,
    padded,
    ignore_index,
    softcap,
    scale,
    scale2,
    CAPPED: tl.constexpr,
    RAW: tl.constexpr,
    UNIT: tl.constexpr,
    WRITE: tl.constexpr,
    EXACT: tl.constexpr,
    EVEN: tl.constexpr,
    LANES: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per row, in two passes; the second goes backwards and finds part of the row in L2. Every thread keeps
    its own maximum and sum, so threads synchronise once per row. RAW: the scale is left to the exponential, where it
    costs nothing (scale2 is in base-2 units); UNIT: it is 1."""
    BLOCK: tl.constexpr = LANES * EACH
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * padded
    target = tl.load(target_ptr + row)
    offsets = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    blocks = tl.cdiv(padded, BLOCK)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if WRITE:
            for i in range(blocks):
                at = i * BLOCK + offsets
                tl.store(z_ptr + at, tl.zeros((LANES, EACH), z_ptr.dtype.element_ty), mask=at < padded)
    else:
        top = tl.full((LANES,), float("-inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            at = i * BLOCK + offsets
            z = _load(z_ptr + at, at, V, padded, EXACT, EVEN)
            if not RAW:
                z = _logit(z, softcap, scale, CAPPED) * 1.4426950408889634
                if not (EVEN and EXACT):  # a capped -inf would be finite
                    z = tl.where(at < V, z, float("-inf"))
            highest = tl.max(z, 1)
            new = tl.maximum(top, highest * scale2 if RAW else highest)
            base = tl.where(new == float("-inf"), 0.0, new)
            z = z * scale2 - base[:, None] if RAW else z - base[:, None]
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(z), 1)
            top = new
        highest = tl.max(top, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        lse = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        inside = (target >= 0) & (target < V)
        own = tl.load(z_ptr + target, mask=inside, other=float("nan"))  # a target outside the vocabulary gives NaN
        own = _logit(own, softcap, scale, CAPPED)
        tl.store(loss_ptr + row, lse / 1.4426950408889634 - own)
        if WRITE:
            tl.debug_barrier()  # all threads have read the target's logit before it is overwritten
            for i in tl.range(0, blocks, num_stages=STAGES):
                at = (blocks - 1 - i) * BLOCK + offsets
                z = _load(z_ptr + at, at, V, padded, EXACT, EVEN)
                if RAW:
                    dz = tl.exp2(z * scale2 - lse)
                else:
                    z = _logit(z, softcap, scale, CAPPED)
                    dz = tl.exp2(z * 1.4426950408889634 - lse)
                    if CAPPED:
                        dz *= 1 - (z / softcap) * (z / softcap)
                if not UNIT:
                    dz *= scale
                dz = dz.to(z_ptr.dtype.element_ty)
                if EVEN:
                    tl.store(z_ptr + at, dz)
                else:
                    tl.store(z_ptr + at, dz, mask=at < padded)
            # the target's entry is corrected afterwards, not looked for in every block
            tl.debug_barrier()
            p = tl.exp2(own * 1.4426950408889634 - lse) - 1.0
            if CAPPED:
                p *= 1 - (own / softcap) * (own / softcap)
            tl.store(z_ptr + target, (p * scale).to(z_ptr.dtype.element_ty), mask=inside)
