"""A persistent GEMM with an epilogue for Hopper, in Gluon: one warp copies tiles by TMA into a ring in shared memory,
two or three warpgroups multiply them by wgmma, each its rows of an output tile.

The copying warp runs ahead over tile borders, so the next tile's operands arrive while an epilogue is computed, and an
output tile leaves by TMA while the next one is multiplied. Output tiles are visited in groups of rows, whose operands
stay in L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_all_arrive = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name until triton 3.6, and since

# M rows, N columns of the weight's transpose, K inputs; a ring has STAGES tiles of each operand


@gluon.jit
def _tile_at(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """(row tile, column tile): GROUP row tiles at a time, column by column."""
    in_group = GROUP * column_tiles
    first = tile // in_group * GROUP
    rows = gl.minimum(row_tiles - first, GROUP)
    inside = tile % in_group
    return first + inside % rows, inside // rows


@gluon.jit
def _copy_stage(sources, rings, row, column, k, stage, phase, CONSUMERS: gl.constexpr):
    """The operand tiles of one step, once their place in the ring is free."""
    x_desc, weight_desc = sources
    x_ring, weight_ring, ready, free = rings
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    INNER: gl.constexpr = x_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = weight_desc.block_type.shape[0]
    mbarrier.wait(free.index(stage), phase)
    arrived = ready.index(stage)
    mbarrier.expect(arrived, CONSUMERS * x_desc.block_type.nbytes + weight_desc.block_type.nbytes)
    for part in gl.static_range(CONSUMERS):
        tma.async_copy_global_to_shared(
            x_desc, [(row * CONSUMERS + part) * ROWS, k * INNER], arrived, x_ring.index(stage * CONSUMERS + part)
        )
    tma.async_copy_global_to_shared(weight_desc, [column * COLUMNS, k * INNER], arrived, weight_ring.index(stage))


@gluon.jit
def _copy_tiles(sources, rings, grid, CONSUMERS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """The copying warp: every operand tile, in the order in which it is multiplied."""
    row_tiles, column_tiles, k_tiles = grid
    stage, phase = 0, 1
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _tile_at(tile, row_tiles, column_tiles, GROUP)
        for k in range(k_tiles):
            _copy_stage(sources, rings, row, column, k, stage, phase, CONSUMERS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _copy_next(
    sources, rings, grid, tile, k, stage, phase, CONSUMERS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr
):
    """The operand tiles of step `k` of an output tile, where there still is one, and the place of the step after it."""
    row_tiles, column_tiles, k_tiles = grid
    if tile < row_tiles * column_tiles:
        row, column = _tile_at(tile, row_tiles, column_tiles, GROUP)
        _copy_stage(sources, rings, row, column, k, stage, phase, CONSUMERS)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        k += 1
        if k == k_tiles:
            k = 0
            tile += gl.num_programs(0)
    return tile, k, stage, phase


@gluon.jit
def _activated(y, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu":
        return gl.maximum(y, 0.0)
    elif ACTIVATION == "silu":
        return y / (1.0 + gl.exp(-y))
    elif ACTIVATION == "gelu_tanh":  # by tanh(u) = 1 − 2 / (1 + exp 2u)
        u = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        return y * (1.0 - 1.0 / (1.0 + gl.exp(2.0 * u)))
    else:
        return y


@gluon.jit
def _multiply_tiles(
    own,
    PART: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """One multiplying partition: its rows of every output tile. Of three, the first also copies: a copying warp would
    leave them too few registers."""
    sources, rings, outs, out_tile, residual_ready, grid = own
    COPIES: gl.constexpr = CONSUMERS == 3 and PART == 0
    x_ring, weight_ring, ready, free = rings
    out_desc, residual_desc, bias, N = outs
    row_tiles, column_tiles, k_tiles = grid
    ROWS: gl.constexpr = x_ring.type.shape[1]
    COLUMNS: gl.constexpr = weight_ring.type.shape[1]
    WIDTH: gl.constexpr = COLUMNS // SPLIT
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    kind: gl.constexpr = x_ring.dtype
    stage, phase, residual_phase = 0, 0, 0
    next_tile, next_k, next_stage, next_phase = gl.program_id(0), 0, 0, 1
    if COPIES:
        for _ in range(STAGES):
            next_tile, next_k, next_stage, next_phase = _copy_next(
                sources, rings, grid, next_tile, next_k, next_stage, next_phase, CONSUMERS, GROUP, STAGES
            )
    for tile in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row, column = _tile_at(tile, row_tiles, column_tiles, GROUP)
        out_row = (row * CONSUMERS + PART) * ROWS
        if RESIDUAL:  # into the place of the previous output tile, once that has left
            tma.store_wait(0)
            _all_arrive()
            mbarrier.expect(residual_ready, residual_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(residual_desc, [out_row, column * COLUMNS], residual_ready, out_tile)
        mbarrier.wait(ready.index(stage), phase)
        sums = warpgroup_mma(
            x_ring.index(stage * CONSUMERS + PART),
            weight_ring.index(stage).permute((1, 0)),
            gl.zeros([ROWS, COLUMNS], gl.float32, SUMS),
            use_acc=False,
            is_async=True,
        )
        sums = warpgroup_mma_wait(1, deps=[sums])
        used = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        for _ in range(1, k_tiles):
            mbarrier.wait(ready.index(stage), phase)
            sums = warpgroup_mma(
                x_ring.index(stage * CONSUMERS + PART), weight_ring.index(stage).permute((1, 0)), sums, is_async=True
            )
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(free.index(used), count=1)
            if COPIES:
                next_tile, next_k, next_stage, next_phase = _copy_next(
                    sources, rings, grid, next_tile, next_k, next_stage, next_phase, CONSUMERS, GROUP, STAGES
                )
            used = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        y = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(free.index(used), count=1)
        if COPIES:
            next_tile, next_k, next_stage, next_phase = _copy_next(
                sources, rings, grid, next_tile, next_k, next_stage, next_phase, CONSUMERS, GROUP, STAGES
            )

        if BIAS:
            at = column * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
            y += gl.load(bias + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
        y = _activated(y, ACTIVATION)
        if RESIDUAL:
            mbarrier.wait(residual_ready, residual_phase)
            residual_phase ^= 1
            y += out_tile.load(SUMS).to(gl.float32)
        if SPLIT == 1:
            if not RESIDUAL:
                tma.store_wait(0)
                _all_arrive()
            out_tile.store(y.to(kind))
            fence_async_shared()
            _all_arrive()
            tma.async_copy_shared_to_global(out_desc, [out_row, column * COLUMNS], out_tile)
        else:
            left, right = gl.permute(gl.reshape(y, [ROWS, 2, WIDTH]), (0, 2, 1)).split()
            for half in gl.static_range(2):
                tma.store_wait(0)
                _all_arrive()
                if half == 0:
                    out_tile.store(left.to(kind))
                else:
                    out_tile.store(right.to(kind))
                fence_async_shared()
                _all_arrive()
                tma.async_copy_shared_to_global(out_desc, [out_row, column * COLUMNS + half * WIDTH], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def linear_kernel(
    x_desc,
    weight_desc,
    out_desc,
    residual_desc,
    bias,
    M,
    N,
    K,
    GROUP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """act(x[M, K] @ weight[N, K]ᵀ + bias) + residual. CONSUMERS 2 and 3: a partition of four warps per part of the
    rows; 1: one partition of eight warps."""
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    INNER: gl.constexpr = x_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = weight_desc.block_type.shape[0]
    kind: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(kind, [STAGES * CONSUMERS, ROWS, INNER], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(kind, [STAGES, COLUMNS, INNER], weight_desc.layout)
    out_tiles = gl.allocate_shared_memory(kind, [CONSUMERS, ROWS, COLUMNS // SPLIT], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    residual_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(residual_ready.index(part), count=1)
    fence_async_shared()
    row_tiles, column_tiles, k_tiles = gl.cdiv(M, ROWS * CONSUMERS), gl.cdiv(N, COLUMNS), gl.cdiv(K, INNER)
    rings, grid = (x_ring, weight_ring, ready, free), (row_tiles, column_tiles, k_tiles)
    outs = (out_desc, residual_desc, bias, N)
    sources = (x_desc, weight_desc)
    first = (sources, rings, outs, out_tiles.index(0), residual_ready.index(0), grid)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_multiply_tiles, (first, 0, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                (_copy_tiles, (sources, rings, grid, CONSUMERS, GROUP, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        second = (sources, rings, outs, out_tiles.index(1), residual_ready.index(1), grid)
        if CONSUMERS == 2:
            gl.warp_specialize(
                [
                    (_multiply_tiles, (first, 0, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                    (_multiply_tiles, (second, 1, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                    (_copy_tiles, (sources, rings, grid, CONSUMERS, GROUP, STAGES)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
        else:
            third = (sources, rings, outs, out_tiles.index(2), residual_ready.index(2), grid)
            gl.warp_specialize(
                [
                    (_multiply_tiles, (first, 0, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                    (_multiply_tiles, (second, 1, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                    (_multiply_tiles, (third, 2, CONSUMERS, GROUP, STAGES, SPLIT, BIAS, RESIDUAL, ACTIVATION)),
                ],
                [4, 4],
                [REGISTERS, REGISTERS],
            )
