"""Attention for training in Triton, backward: what dQ, dK and dV share.

One kernel for dK and dV, one for dQ, no atomics. Both recompute the scores from the saved log-sum-exp.
"""

import triton
import triton.language as tl

from armillary.kernels.attention.scores_triton import rows

# B batch, T queries, N query heads, D head dim


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, g_b, g_t, g_n, T, N, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """sum(out · d out) of each query and head, in the layout of the lse: [B, N, T]."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    out = rows(out_ptr + (batch * T * N + head) * D, N * D, first, T, D, BLOCK_D, BLOCK_M, True).to(tl.float32)
    grad = rows(grad_ptr + batch * g_b + head * g_n, g_t, first, T, D, BLOCK_D, BLOCK_M, True).to(tl.float32)
    tl.store(delta_ptr + (batch * N + head) * T + query, tl.sum(out * grad, 1), mask=query < T)


@triton.jit
def score_gradient(qk, p, dp, delta, scale2, CAPPED: tl.constexpr):
    """d loss / d (q·k) up to the scale."""
    ds = p * (dp - delta)
    if CAPPED:
        bent = 2 * tl.sigmoid(2 * (qk * scale2)) - 1
        ds = ds * (1 - bent * bent)
    return ds
