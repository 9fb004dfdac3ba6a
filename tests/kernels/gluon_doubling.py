"""A small Gluon kernel with faults to choose from, for the test of their interpreter."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FAULTS = ("none", "copy not waited for", "buffer used too early", "store not waited for", "no arrival", "arrives twice")


@gluon.jit
def _copy(x_desc, weight_desc, x_tile, weight_tile, ready, free, FAULT: gl.constexpr):
    mbarrier.expect(ready.index(0), 3 * x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(weight_desc, [0, 0], ready.index(0), weight_tile.index(0))
    tma.async_copy_global_to_shared(weight_desc, [8, 0], ready.index(0), weight_tile.index(1))
    tma.async_copy_global_to_shared(x_desc, [0, 0], ready.index(0), x_tile)
    if FAULT != 2:
        mbarrier.wait(free.index(0), 0)
    mbarrier.expect(ready.index(1), x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [8, 0], ready.index(1), x_tile)


@gluon.jit
def _double(y_desc, x_tile, weight_tile, out_tile, ready, free, FAULT: gl.constexpr):
    weight = weight_tile.index(0)._reinterpret(gl.float32, [16, 16], y_desc.layout)
    for part in range(2):
        if (FAULT != 1) | (part == 0):
            mbarrier.wait(ready.index(part), 0)
        y = warpgroup_mma(x_tile, weight, gl.zeros([8, 16], gl.float32), use_acc=False, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        if part == 0 and FAULT != 4:
            mbarrier.arrive(free.index(0), count=2 if FAULT == 5 else 1)
        if FAULT != 3:
            tma.store_wait(0)
        out_tile.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(y_desc, [8 * part, 0], out_tile)
        if FAULT == 3:
            out_tile.store(0 * y)
    tma.store_wait(0)


@gluon.jit
def double_kernel(x_desc, weight_desc, y_desc, FAULT: gl.constexpr):
    x_tile = gl.allocate_shared_memory(gl.float32, [8, 16], x_desc.layout)
    weight_tile = gl.allocate_shared_memory(gl.float32, [2, 8, 16], x_desc.layout)
    out_tile = gl.allocate_shared_memory(gl.float32, [8, 16], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=1)
    mbarrier.init(free.index(0), count=1)
    gl.warp_specialize(
        [
            (_double, (y_desc, x_tile, weight_tile, out_tile, ready, free, FAULT)),
            (_copy, (x_desc, weight_desc, x_tile, weight_tile, ready, free, FAULT)),
        ],
        [1],
        [24],
    )
