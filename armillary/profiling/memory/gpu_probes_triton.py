"""The kernels of the GPU probes: one block of inline PTX (gpu_texts.py), and y += a·x by the width of its loads."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def probe_kernel(address, out_ptr, count, before, TEXT: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """cycles, nanoseconds and result of thread 0."""
    thread = tl.arange(0, THREADS)
    cycles, nanoseconds, last = tl.inline_asm_elementwise(
        TEXT,
        "=l,=l,=l,l,r,r",
        [(thread * 0).to(tl.int64) + address, thread * 0 + count, thread * 0 + before],
        dtype=(tl.int64, tl.int64, tl.int64),
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + thread * 0, cycles, mask=thread == 0)
    tl.store(out_ptr + thread * 0 + 1, nanoseconds, mask=thread == 0)
    tl.store(out_ptr + thread * 0 + 2, last, mask=thread == 0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def saxpy_kernel(x_ptr, y_ptr, a, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """y += a·x; a thread's loads are as wide as its share of a block: BLOCK / threads numbers."""
    first = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    for step in range(STEPS):
        at = first + step * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        y = tl.load(y_ptr + at, mask=inside) + a * tl.load(x_ptr + at, mask=inside)
        tl.store(y_ptr + at, y, mask=inside)
