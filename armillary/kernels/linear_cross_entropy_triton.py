"""The Triton part of linear + cross-entropy: a chunk of logits becomes its losses and, in place, its gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on, power_of_two

_LOG2E = tl.constexpr(1.4426950408889634)

def to_gradient_(
    z_mV: Tensor, targets_m: Tensor, losses_m: Tensor, ignore_index: int, softcap: float, scale: float, *,
    write: bool, warps: int = 32, stages: int = 8,
) -> None:  # fmt: skip
    """Writes the losses; `write` also turns the logits into d loss / d logits, in place. So many stages are loaded
    ahead that one program fills a multiprocessor: the rows under way then fit L2, where the second pass finds them."""
    each = 16 // z_mV.element_size()
    warps = min(warps, max(4, power_of_two(ceil_div(z_mV.shape[1], 32 * each))))
    with on(z_mV):
        gradient_kernel[(len(z_mV),)](
            z_mV, targets_m, losses_m, z_mV.shape[1], ignore_index, softcap, scale,
            CAPPED=softcap != 0.0, WRITE=write, LANES=32 * warps, EACH=each,
            STAGES=stages, num_warps=warps,
        )  # fmt: skip


@triton.jit
def _logit(z, softcap, scale, CAPPED: tl.constexpr):
    z = z.to(tl.float32) * scale
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
    return z


@triton.jit
def gradient_kernel(
    z_ptr, target_ptr, loss_ptr, V, ignore_index, softcap, scale,
    CAPPED: tl.constexpr, WRITE: tl.constexpr, LANES: tl.constexpr, EACH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program a row. Every thread keeps a maximum and a sum of its own, so threads meet once a row; the second pass
    over the row goes backwards and finds most of it in L2."""
    BLOCK: tl.constexpr = LANES * EACH
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * V
    target = tl.load(target_ptr + row)
    offsets = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    blocks = tl.cdiv(V, BLOCK)
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if WRITE:
            for i in range(blocks):
                at = i * BLOCK + offsets
                tl.store(z_ptr + at, tl.zeros((LANES, EACH), z_ptr.dtype.element_ty), mask=at < V)
    else:
        top = tl.full((LANES,), float("-inf"), tl.float32)
        total = tl.zeros((LANES,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            at = i * BLOCK + offsets
            z = tl.load(z_ptr + at, mask=at < V, other=0.0)
            z = tl.where(at < V, _logit(z, softcap, scale, CAPPED) * _LOG2E, float("-inf"))
            new = tl.maximum(top, tl.max(z, 1))
            base = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(top - base) + tl.sum(tl.exp2(z - base[:, None]), 1)
            top = new
        highest = tl.max(top, 0)
        highest = tl.where(highest == float("-inf"), 0.0, highest)
        lse = highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))
        inside = (target >= 0) & (target < V)
        own = tl.load(z_ptr + target, mask=inside, other=float("nan"))  # a target beyond the vocabulary is a NaN
        tl.store(loss_ptr + row, lse / _LOG2E - _logit(own, softcap, scale, CAPPED))
        if WRITE:
            for i in tl.range(0, blocks, num_stages=STAGES):
                at = (blocks - 1 - i) * BLOCK + offsets
                z = _logit(tl.load(z_ptr + at, mask=at < V, other=0.0), softcap, scale, CAPPED)
                dz = tl.exp2(z * _LOG2E - lse) - tl.where(at == target, 1.0, 0.0)
                if CAPPED:
                    dz *= 1 - (z / softcap) * (z / softcap)
                tl.store(z_ptr + at, (dz * scale).to(z_ptr.dtype.element_ty), mask=at < V)
