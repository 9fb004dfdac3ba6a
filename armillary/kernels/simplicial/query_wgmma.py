"""Gradients of queries, and of first keys and values by query, for Hopper and 128 query heads per KV head, in Gluon:
one program per token, like `backward_triton.query_kernel`.

Two partitions of four warps have 64 heads each; a warp of its own copies tiles of second keys and values by TMA into
rings that both read. The gradient of queries is summed up in shared memory, since registers hold two other sums.
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
def _copy_second(
    sources, rings, barriers, place, span, BLOCK: gl.constexpr, KEY_STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr
):
    """The copying warp: all tiles of the second window, once per first key."""
    k2_desc, v2_desc = sources
    row, k_column, v_column = place
    keys, values = rings
    keys_ready, keys_free, values_ready, values_free = barriers
    first_1, first_2, token = span
    stage, phase, v_stage, v_phase = 0, 1, 0, 1
    for _ in range(first_1, token + 1):
        for begin in range(first_2, token + 1, BLOCK):
            mbarrier.wait(keys_free.index(stage), phase)
            arrived = keys_ready.index(stage)
            mbarrier.expect(arrived, k2_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k2_desc, [row + begin, k_column], arrived, keys.index(stage))
            mbarrier.wait(values_free.index(v_stage), v_phase)
            arrived = values_ready.index(v_stage)
            mbarrier.expect(arrived, v2_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v2_desc, [row + begin, v_column], arrived, values.index(v_stage))
            stage += 1
            if stage == KEY_STAGES:
                stage = 0
                phase ^= 1
            v_stage += 1
            if v_stage == VALUE_STAGES:
                v_stage = 0
                v_phase ^= 1


@gluon.jit
def _query_gradients(
    tiles,
    rings,
    barriers,
    pointers,
    part_ptr,
    strides,
    span,
    scales,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
):
    """The heads of one token from PART · ROWS on."""
    q_k1_tile, grad_v1_tile, dq_tile = tiles
    keys, values = rings
    keys_ready, keys_free, values_ready, values_free = barriers
    q_ptr, k1_ptr, v1_ptr, grad_ptr, lse_ptr, delta_ptr, dq_ptr = pointers
    q_n, k_s, v_s = strides
    first_1, first_2, token = span
    scale, scale2 = scales
    D: gl.constexpr = q_k1_tile.shape[1]
    kind: gl.constexpr = keys.dtype
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    loaded_row = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    loaded_d = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    q_at = loaded_row[:, None] * q_n + loaded_d[None, :]
    grad_at = loaded_row[:, None] * D + loaded_d[None, :]
    row = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
    d = gl.arange(0, D, gl.SliceLayout(0, SUMS))
    head = PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    lse, delta = gl.load(lse_ptr + head), gl.load(delta_ptr + head)
    dq_tile.store(gl.zeros([ROWS, D], gl.float32, SUMS))
    stage, phase, v_stage, v_phase = 0, 0, 0, 0
    for first in range(first_1, token + 1):
        k1_at, v1_at = k1_ptr + first * k_s, v1_ptr + first * v_s
        q_k1_tile.store(gl.load(q_ptr + q_at) * gl.load(k1_at + loaded_d)[None, :])
        grad_v1_tile.store(gl.load(grad_ptr + grad_at) * gl.load(v1_at + loaded_d)[None, :])
        fence_async_shared()
        dsk = gl.zeros([ROWS, D], gl.float32, SUMS)
        pv = gl.zeros([ROWS, D], gl.float32, SUMS)
        for begin in range(first_2, token + 1, BLOCK):
            mbarrier.wait(keys_ready.index(stage), phase)
            logits_async = warpgroup_mma(
                q_k1_tile,
                keys.index(stage).permute((1, 0)),
                gl.zeros([ROWS, BLOCK], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            mbarrier.wait(values_ready.index(v_stage), v_phase)
            dweights_async = warpgroup_mma(
                grad_v1_tile,
                values.index(v_stage).permute((1, 0)),
                gl.zeros([ROWS, BLOCK], gl.float32, SCORES),
                use_acc=False,
                is_async=True,
            )
            logits = warpgroup_mma_wait(1, deps=[logits_async])
            weights = gl.exp2(logits * scale2 - lse[:, None])
            if begin + BLOCK > token + 1:
                weights = gl.where((begin + key <= token)[None, :], weights, 0.0)
            dweights = warpgroup_mma_wait(0, deps=[dweights_async])
            pv_async = warpgroup_mma(
                gl.convert_layout(weights.to(kind), WEIGHT), values.index(v_stage), pv, is_async=True
            )
            dlogits = weights * (dweights - delta[:, None])
            dsk_async = warpgroup_mma(
                gl.convert_layout(dlogits.to(kind), WEIGHT), keys.index(stage), dsk, is_async=True
            )
            pv, dsk = warpgroup_mma_wait(0, deps=[pv_async, dsk_async])
            mbarrier.arrive(values_free.index(v_stage), count=1)
            mbarrier.arrive(keys_free.index(stage), count=1)
            stage += 1
            if stage == KEY_STAGES:
                stage = 0
                phase ^= 1
            v_stage += 1
            if v_stage == VALUE_STAGES:
                v_stage = 0
                v_phase ^= 1
        share = part_ptr + (token - first) * 2 * D + d
        grad = gl.load(grad_ptr + row[:, None] * D + d[None, :]).to(gl.float32)
        gl.store(share + D, gl.sum(pv * grad, 0))
        q = gl.load(q_ptr + row[:, None] * q_n + d[None, :]).to(gl.float32)
        gl.store(share, gl.sum(dsk * q, 0) * scale)
        k1 = gl.load(k1_at + d).to(gl.float32)
        dq_tile.store(dq_tile.load(SUMS) + dsk * k1[None, :])
    gl.store(dq_ptr + row[:, None] * D + d[None, :], (dq_tile.load(SUMS) * scale).to(kind))


@gluon.jit(do_not_specialize=["first_token", "T", "N", "window_1", "window_2"])
def query_wgmma(
    q_ptr,
    k1_ptr,
    v1_ptr,
    k2_desc,
    v2_desc,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    begin_ptr,
    dq_ptr,
    part_ptr,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    first_token,
    T,
    N,
    scale,
    scale2,
    window_1,
    window_2,
    DOCS: gl.constexpr,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    BLOCK: gl.constexpr,
    KEY_STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Arguments as of `backward_triton.query_kernel`, with two parts per KV head of 2 · ROWS query heads."""
    kind: gl.constexpr = k2_desc.dtype
    local, kv_head, batch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    token = local + first_token
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDE: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 16, order=[1, 0])
    keys = gl.allocate_shared_memory(kind, [KEY_STAGES, BLOCK, D], k2_desc.layout)
    values = gl.allocate_shared_memory(kind, [VALUE_STAGES, BLOCK, D], v2_desc.layout)
    q_k1 = gl.allocate_shared_memory(kind, [2, ROWS, D], TILE)
    grad_v1 = gl.allocate_shared_memory(kind, [2, ROWS, D], TILE)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, ROWS, D], WIDE)
    keys_ready = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [VALUE_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(KEY_STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
    for stage in gl.static_range(VALUE_STAGES):
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    row = batch.to(gl.int64) * T + token
    low = 0
    if DOCS:
        low = gl.load(begin_ptr + row)
    first_1, first_2 = gl.maximum(low, token - window_1 + 1), gl.maximum(low, token - window_2 + 1)
    at = row * N + kv_head * 2 * ROWS
    share = (batch.to(gl.int64) * gl.num_programs(0) + local) * gl.num_programs(1) + kv_head
    part_ptr += share * 2 * window_1 * 2 * D
    sources = (
        q_ptr + batch.to(gl.int64) * q_b + token.to(gl.int64) * q_t + kv_head * 2 * ROWS * q_n,
        k1_ptr + batch.to(gl.int64) * k_b + kv_head * k_h,
        v1_ptr + batch.to(gl.int64) * v_b + kv_head * v_h,
        grad_ptr + at * D,
        lse_ptr + at,
        delta_ptr + at,
        dq_ptr + at * D,
    )
    rings, barriers = (keys, values), (keys_ready, keys_free, values_ready, values_free)
    strides, span, scales = (q_n, k_s.to(gl.int64), v_s.to(gl.int64)), (first_1, first_2, token), (scale, scale2)
    gl.warp_specialize(
        [
            (
                _query_gradients,
                (
                    (q_k1.index(0), grad_v1.index(0), dq_tiles.index(0)),
                    rings,
                    barriers,
                    sources,
                    part_ptr,
                    strides,
                    span,
                    scales,
                    0,
                    ROWS,
                    BLOCK,
                    KEY_STAGES,
                    VALUE_STAGES,
                ),
            ),
            (
                _query_gradients,
                (
                    (q_k1.index(1), grad_v1.index(1), dq_tiles.index(1)),
                    rings,
                    barriers,
                    sources,
                    part_ptr + window_1 * 2 * D,
                    strides,
                    span,
                    scales,
                    1,
                    ROWS,
                    BLOCK,
                    KEY_STAGES,
                    VALUE_STAGES,
                ),
            ),
            (
                _copy_second,
                (
                    (k2_desc, v2_desc),
                    rings,
                    barriers,
                    (batch * T, kv_head * k_h, kv_head * v_h),
                    span,
                    BLOCK,
                    KEY_STAGES,
                    VALUE_STAGES,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
