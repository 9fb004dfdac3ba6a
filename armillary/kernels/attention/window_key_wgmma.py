"""Sliding-window attention for Hopper, the gradients of keys and values, in Gluon.

A program has chunks of 128 keys of one KV head, in a row; two partitions of four warps have 64 of them each, with their
sums in registers. A warp of its own copies keys and values, and all groups of 8 tokens × 8 heads that see any of them
through a ring that both partitions read. Scores are those of keys by queries, so that weights are operands as they are.
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

from armillary.kernels.attention.window_wgmma import GROUP, _all_arrive

# B batch, T tokens, N query heads, K KV heads, D head dim; a group is 8 tokens, a row of it 8 heads

KEYS = gl.constexpr(64)  # of a partition
CHUNK = gl.constexpr(128)  # keys of a program at a time


@gluon.jit
def _copy_all(sources, tiles, rings, place, span, groups, shares, WINDOW: gl.constexpr, STAGES: gl.constexpr):
    """The copying warp: keys and values of each chunk, then the groups that see them, of all heads."""
    q_desc, k_desc, v_desc, grad_desc = sources
    k_tiles, v_tiles, kv_ready, kv_free = tiles
    q_ring, grad_ring, ready, free = rings
    batch, kv_head = place
    stage, phase, buffer, kv_phase = 0, 1, 0, 1
    for chunk in range(span[0], span[1]):
        mbarrier.wait(kv_free.index(buffer), kv_phase)
        arrived = kv_ready.index(buffer)
        mbarrier.expect(arrived, 2 * (CHUNK // KEYS) * k_desc.block_type.nbytes)
        for part in gl.static_range(CHUNK // KEYS):
            row, tile = chunk * CHUNK + part * KEYS, buffer * (CHUNK // KEYS) + part
            tma.async_copy_global_to_shared(k_desc, [batch, row, kv_head, 0], arrived, k_tiles.index(tile))
            tma.async_copy_global_to_shared(v_desc, [batch, row, kv_head, 0], arrived, v_tiles.index(tile))
        for share in range(shares):
            head = (kv_head * shares + share) * GROUP
            first = chunk * (CHUNK // GROUP)
            for group in range(first, gl.minimum(groups, first + (CHUNK + WINDOW) // GROUP)):
                mbarrier.wait(free.index(stage), phase)
                arrived = ready.index(stage)
                mbarrier.expect(arrived, 2 * q_desc.block_type.nbytes)
                at = [batch, group * GROUP, head, 0]
                tma.async_copy_global_to_shared(q_desc, at, arrived, q_ring.index(stage))
                tma.async_copy_global_to_shared(grad_desc, at, arrived, grad_ring.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        kv_phase ^= buffer
        buffer ^= 1


@gluon.jit
def _key_gradients(
    outputs,
    tiles,
    rings,
    rows_ptr,
    place,
    span,
    groups,
    shares,
    scales,
    PART: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One partition: 64 keys of each chunk."""
    dk_desc, dv_desc = outputs
    k_tiles, v_tiles, kv_ready, kv_free = tiles
    q_ring, grad_ring, ready, free = rings
    batch, kv_head = place
    scale, scale2 = scales
    kind: gl.constexpr = q_ring.dtype
    D: gl.constexpr = q_ring.shape[4]
    ROWS: gl.constexpr = GROUP * GROUP
    OWN: gl.constexpr = PART * (KEYS // GROUP)  # groups before the first that sees these keys
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * D, element_bitwidth=16, rank=2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    ahead = key[:, None] - row[None, :] // GROUP  # of the key over the query, where the group is the first of the chunk
    stage, phase, buffer, kv_phase = 0, 0, 0, 0
    for chunk in range(span[0], span[1]):
        dk = gl.zeros([KEYS, D], gl.float32, SUMS)
        dv = gl.zeros([KEYS, D], gl.float32, SUMS)
        k_tile, v_tile = k_tiles.index(buffer * (CHUNK // KEYS) + PART), v_tiles.index(buffer * (CHUNK // KEYS) + PART)
        k, v = k_tile._reinterpret(kind, [KEYS, D], TILE), v_tile._reinterpret(kind, [KEYS, D], TILE)
        mbarrier.wait(kv_ready.index(buffer), kv_phase)
        first = chunk * (CHUNK // GROUP)
        for share in range(shares):
            own_rows = rows_ptr + ((batch * gl.num_programs(1) + kv_head) * shares + share) * groups * (2 * ROWS)
            for group in range(first, gl.minimum(groups, first + (CHUNK + WINDOW) // GROUP)):
                mbarrier.wait(ready.index(stage), phase)
                later = group - first - OWN  # groups that this one is after the first that sees these keys
                if (later >= 0) & (later < (KEYS + WINDOW) // GROUP):
                    q = q_ring.index(stage)._reinterpret(kind, [ROWS, D], TILE)
                    grad = grad_ring.index(stage)._reinterpret(kind, [ROWS, D], TILE)
                    scores_async = warpgroup_mma(
                        k, q.permute((1, 0)), gl.zeros([KEYS, ROWS], gl.float32, SCORES), use_acc=False, is_async=True
                    )
                    dweights_async = warpgroup_mma(
                        v,
                        grad.permute((1, 0)),
                        gl.zeros([KEYS, ROWS], gl.float32, SCORES),
                        use_acc=False,
                        is_async=True,
                    )
                    lse = gl.load(own_rows + group * (2 * ROWS) + row)
                    delta = gl.load(own_rows + group * (2 * ROWS) + ROWS + row)
                    scores = warpgroup_mma_wait(1, deps=[scores_async])
                    weights = gl.exp2(scores * scale2 - lse[None, :])
                    if (later < KEYS // GROUP) | (later >= WINDOW // GROUP):
                        seen = (ahead <= later * GROUP) & (ahead > later * GROUP - WINDOW)
                        weights = gl.where(seen, weights, 0.0)
                    dweights = warpgroup_mma_wait(0, deps=[dweights_async])
                    dv_async = warpgroup_mma(gl.convert_layout(weights.to(kind), WEIGHT), grad, dv, is_async=True)
                    dscores = weights * (dweights - delta[None, :])
                    dk_async = warpgroup_mma(gl.convert_layout(dscores.to(kind), WEIGHT), q, dk, is_async=True)
                    dv, dk = warpgroup_mma_wait(0, deps=[dv_async, dk_async])
                mbarrier.arrive(free.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        _all_arrive()
        k.store((dk * scale).to(kind))
        v.store(dv.to(kind))
        fence_async_shared()
        _all_arrive()
        at = [batch, chunk * CHUNK + PART * KEYS, kv_head, 0]
        tma.async_copy_shared_to_global(dk_desc, at, k_tile)
        tma.async_copy_shared_to_global(dv_desc, at, v_tile)
        tma.store_wait(0)
        _all_arrive()
        mbarrier.arrive(kv_free.index(buffer), count=1)
        kv_phase ^= buffer
        buffer ^= 1


@gluon.jit(do_not_specialize=["T", "groups", "run", "shares"])
def window_key_wgmma(
    q_desc,
    k_desc,
    v_desc,
    grad_desc,
    dk_desc,
    dv_desc,
    rows_ptr,
    T,
    groups,
    run,
    shares,
    scale,
    scale2,
    WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dK and dV [B, T, K, D]; a program has `run` chunks of a KV head, which `shares` eights of query heads share.
    rows[B, N / 8, groups, 2, 64]: log-sum-exp in base 2 and row sum of output · gradient of each row of each group."""
    kind: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    PARTS: gl.constexpr = CHUNK // KEYS
    k_tiles = gl.allocate_shared_memory(kind, [2 * PARTS, 1, KEYS, 1, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(kind, [2 * PARTS, 1, KEYS, 1, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(kind, [STAGES, 1, GROUP, GROUP, D], q_desc.layout)
    grad_ring = gl.allocate_shared_memory(kind, [STAGES, 1, GROUP, GROUP, D], grad_desc.layout)
    kv_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(kv_ready.index(buffer), count=1)
        mbarrier.init(kv_free.index(buffer), count=PARTS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    fence_async_shared()
    first = gl.program_id(0) * run
    span = (first, gl.minimum(first + run, gl.cdiv(T, CHUNK)))
    place = (gl.program_id(2), gl.program_id(1))
    sources, outputs, scales = (q_desc, k_desc, v_desc, grad_desc), (dk_desc, dv_desc), (scale, scale2)
    tiles, rings = (k_tiles, v_tiles, kv_ready, kv_free), (q_ring, grad_ring, ready, free)
    gl.warp_specialize(
        [
            (_key_gradients, (outputs, tiles, rings, rows_ptr, place, span, groups, shares, scales, 0, WINDOW, STAGES)),
            (_key_gradients, (outputs, tiles, rings, rows_ptr, place, span, groups, shares, scales, 1, WINDOW, STAGES)),
            (_copy_all, (sources, tiles, rings, place, span, groups, shares, WINDOW, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
