"""Loads that matrix-vector kernels share: one step of some rows, which are read once, and of the vector."""

import triton
import triton.language as tl


@triton.jit
def load_rows(row_ptr, k, K, EVEN: tl.constexpr):
    """Columns k of the rows that start at row_ptr [rows, 1]; EVEN: none is past the last, K - 1."""
    if EVEN:
        return tl.load(row_ptr + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(row_ptr + k[None, :], mask=k[None, :] < K, other=0, eviction_policy="evict_first")


@triton.jit
def load_vector(pointer, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + k)
    else:
        return tl.load(pointer + k, mask=k < K, other=0)
