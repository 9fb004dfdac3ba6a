"""Softmax cross-entropy in Triton: the forward reads the logits once (online softmax, Milakov & Gimelshein, arXiv
1805.02867), the backward reads them once more and writes their gradient, in their place where that is wanted.

The largest logit and the log of the sum are kept apart, so that logits of ±1e4 lose nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import as_rows, ceil_div, on, power_of_two
from armillary.kernels.loss.cross_entropy import IGNORED

_FORWARD = (4096, 4, 3)
_BACKWARD, _BACKWARD_ODD = (2048, 2), (1024, 2)
"""numbers a program takes at a time, its warps, pieces on their way at a time; odd: rows begin anywhere in a line"""
_LINE: tl.constexpr = tl.constexpr(64)
"""numbers that a piece begins at a multiple of: 128 bytes of a half format"""
_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = IGNORED,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    overwrite: bool = False,
) -> Tensor:
    """cross_entropy.cross_entropy in one kernel; `overwrite` lets the backward write the gradient over the logits."""
    losses: Tensor = _cross_entropy(logits, targets, ignore_index, smoothing, z_loss, overwrite)[0]
    return losses


@torch.library.custom_op(
    "armillary::cross_entropy",
    mutates_args=(),
    schema="(Tensor logits, Tensor targets, int ignore_index, float smoothing, float z_loss, bool overwrite)"
    " -> (Tensor, Tensor)",
)
def _cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float, overwrite: bool
) -> tuple[Tensor, Tensor]:
    """(losses, [rows, 2]: the largest logit and the log of the sum of exponentials under it)."""
    losses, kept = _empty_cross_entropy(logits, targets, ignore_index, smoothing, z_loss, overwrite)
    if not logits.numel():
        return losses.zero_(), kept
    logits_MV = as_rows(logits)
    rows, vocab = logits_MV.shape
    aligned = _aligned(logits_MV)
    widest, warps, stages = _FORWARD
    with on(logits):
        _forward_kernel[(rows,)](
            logits_MV,
            targets.contiguous(),
            losses,
            kept,
            vocab,
            logits_MV.stride(0),
            ignore_index,
            smoothing,
            z_loss,
            SMOOTH=smoothing != 0,
            ALIGNED=aligned,
            LANES=16 // logits.element_size(),
            BLOCK=min(widest, max(_LINE.value, power_of_two(vocab))),
            STAGES=stages,
            num_warps=warps,
        )
    return losses, kept


@_cross_entropy.register_fake
def _empty_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float, overwrite: bool
) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    return losses, logits.new_empty(targets.numel(), 2, dtype=torch.float32)


@torch.library.custom_op(
    "armillary::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor dloss, Tensor logits, Tensor targets, Tensor kept, int ignore_index, float smoothing, float z_loss)"
    " -> Tensor",
)
def _backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, kept: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    dlogits = _empty_backward(dloss, logits, targets, kept, ignore_index, smoothing, z_loss)
    _write_gradient(dlogits, dloss, logits, targets, kept, ignore_index, smoothing, z_loss)
    return dlogits


@_backward.register_fake
def _empty_backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, kept: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "armillary::cross_entropy_backward_",
    mutates_args=("logits",),
    schema="(Tensor dloss, Tensor(a!) logits, Tensor targets, Tensor kept, int ignore_index, float smoothing,"
    " float z_loss) -> ()",
)
def _backward_in_place(
    dloss: Tensor, logits: Tensor, targets: Tensor, kept: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> None:
    _write_gradient(logits, dloss, logits, targets, kept, ignore_index, smoothing, z_loss)


def _write_gradient(
    out: Tensor,
    dloss: Tensor,
    logits: Tensor,
    targets: Tensor,
    kept: Tensor,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> None:
    if not logits.numel():
        return
    logits_MV, out_MV = as_rows(logits), out.view(-1, out.shape[-1])
    rows, vocab = logits_MV.shape
    aligned = _aligned(logits_MV)
    widest, warps = _BACKWARD if aligned else _BACKWARD_ODD
    block = min(widest, power_of_two(vocab))
    if not aligned and logits_MV.stride(0) != out_MV.stride(0):  # both must begin at the same place of a line
        logits_MV = logits_MV.contiguous()
    pieces = ceil_div(vocab + (0 if aligned else _LINE.value - 1), block)
    with on(logits):
        _backward_kernel[(rows * pieces,)](
            logits_MV,
            targets.contiguous(),
            dloss.contiguous(),
            kept,
            out_MV,
            vocab,
            pieces,
            logits_MV.stride(0),
            out_MV.stride(0),
            ignore_index,
            smoothing,
            z_loss,
            ALIGNED=aligned,
            BLOCK=block,
            num_warps=warps,
        )


def _aligned(logits_MV: Tensor) -> bool:
    return logits_MV.stride(0) % 16 == 0 and logits_MV.shape[1] % 16 == 0


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, *ctx.settings, ctx.overwrite = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1])


def _gradients(ctx: Any, dloss: Tensor | None, _: Any) -> tuple[Any, ...]:
    none = (None,) * 5
    if dloss is None:
        return None, *none
    logits, targets, kept = ctx.saved_tensors
    if ctx.overwrite and logits.is_contiguous():
        _backward_in_place(dloss, logits, targets, kept, *ctx.settings)
        return logits, *none
    return _backward(dloss, logits, targets, kept, *ctx.settings), *none


_cross_entropy.register_autograd(_gradients, setup_context=_keep)


# --- kernels


@triton.jit
def _span(start, vocab, ALIGNED: tl.constexpr):
    """A row counted from where a line begins: (that place, the row's first, its last + 1, and that rounded up to whole
    16 bytes). Reading a few neighbours and leaving them out is quicker than reading one by one."""
    if ALIGNED:
        return start, 0, vocab, vocab
    begin = tl.multiple_of(start // _LINE * _LINE, _LINE)
    first = (start - begin).to(tl.int32)
    last = first + vocab
    return begin, first, last, tl.multiple_of((last + 7) // 8 * 8, 8)


@triton.jit
def _more(x, largest, sums):
    """The largest so far and the sum of exponentials under it, a pair for each row of `x` [groups, lanes]: a group is
    one thread's, so that nobody waits."""
    newer = tl.maximum(largest, tl.max(x, axis=1))
    under = tl.where(newer == -float("inf"), 0.0, newer)  # so far nothing but minus infinity
    scale = tl.exp2((largest - under) * _LOG2E)
    return newer, sums * scale + tl.sum(tl.exp2((x - under[:, None]) * _LOG2E), axis=1)


@triton.jit
def _end(ptr, at, first, last, bound, largest, sums, plain, SMOOTH: tl.constexpr):
    """As _more, for a piece that the row does not fill."""
    inside = (at >= first) & (at < last)
    x = tl.load(ptr + at, mask=at < bound, other=-float("inf")).to(tl.float32)
    largest, sums = _more(tl.where(inside, x, -float("inf")), largest, sums)
    if SMOOTH:
        plain += tl.where(inside, x, 0.0)
    return largest, sums, plain


@triton.jit
def _forward_kernel(
    logits_ptr,
    targets_ptr,
    losses_ptr,
    kept_ptr,
    vocab,
    stride,
    ignore_index,
    smoothing,
    z_loss,
    SMOOTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    if target == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        return
    begin, first, last, bound = _span(row * stride, vocab, ALIGNED)
    ptr = logits_ptr + begin
    GROUPS: tl.constexpr = BLOCK // LANES
    at = (tl.arange(0, GROUPS) * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    largest = tl.full([GROUPS], -float("inf"), tl.float32)
    sums = tl.zeros([GROUPS], tl.float32)
    plain = tl.zeros([GROUPS, LANES], tl.float32)
    begun = 0
    if not ALIGNED:
        largest, sums, plain = _end(ptr, at, first, last, bound, largest, sums, plain, SMOOTH)
        begun = BLOCK
    whole = last // BLOCK * BLOCK
    for start in tl.range(begun, whole, BLOCK, num_stages=STAGES):
        x = tl.load(ptr + start + at).to(tl.float32)
        largest, sums = _more(x, largest, sums)
        if SMOOTH:
            plain += x
    if (whole < last) & (whole >= begun):
        largest, sums, plain = _end(ptr, whole + at, first, last, bound, largest, sums, plain, SMOOTH)
    top, sums = _joined(largest, sums)
    log_sum = tl.log(sums)
    known = (target >= 0) & (target < vocab)
    x = tl.load(logits_ptr + row * stride + target, mask=known, other=float("nan")).to(tl.float32)
    loss = (top - x) + log_sum
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * ((top - tl.sum(plain) / vocab) + log_sum)
    lse = top + log_sum
    loss += z_loss * lse * lse
    tl.store(losses_ptr + row, loss)
    tl.store(kept_ptr + 2 * row, top)
    tl.store(kept_ptr + 2 * row + 1, log_sum)


@triton.jit
def _joined(largest, sums):
    """Of all groups."""
    top = tl.max(largest)
    under = tl.where(top == -float("inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp2((largest - under) * _LOG2E))


@triton.jit
def _backward_kernel(
    logits_ptr,
    targets_ptr,
    dloss_ptr,
    kept_ptr,
    out_ptr,
    vocab,
    pieces,
    stride,
    out_stride,
    ignore_index,
    smoothing,
    z_loss,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // pieces).to(tl.int64)
    begin, first, last, bound = _span(row * stride, vocab, ALIGNED)
    start = (tl.program_id(0) % pieces) * BLOCK
    at = start + tl.arange(0, BLOCK)
    target = tl.load(targets_ptr + row)
    dx = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    if target != ignore_index:
        dloss = tl.load(dloss_ptr + row)
        largest = tl.load(kept_ptr + 2 * row)
        log_sum = tl.load(kept_ptr + 2 * row + 1)
        x = tl.load(logits_ptr + begin + at, mask=at < bound, other=0.0).to(tl.float32)
        share = tl.exp2(((x - largest) - log_sum) * _LOG2E) * (dloss * (1.0 + 2.0 * z_loss * (largest + log_sum)))
        even = dloss * (smoothing / vocab)
        dx = (share - tl.where(at == target + first, even + dloss * (1.0 - smoothing), even)).to(dx.dtype)
    if ALIGNED:
        tl.store(out_ptr + row * out_stride + at, dx, mask=at < vocab)
    else:
        out = out_ptr + tl.multiple_of(row * out_stride - first, 8)
        if (start >= first) & (start + BLOCK <= last):
            tl.store(out + at, dx)
        else:
            tl.store(out + at, dx, mask=(at >= first) & (at < last))
