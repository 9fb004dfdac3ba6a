"""Weights into L2 ahead of the product that reads them, while the memory would stand idle.

Attention of a few tokens keeps the memory busy for a small part of its time; a product that follows finds the first of
its weights in L2 when they were asked for meanwhile, by a kernel beside it. Nothing is computed, nothing waits for it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on
from armillary.kernels.launch_triton import fetch

_LINE_BYTES, _BLOCK = 128, 1024


def fetch_ahead(weight: Tensor, num_bytes: int) -> int:
    """Ask for the first bytes of a contiguous weight, `num_bytes` at most; how many it was."""
    lines = min(weight.nbytes, num_bytes) // _LINE_BYTES
    if lines:
        with on(weight):
            fetch_kernel[(ceil_div(lines, _BLOCK),)](
                weight, lines, LINE=_LINE_BYTES // weight.element_size(), BLOCK=_BLOCK, num_warps=1
            )
    return lines * _LINE_BYTES


@triton.jit(do_not_specialize=["lines"])
def fetch_kernel(weight, lines, LINE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (BLOCK lines)."""
    line = tl.minimum(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), lines - 1)
    fetch(weight + line.to(tl.int64) * LINE)
