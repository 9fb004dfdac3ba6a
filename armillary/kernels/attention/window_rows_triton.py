"""Sliding-window attention for Hopper: what the backward kernels know of each row, and the gradient of sinks."""

import triton
import triton.language as tl

# B batch, T tokens, N query heads, D head dim; a group is 8 tokens × 8 heads, its rows the heads of token after token


@triton.jit(do_not_specialize=["T", "groups"])
def window_rows_kernel(
    out_ptr,
    grad_ptr,
    lse_ptr,
    sink_ptr,
    rows_ptr,
    share_ptr,
    g_b,
    g_t,
    g_n,
    T,
    N,
    groups,
    SINKS: tl.constexpr,
    D: tl.constexpr,
):
    """rows[B, N / 8, groups, 2, 64]: log-sum-exp (infinite beyond the sequence) and sum of output · gradient; share[B,
    groups, N]: of the gradient of the sinks."""
    group, heads, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, d = tl.arange(0, 64), tl.arange(0, D)
    token, head = group * 8 + row // 8, heads * 8 + row % 8
    inside = token < T
    at = ((batch * T + token) * N + head)[:, None] * D + d[None, :]
    out = tl.load(out_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    grad_at = batch.to(tl.int64) * g_b + (token * g_t + head * g_n)[:, None] + d[None, :]
    grad = tl.load(grad_ptr + grad_at, mask=inside[:, None], other=0.0).to(tl.float32)
    delta = tl.sum(out * grad, 1)
    lse = tl.load(lse_ptr + (batch * N + head) * T + token, mask=inside, other=float("inf"))
    own = rows_ptr + ((batch * tl.num_programs(1) + heads) * groups + group) * 128 + row
    tl.store(own, lse)
    tl.store(own + 64, delta)
    if SINKS:
        weights = tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634 - lse)
        share = tl.sum((weights * delta).reshape(8, 8), 0)
        tl.store(share_ptr + (batch * groups + group) * N + heads * 8 + tl.arange(0, 8), -share)
