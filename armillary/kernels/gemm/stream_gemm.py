"""The persistent GEMM by a table of who multiplies what (stream_schedule.py), for Hopper, in Gluon.

Three partitions of four warps multiply 64 rows each of an output tile; the first also copies, as in persistent_gemm.py.
A segment of a tile that is not its first leaves its sums in memory and says so by a flag, which the program of the
first segment waits for and lowers again; sums are added in the order of the inputs, so results do not depend on the
order of events. Partitions whose rows are all beyond the matrix do not multiply.
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

from armillary.kernels.gemm import stream_schedule
from armillary.kernels.gemm.persistent_gemm import _activated, _all_arrive, _copy_stage

# M rows, N columns of the weight's transpose, K inputs; a ring has STAGES tiles of each operand

CONSUMERS = gl.constexpr(3)
FIELDS = gl.constexpr(6)  # of a segment: its tile, first and last step, slot, helpers, number of segments
COLUMNS_MOST = gl.constexpr(stream_schedule.COLUMNS_MOST)


@gluon.jit
def _copy_next(sources, rings, segments, segment, place, k, last, stage, phase):
    """The operand tiles of step `k` of a segment into a stage that is free after this phase, where there still is such
    a step, and the step after it."""
    if k < last:
        _copy_stage(sources, rings, place // COLUMNS_MOST, place % COLUMNS_MOST, k, stage, phase, CONSUMERS)
        k += 1
        if k == last:  # after the last segment there is one of no steps
            segment += 1
            at = segments + segment * FIELDS
            place, k, last = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    return segment, place, k, last


@gluon.jit
def _before(stage, phase, STAGES: gl.constexpr):
    """The stage before this one, and its phase."""
    return gl.where(stage == 0, STAGES - 1, stage - 1), gl.where(stage == 0, phase ^ 1, phase)


@gluon.jit
def _multiply_segments(
    own,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """One partition: its 64 rows of the tile of every segment. The first copies into each stage that it has freed, so
    it is always as far ahead as the ring is long."""
    sources, rings, outs, out_tile, segments, sums_ptr, flags_ptr = own
    COPIES: gl.constexpr = PART == 0
    x_ring, weight_ring, ready, free = rings
    out_desc, bias, M, N = outs
    ROWS: gl.constexpr = x_ring.type.shape[1]
    COLUMNS: gl.constexpr = weight_ring.type.shape[1]
    WIDTH: gl.constexpr = COLUMNS // SPLIT
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    kind: gl.constexpr = x_ring.dtype
    stage, phase = 0, 0
    ahead, next_place, next_k, next_last = 0, gl.load(segments), gl.load(segments + 1), gl.load(segments + 2)
    if COPIES:
        for i in range(STAGES):
            ahead, next_place, next_k, next_last = _copy_next(
                sources, rings, segments, ahead, next_place, next_k, next_last, i, 1
            )
    for segment in range(gl.load(segments + FIELDS - 1)):
        at = segments + segment * FIELDS
        place, steps = gl.load(at), gl.load(at + 2) - gl.load(at + 1)
        row, column = place // COLUMNS_MOST, place % COLUMNS_MOST
        out_row = (row * CONSUMERS + PART) * ROWS
        is_live = (out_row < M) | (PART == 0)
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        for step in range(steps):
            mbarrier.wait(ready.index(stage), phase)
            if is_live:
                started = warpgroup_mma(
                    x_ring.index(stage * CONSUMERS + PART),
                    weight_ring.index(stage).permute((1, 0)),
                    sums,
                    is_async=True,
                )
                sums = warpgroup_mma_wait(1, deps=[started])
            if step > 0:  # the multiplication before has ended
                used, used_phase = _before(stage, phase, STAGES)
                mbarrier.arrive(free.index(used), count=1)
                if COPIES:
                    ahead, next_place, next_k, next_last = _copy_next(
                        sources, rings, segments, ahead, next_place, next_k, next_last, used, used_phase
                    )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        y = warpgroup_mma_wait(0, deps=[sums])
        used, used_phase = _before(stage, phase, STAGES)
        mbarrier.arrive(free.index(used), count=1)
        if COPIES:
            ahead, next_place, next_k, next_last = _copy_next(
                sources, rings, segments, ahead, next_place, next_k, next_last, used, used_phase
            )

        slot, helpers = gl.load(at + 3), gl.load(at + 4)
        rows, columns = gl.arange(0, ROWS, gl.SliceLayout(1, SUMS)), gl.arange(0, COLUMNS, gl.SliceLayout(0, SUMS))
        inside = rows[:, None] * COLUMNS + columns[None, :]
        if helpers < 0:
            gl.store(sums_ptr + (slot * CONSUMERS + PART) * (ROWS * COLUMNS) + inside, y)
            _all_arrive()
            gl.atomic_xchg(flags_ptr + slot * CONSUMERS + PART, 1)
        else:
            for helper in range(helpers):
                left_at = (slot + helper) * CONSUMERS + PART
                while gl.atomic_cas(flags_ptr + left_at, 1, 0) == 0:
                    pass
                _all_arrive()
                y += gl.load(sums_ptr + left_at * (ROWS * COLUMNS) + inside)
            if BIAS:
                columns += column * COLUMNS
                y += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
            y = _activated(y, ACTIVATION)
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


@gluon.jit(do_not_specialize=["M", "N", "longest"])
def stream_kernel(
    x_desc,
    weight_desc,
    out_desc,
    bias,
    segments_ptr,
    sums_ptr,
    flags_ptr,
    M,
    N,
    longest,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """act(x[M, K] @ weight[N, K]ᵀ + bias). segments[programs, longest, 6] as of `stream_schedule.table`; sums: a tile
    of fp32 per slot; flags: three per slot, 0 between launches."""
    gl.static_assert(SPLIT == 2)
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    INNER: gl.constexpr = x_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = weight_desc.block_type.shape[0]
    kind: gl.constexpr = x_desc.dtype
    x_ring = gl.allocate_shared_memory(kind, [STAGES * CONSUMERS, ROWS, INNER], x_desc.layout)
    weight_ring = gl.allocate_shared_memory(kind, [STAGES, COLUMNS, INNER], weight_desc.layout)
    out_tiles = gl.allocate_shared_memory(kind, [CONSUMERS, ROWS, COLUMNS // SPLIT], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    fence_async_shared()
    segments = segments_ptr + gl.program_id(0) * longest * FIELDS
    sources, rings, outs = (x_desc, weight_desc), (x_ring, weight_ring, ready, free), (out_desc, bias, M, N)
    first = (sources, rings, outs, out_tiles.index(0), segments, sums_ptr, flags_ptr)
    second = (sources, rings, outs, out_tiles.index(1), segments, sums_ptr, flags_ptr)
    third = (sources, rings, outs, out_tiles.index(2), segments, sums_ptr, flags_ptr)
    gl.warp_specialize(
        [
            (_multiply_segments, (first, 0, STAGES, SPLIT, BIAS, ACTIVATION)),
            (_multiply_segments, (second, 1, STAGES, SPLIT, BIAS, ACTIVATION)),
            (_multiply_segments, (third, 2, STAGES, SPLIT, BIAS, ACTIVATION)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )
