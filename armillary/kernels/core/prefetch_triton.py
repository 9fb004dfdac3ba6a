"""L2 prefetch, for kernels that start before the previous one has ended."""

import triton
import triton.language as tl

# cache modifier of large stores: none; benchmarks/tilings_gpu.py can set another
STREAM: tl.constexpr = tl.constexpr("")


@triton.jit
def fetch(pointers):
    """Prefetch cache lines into L2 without waiting. L2 is coherent for all writes, so no stale value is ever read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
