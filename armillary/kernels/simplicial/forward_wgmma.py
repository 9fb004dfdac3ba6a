"""2-simplicial attention, forward, for Hopper and 128 query heads per KV head, in Gluon: one program per token.

Two partitions of four warps have 64 heads each; a warp of its own copies tiles of second keys and values by TMA into a
ring that both read. While one partition computes its softmax, the tensor cores multiply for the other.
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

# B batch, T tokens, N query heads, K KV heads, D head dim


@gluon.jit
def _copy_second(sources, rings, barriers, place, first_1, first_2, token, BLOCK: gl.constexpr, STAGES: gl.constexpr):
    """The copying warp: all tiles of the second window, once per first key."""
    k2_desc, v2_desc = sources
    row, k_column, v_column = place
    keys, values = rings
    keys_ready, keys_free, values_ready, values_free, _ = barriers
    stage, phase = 0, 1
    for _ in range(first_1, token + 1):
        for begin in range(first_2, token + 1, BLOCK):
            mbarrier.wait(keys_free.index(stage), phase)
            arrived = keys_ready.index(stage)
            mbarrier.expect(arrived, k2_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k2_desc, [row + begin, k_column], arrived, keys.index(stage))
            mbarrier.wait(values_free.index(stage), phase)
            arrived = values_ready.index(stage)
            mbarrier.expect(arrived, v2_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v2_desc, [row + begin, v_column], arrived, values.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _multiply_in(q_k1, buffer, q_tile, k1_ptr, k_s, first, LAYOUT: gl.constexpr):
    """q ⊙ k1 of one first key into shared memory, rounded once."""
    k1 = gl.load(k1_ptr + first * k_s + gl.arange(0, q_tile.shape[1], gl.SliceLayout(0, LAYOUT)))
    product = q_tile.load(LAYOUT).to(gl.float32) * k1.to(gl.float32)[None, :]
    q_k1.index(buffer).store(product.to(q_tile.dtype))
    fence_async_shared()


@gluon.jit
def _attend(
    q_tile,
    q_k1,
    rings,
    barriers,
    pointers,
    strides,
    first_1,
    first_2,
    token,
    scale2,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """The heads of one token from PART · ROWS on. PING_PONG: the two partitions take the tensor cores alternately, 1:
    for scores, 2: for everything."""
    keys, values = rings
    keys_ready, keys_free, values_ready, values_free, order = barriers
    q_ptr, k1_ptr, v1_ptr, out_ptr, lse_ptr = pointers
    q_n, k_s, v_s = strides
    ROWS: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    BLOCK: gl.constexpr = keys.shape[1]
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    kind: gl.constexpr = keys.dtype

    head = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    d = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    q_tile.store(gl.load(q_ptr + head[:, None] * q_n + d[None, :]))
    _multiply_in(q_k1, 0, q_tile, k1_ptr, k_s, first_1, LOADED)
    sum_d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    key = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))

    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    sums = gl.zeros([ROWS, D], gl.float32, SUMS)
    stage, phase, order_phase, buffer = 0, 0, 1 - PART, 0
    for first in range(first_1, token + 1):
        before = top
        mixed = gl.zeros([ROWS, D], gl.float32, SUMS)
        for begin in range(first_2, token + 1, BLOCK):
            mbarrier.wait(keys_ready.index(stage), phase)
            if PING_PONG == 1:
                mbarrier.wait(order.index(PART), order_phase)
                order_phase ^= 1
            if PING_PONG == 2:
                mbarrier.wait(order.index(PART), order_phase, pred=begin == first_2)
                order_phase ^= (begin == first_2).to(gl.int32)
            scores_async = warpgroup_mma(
                q_k1.index(buffer),
                keys.index(stage).permute((1, 0)),
                gl.zeros([ROWS, BLOCK], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            is_last = begin + BLOCK > token
            if is_last & (first < token):
                _multiply_in(q_k1, 1 - buffer, q_tile, k1_ptr, k_s, first + 1, LOADED)
            scores = warpgroup_mma_wait(0, deps=[scores_async])
            mbarrier.arrive(keys_free.index(stage), count=1)
            if PING_PONG > 0:
                mbarrier.arrive(order.index(1 - PART), count=1)
            if begin + BLOCK > token + 1:
                scores = gl.where((begin + key <= token)[None, :], scores, float("-inf"))
            new_top = gl.maximum(top, gl.max(scores, 1) * scale2)
            weights = gl.exp2(scores * scale2 - new_top[:, None])
            rescale = gl.exp2(top - new_top)
            total = total * rescale + gl.sum(weights, 1)
            top = new_top
            mixed = mixed * gl.convert_layout(rescale, gl.SliceLayout(1, SUMS))[:, None]
            mbarrier.wait(values_ready.index(stage), phase)
            if PING_PONG == 2:
                mbarrier.wait(order.index(PART), order_phase)
                order_phase ^= 1
            mixed_async = warpgroup_mma(
                gl.convert_layout(weights.to(kind), WEIGHT), values.index(stage), mixed, is_async=True
            )
            mixed = warpgroup_mma_wait(0, deps=[mixed_async])
            mbarrier.arrive(values_free.index(stage), count=1)
            if PING_PONG == 2:
                mbarrier.arrive(order.index(1 - PART), count=1, pred=is_last)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        buffer ^= 1
        v1 = gl.load(v1_ptr + first * v_s + sum_d).to(gl.float32)
        rescale = gl.convert_layout(gl.exp2(before - top), gl.SliceLayout(1, SUMS))
        sums = sums * rescale[:, None] + mixed * v1[None, :]
    result = sums * (1.0 / gl.convert_layout(total, gl.SliceLayout(1, SUMS)))[:, None]
    row = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    gl.store(out_ptr + row[:, None] * D + sum_d[None, :], result.to(kind))
    gl.store(lse_ptr + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)), top + gl.log2(total))


@gluon.jit(do_not_specialize=["T", "N", "window_1", "window_2"])
def forward_wgmma(
    q_ptr,
    k1_ptr,
    v1_ptr,
    k2_desc,
    v2_desc,
    out_ptr,
    lse_ptr,
    begin_ptr,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    T,
    N,
    scale2,
    window_1,
    window_2,
    DOCS: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Arguments as of `forward_triton.forward_kernel`; a KV head has 2 · ROWS query heads."""
    kind: gl.constexpr = k2_desc.dtype
    token, kv_head, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys = gl.allocate_shared_memory(kind, [STAGES, BLOCK, D], k2_desc.layout)
    values = gl.allocate_shared_memory(kind, [STAGES, BLOCK, D], v2_desc.layout)
    q_tiles = gl.allocate_shared_memory(kind, [2, ROWS, D], TILE)
    q_k1_0 = gl.allocate_shared_memory(kind, [2, ROWS, D], TILE)
    q_k1_1 = gl.allocate_shared_memory(kind, [2, ROWS, D], TILE)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    for part in gl.static_range(2):
        mbarrier.init(order.index(part), count=1)
    fence_async_shared()
    first_1, first_2 = gl.maximum(0, token - window_1 + 1), gl.maximum(0, token - window_2 + 1)
    row = batch.to(gl.int64) * T + token
    if DOCS:
        low = gl.load(begin_ptr + row)
        first_1, first_2 = gl.maximum(low, first_1), gl.maximum(low, first_2)
    at = row * N + kv_head * 2 * ROWS
    pointers = (
        q_ptr + batch.to(gl.int64) * q_b + token.to(gl.int64) * q_t + kv_head * 2 * ROWS * q_n,
        k1_ptr + batch.to(gl.int64) * k_b + kv_head * k_h,
        v1_ptr + batch.to(gl.int64) * v_b + kv_head * v_h,
        out_ptr + at * D,
        lse_ptr + at,
    )
    rings, barriers = (keys, values), (keys_ready, keys_free, values_ready, values_free, order)
    strides, place = (q_n, k_s.to(gl.int64), v_s.to(gl.int64)), (batch * T, kv_head * k_h, kv_head * v_h)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_tiles.index(0),
                    q_k1_0,
                    rings,
                    barriers,
                    pointers,
                    strides,
                    first_1,
                    first_2,
                    token,
                    scale2,
                    0,
                    STAGES,
                    PING_PONG,
                ),
            ),
            (
                _attend,
                (
                    q_tiles.index(1),
                    q_k1_1,
                    rings,
                    barriers,
                    pointers,
                    strides,
                    first_1,
                    first_2,
                    token,
                    scale2,
                    1,
                    STAGES,
                    PING_PONG,
                ),
            ),
            (
                _copy_second,
                ((k2_desc, v2_desc), rings, barriers, place, first_1, first_2, token, BLOCK, STAGES),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
