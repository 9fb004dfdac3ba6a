"""Sliding-window attention for Hopper, the gradient of queries: tiles, chunks and partitions as in window_wgmma.py.

A tile's keys are taken in three parts, two halves of the window and the keys at the tile's own positions, since
registers hold the scores of one part and their gradients. The result goes to memory from where the queries were.
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

from armillary.kernels.attention.window_wgmma import GROUP, PARTS, Q_STAGES, _all_arrive, _copy_chunk

# B batch, T tokens, N query heads, K KV heads, D head dim; a group is 8 tokens, a row of it 8 heads


@gluon.jit
def _copy_rows(sources, rings, place, group, slot):
    """The queries of a group of tokens, and the gradients of their outputs."""
    q_desc, _, _, grad_desc, _ = sources
    q_ring, grad_ring, q_ready = rings
    batch, heads, _ = place
    arrived = q_ready.index(slot)
    mbarrier.expect(arrived, 2 * q_desc.block_type.nbytes)
    at = [batch, group * GROUP, heads * GROUP, 0]
    tma.async_copy_global_to_shared(q_desc, at, arrived, q_ring.index(slot))
    tma.async_copy_global_to_shared(grad_desc, at, arrived, grad_ring.index(slot))


@gluon.jit
def _products(q, grad, k, v, LAYOUT: gl.constexpr):
    """Scores and gradients of weights of a part of the keys, under way."""
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = k.shape[0]
    scores = warpgroup_mma(
        q, k.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True
    )
    dweights = warpgroup_mma(
        grad, v.permute((1, 0)), gl.zeros([ROWS, KEYS], gl.float32, LAYOUT), use_acc=False, is_async=True
    )
    return scores, dweights


@gluon.jit
def _query_gradients(
    sources,
    rings,
    row_rings,
    rows_ptr,
    place,
    span,
    scales,
    PART: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    BOX: gl.constexpr,
):
    """One partition: every fourth group of 8 tokens of each chunk."""
    _, k_desc, v_desc, _, dq_desc = sources
    k_ring, v_ring, keys_ready, values_ready, chunk_free = rings
    q_ring, grad_ring, q_ready = row_rings
    scale, scale2 = scales
    batch, heads, _ = place
    first_group, num_groups = span  # of tokens
    kind: gl.constexpr = k_ring.dtype
    D: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = GROUP * GROUP
    HALF: gl.constexpr = WINDOW // 2
    EACH: gl.constexpr = CHUNK // GROUP // PARTS
    GROUPS: gl.constexpr = (WINDOW + CHUNK) // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * D, element_bitwidth=16, rank=2)
    MAIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HALF, 16])
    EDGE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * GROUP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MAIN))
    edge_row = gl.arange(0, ROWS, gl.SliceLayout(1, EDGE))
    key = gl.arange(0, HALF, gl.SliceLayout(0, MAIN))
    edge_key = gl.arange(0, 2 * GROUP, gl.SliceLayout(0, EDGE))
    _copy_rows(sources, row_rings, place, first_group + PART, PART * Q_STAGES)
    if PART == 0:
        _copy_chunk((k_desc, v_desc), rings, place, first_group, 0, WINDOW, CHUNK, BOX)
    for group in range(PART, num_groups, PARTS):
        chunk, local = group // (CHUNK // GROUP), group // PARTS % EACH
        buffer, phase, q_phase = chunk % 2, chunk // 2 % 2, group // (PARTS * Q_STAGES) % 2
        token = (first_group + group) * GROUP
        own_rows = rows_ptr + token * (2 * GROUP)
        first = buffer * GROUPS + group % (CHUNK // GROUP)  # of the groups of keys that the tile sees
        slot = PART * Q_STAGES + group // PARTS % Q_STAGES
        q = q_ring.index(slot)._reinterpret(kind, [ROWS, D], TILE)
        grad = grad_ring.index(slot)._reinterpret(kind, [ROWS, D], TILE)
        mbarrier.wait(keys_ready.index(buffer), phase)
        mbarrier.wait(values_ready.index(buffer), phase)
        mbarrier.wait(q_ready.index(slot), q_phase)
        lse = gl.load(own_rows + row)
        delta = gl.load(own_rows + ROWS + row)
        dq = gl.zeros([ROWS, D], gl.float32, SUMS)
        for half in gl.static_range(2):
            k = k_ring.index(first + half * (HALF // GROUP))._reinterpret(kind, [HALF, D], TILE)
            v = v_ring.index(first + half * (HALF // GROUP))._reinterpret(kind, [HALF, D], TILE)
            scores_async, dweights_async = _products(q, grad, k, v, MAIN)
            if half == 0:  # the tile before has left its place, which is for the next one
                tma.store_wait(0)
                _all_arrive()
                if group + PARTS < num_groups:
                    other = PART * Q_STAGES + (group // PARTS + 1) % Q_STAGES
                    _copy_rows(sources, row_rings, place, first_group + group + PARTS, other)
            scores, dweights = warpgroup_mma_wait(0, deps=[scores_async, dweights_async])
            weights = gl.exp2(scores * scale2 - lse[:, None])
            if half == 0:
                weights = gl.where(key[None, :] > (row // GROUP)[:, None], weights, 0.0)
            if token < WINDOW:
                weights = gl.where((key >= WINDOW - token - half * HALF)[None, :], weights, 0.0)
            dscores = weights * (dweights - delta[:, None])
            dq = warpgroup_mma(gl.convert_layout(dscores.to(kind), WEIGHT), k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
        k = k_ring.index(first + WINDOW // GROUP - 1)._reinterpret(kind, [2 * GROUP, D], TILE)
        v = v_ring.index(first + WINDOW // GROUP - 1)._reinterpret(kind, [2 * GROUP, D], TILE)
        scores_async, dweights_async = _products(q, grad, k, v, EDGE)
        edge_lse = gl.convert_layout(lse, gl.SliceLayout(1, EDGE))
        edge_delta = gl.convert_layout(delta, gl.SliceLayout(1, EDGE))
        scores, dweights = warpgroup_mma_wait(0, deps=[scores_async, dweights_async])
        seen = (edge_key[None, :] >= GROUP) & (edge_key[None, :] <= (edge_row // GROUP + GROUP)[:, None])
        weights = gl.where(seen, gl.exp2(scores * scale2 - edge_lse[:, None]), 0.0)
        dscores = weights * (dweights - edge_delta[:, None])
        dq = warpgroup_mma(gl.convert_layout(dscores.to(kind), WEIGHT), k, dq, is_async=True)
        result = warpgroup_mma_wait(0, deps=[dq]) * scale
        if local == EACH - 1:
            mbarrier.arrive(chunk_free.index(buffer), count=1)
        _all_arrive()
        q.store(result.to(kind))
        fence_async_shared()
        _all_arrive()
        tma.async_copy_shared_to_global(dq_desc, [batch, token, heads * GROUP, 0], q_ring.index(slot))
        if PART == 0:
            following = group + CHUNK // GROUP  # local is 0, so this is where the next chunk begins
            if (local == 0) & (following < num_groups):  # into the place of the last chunk but one
                mbarrier.wait(chunk_free.index(1 - buffer), phase ^ 1 ^ buffer)
                into, begin = 1 - buffer, first_group + following
                _copy_chunk((k_desc, v_desc), rings, place, begin, into, WINDOW, CHUNK, BOX)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["groups", "run", "shares"])
def window_query_wgmma(
    q_desc,
    k_desc,
    v_desc,
    grad_desc,
    dq_desc,
    rows_ptr,
    groups,
    run,
    shares,
    scale,
    scale2,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    BOX: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dQ[B, T, N, D]; arguments as of `window_wgmma`, and what `window_rows_kernel` finds: groups of 8 tokens
    in whole chunks."""
    kind: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    GROUPS: gl.constexpr = (WINDOW + CHUNK) // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * D, element_bitwidth=16, rank=2)
    k_ring = gl.allocate_shared_memory(kind, [2 * GROUPS, GROUP, D], TILE)
    v_ring = gl.allocate_shared_memory(kind, [2 * GROUPS, GROUP, D], TILE)
    q_ring = gl.allocate_shared_memory(kind, [PARTS * Q_STAGES, 1, GROUP, GROUP, D], q_desc.layout)
    grad_ring = gl.allocate_shared_memory(kind, [PARTS * Q_STAGES, 1, GROUP, GROUP, D], grad_desc.layout)
    keys_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    chunk_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [PARTS * Q_STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(keys_ready.index(buffer), count=1)
        mbarrier.init(values_ready.index(buffer), count=1)
        mbarrier.init(chunk_free.index(buffer), count=PARTS)
    for slot in gl.static_range(PARTS * Q_STAGES):
        mbarrier.init(q_ready.index(slot), count=1)
    fence_async_shared()
    first = gl.program_id(0) * run
    last = gl.minimum(first + run, groups // (CHUNK // GROUP))
    span = (first * (CHUNK // GROUP), (last - first) * (CHUNK // GROUP))
    place = (gl.program_id(2), gl.program_id(1), gl.program_id(1) // shares)
    own_rows = rows_ptr + (gl.program_id(2) * gl.num_programs(1) + gl.program_id(1)) * groups * (2 * GROUP * GROUP)
    sources = (q_desc, k_desc, v_desc, grad_desc, dq_desc)
    rings, rows, scales = (
        (k_ring, v_ring, keys_ready, values_ready, chunk_free),
        (q_ring, grad_ring, q_ready),
        (scale, scale2),
    )
    gl.warp_specialize(
        [
            (_query_gradients, (sources, rings, rows, own_rows, place, span, scales, 0, WINDOW, CHUNK, BOX)),
            (_query_gradients, (sources, rings, rows, own_rows, place, span, scales, 1, WINDOW, CHUNK, BOX)),
            (_query_gradients, (sources, rings, rows, own_rows, place, span, scales, 2, WINDOW, CHUNK, BOX)),
            (_query_gradients, (sources, rings, rows, own_rows, place, span, scales, 3, WINDOW, CHUNK, BOX)),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )
