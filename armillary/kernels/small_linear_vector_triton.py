"""A matrix times one vector in Triton: rows of the weight go straight into registers, a program a few rows.

For a single token tensor cores would multiply mostly zeros, and what they need of shared memory limits how much is on
its way. Many small programs a multiprocessor keep more loads in flight, and no sum is left for a second kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.launch_triton import fetch


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, residual_ptr, out_ptr, N, K, EARLY: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """ROWS of the weight times x; GATED: rows alternate between gate and up. LATE: what follows is not set up before
    the weights are read, because it takes room and bandwidth."""
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), N - 1).to(tl.int64)  # rows beyond the last are never stored
    depth = tl.arange(0, DEPTH)
    w_row = w_ptr + row[:, None] * K
    if EARLY:
        if not LATE:
            gdc_launch_dependents()
        line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
        fetch(w_row + tl.minimum(tl.arange(0, DEPTH // line) * line, K - 1)[None, :])
        gdc_wait()
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    for begin in range(0, K, DEPTH):
        k = begin + depth
        if EVEN:
            w = tl.load(w_row + k[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + k)
        else:
            w = tl.load(w_row + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
    if EARLY and LATE:
        gdc_launch_dependents()
    total = tl.sum(sums, 1)
    rows: tl.constexpr = ROWS // 2 if GATED else ROWS
    width = N
    if GATED:  # plain torch rounds the product before the activation; so does this
        width, first = N // 2, first // 2
        gate, up = tl.split(tl.reshape(total.to(out_ptr.dtype.element_ty).to(tl.float32), [rows, 2]))
        total = gate * tl.sigmoid(gate) * up
    at = first + tl.arange(0, rows)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < width)
