"""AdamW in one pass, and the norm of many gradients.

A parameter's gradient, value and both averages are read once; value, averages and, where there is one, the 16-bit copy
are written once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, on

_BLOCK, _WARPS = 4096, 8
_SUM_BLOCK, _SUMS = 4096, 8  # elements that a program squares at a time, and how many times


def adamw_(
    p: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    copy: Tensor | None,
    scale: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    step: int,
    check: Tensor | None = None,
) -> None:
    """One parameter, in place; `scale` (a scalar on the device) multiplies the gradient, `copy` gets p's new value.
    Where `check` (another scalar) is not finite, nothing is written.

    p ← p·(1 − lr·decay) − lr·m̂ / (√v̂ + ε), m̂ and v̂ bias-corrected (Loshchilov & Hutter, arXiv 1711.05101).
    """
    count = p.numel()
    if not count:
        return
    first, second = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
    with on(p):
        adamw_kernel[(ceil_div(count, _BLOCK),)](
            p,
            grad,
            m,
            v,
            p if copy is None else copy,
            grad if scale is None else scale,
            count,
            1 - lr * decay,
            lr / first,
            1 - betas[0],
            1 - betas[1],
            betas[1],
            1 / second,
            eps,
            grad if check is None else check,
            SCALED=scale is not None,
            COPY=copy is not None,
            CHECKED=check is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )


def squares(grads: Sequence[Tensor]) -> Tensor:
    """Partial sums of squares in fp32, one per program over all tensors: their sum is the squared norm. The order of
    every sum is fixed."""
    each = _SUM_BLOCK * _SUMS
    programs = [ceil_div(grad.numel(), each) for grad in grads]
    partial = torch.empty(sum(programs), dtype=torch.float32, device=grads[0].device)
    begin = 0
    for grad, count in zip(grads, programs, strict=True):
        if count:
            with on(grad):
                squares_kernel[(count,)](
                    grad, partial[begin:], grad.numel(), SUMS=_SUMS, BLOCK=_SUM_BLOCK, num_warps=_WARPS
                )
        begin += count
    return partial


@triton.jit
def adamw_kernel(
    p_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    copy_ptr,
    scale_ptr,
    count,
    decay_factor,
    rate,
    move_m,
    move_v,
    beta2,
    correct,
    eps,
    check_ptr,
    SCALED: tl.constexpr,
    COPY: tl.constexpr,
    CHECKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`keep` is 1 − lr·decay, `rate` lr / (1 − β₁ᵗ), `correct` 1 / √(1 − β₂ᵗ)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    if SCALED:
        g *= tl.load(scale_ptr).to(tl.float32)
    m += (g - m) * move_m
    v = v * beta2 + g * g * move_v
    p = p * decay_factor - rate * m / (tl.sqrt(v) * correct + eps)
    if CHECKED:  # comparisons with NaN are false
        inside = at < tl.where(tl.abs(tl.load(check_ptr).to(tl.float32)) < float("inf"), count, 0)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    tl.store(p_ptr + at, p, mask=inside)
    if COPY:
        tl.store(copy_ptr + at, p.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def squares_kernel(g_ptr, partial_ptr, count, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * (SUMS * BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SUMS):  # unrolled, so that all loads are in flight at once
        at = begin + i * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        total += g * g
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, 0))
