"""What kernels that start early do before they wait for the one ahead."""

from __future__ import annotations

import triton
import triton.language as tl

STREAM: tl.constexpr = tl.constexpr("")
"""cache modifier of large results: none is used; benchmarks/tilings_gpu.py can set another"""


@triton.jit
def fetch(pointers):
    """Lines into L2, nobody waits for them. L2 is where all writes meet, so that nothing old is ever read for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
