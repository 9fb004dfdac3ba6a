"""Gradients of second keys and values for Hopper, in Gluon: one program per tile of keys, like
`backward_triton.second_kernel`.

A partition multiplies queries by first keys, and gradients of the output by first values, into a ring in shared
memory; two partitions of four warps own half of the keys each, score them against the q_k1 and sum up gradients.
A partition skips the queries whose window has none of its keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# B batch, T tokens, N query heads, K KV heads, D head dim


@gluon.jit
def _windows(begin_ptr, row, token, window_1, window_2, DOCS: gl.constexpr):
    """(first of the first keys, first of the second keys) of a token."""
    low = 0
    if DOCS:
        low = gl.load(begin_ptr + row)
    return gl.maximum(low, token - window_1 + 1), gl.maximum(low, token - window_2 + 1)


@gluon.jit
def _multiply_first(
    tiles,
    rings,
    barriers,
    pointers,
    strides,
    span,
    sizes,
    ROWS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
    DOCS: gl.constexpr,
):
    """The multiplying partition: q ⊙ k1 and dO ⊙ v1 of every query, ROWS heads and first key, in order."""
    q_tile, grad_tile = tiles
    q_k1, grad_v1, lses, deltas = rings
    ready, free = barriers
    q_ptr, k1_ptr, v1_ptr, grad_ptr, lse_ptr, delta_ptr, begin_ptr = pointers
    q_t, q_n, k_s, v_s = strides
    first_token, end_token, row_0 = span
    N, blocks, window_1, window_2 = sizes
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    head, d = gl.arange(0, ROWS, gl.SliceLayout(1, TILE)), gl.arange(0, D, gl.SliceLayout(0, TILE))
    line = gl.arange(0, ROWS, LINE)
    stage, phase = 0, 1
    for token in range(first_token, end_token):
        first_1, _ = _windows(begin_ptr, row_0 + token, token, window_1, window_2, DOCS)
        for block in range(blocks):
            q_at = q_ptr + token * q_t + block * ROWS * q_n
            at = (row_0 + token) * N + block * ROWS
            q_tile.store(gl.load(q_at + head[:, None] * q_n + d[None, :]))
            grad_tile.store(gl.load(grad_ptr + at * D + head[:, None] * D + d[None, :]))
            lse, delta = gl.load(lse_ptr + at + line), gl.load(delta_ptr + at + line)
            for first in range(first_1, token + 1):
                k1 = gl.load(k1_ptr + first * k_s + d)
                v1 = gl.load(v1_ptr + first * v_s + d)
                mbarrier.wait(free.index(stage), phase)
                q_k1.index(stage).store(q_tile.load(TILE) * k1[None, :])
                grad_v1.index(stage).store(grad_tile.load(TILE) * v1[None, :])
                lses.index(stage).store(lse)
                deltas.index(stage).store(delta)
                fence_async_shared()
                mbarrier.arrive(ready.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1


@gluon.jit
def _gather_second(
    k2_tile,
    v2_tile,
    rings,
    barriers,
    pointers,
    strides,
    span,
    sizes,
    scales,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    DOCS: gl.constexpr,
):
    """Gradients of the keys of one partition."""
    q_k1, grad_v1, lses, deltas = rings
    ready, free = barriers
    k2_ptr, v2_ptr, dk2_ptr, dv2_ptr, begin_ptr = pointers
    k_s, v_s, d_s = strides
    first_token, end_token, row_0, first_key, T = span
    blocks, window_1, window_2 = sizes
    scale, scale2 = scales
    KEYS: gl.constexpr = k2_tile.shape[0]
    D: gl.constexpr = k2_tile.shape[1]
    kind: gl.constexpr = k2_tile.dtype
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    own = first_key + PART * KEYS
    loaded, d = own + gl.arange(0, KEYS, gl.SliceLayout(1, TILE)), gl.arange(0, D, gl.SliceLayout(0, TILE))
    inside = (loaded < T)[:, None] & (d >= 0)[None, :]
    k2_tile.store(gl.load(k2_ptr + loaded.to(gl.int64)[:, None] * k_s + d[None, :], mask=inside, other=0.0))
    v2_tile.store(gl.load(v2_ptr + loaded.to(gl.int64)[:, None] * v_s + d[None, :], mask=inside, other=0.0))
    fence_async_shared()
    key = own + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dk2 = gl.zeros([KEYS, D], gl.float32, SUMS)
    dv2 = gl.zeros([KEYS, D], gl.float32, SUMS)
    stage, phase = 0, 0
    for token in range(first_token, end_token):
        first_1, first_2 = _windows(begin_ptr, row_0 + token, token, window_1, window_2, DOCS)
        steps = blocks * (token + 1 - first_1)
        if (own <= token) & (own + KEYS > first_2):
            partial = (own < first_2) | (own + KEYS > token + 1)
            for _ in range(steps):
                mbarrier.wait(ready.index(stage), phase)
                logits_async = warpgroup_mma(
                    k2_tile,
                    q_k1.index(stage).permute((1, 0)),
                    gl.zeros([KEYS, ROWS], gl.float32, SCORES),
                    use_acc=False,
                    is_async=True,
                )
                dweights_async = warpgroup_mma(
                    v2_tile,
                    grad_v1.index(stage).permute((1, 0)),
                    gl.zeros([KEYS, ROWS], gl.float32, SCORES),
                    use_acc=False,
                    is_async=True,
                )
                lse = lses.index(stage).load(HEADS)
                logits = warpgroup_mma_wait(1, deps=[logits_async])
                weights = gl.exp2(logits * scale2 - lse[None, :])
                if partial:
                    weights = gl.where(((key >= first_2) & (key <= token))[:, None], weights, 0.0)
                delta = deltas.index(stage).load(HEADS)
                dweights = warpgroup_mma_wait(0, deps=[dweights_async])
                dv2_async = warpgroup_mma(
                    gl.convert_layout(weights.to(kind), WEIGHT), grad_v1.index(stage), dv2, is_async=True
                )
                dlogits = weights * (dweights - delta[None, :])
                dk2_async = warpgroup_mma(
                    gl.convert_layout(dlogits.to(kind), WEIGHT), q_k1.index(stage), dk2, is_async=True
                )
                dv2, dk2 = warpgroup_mma_wait(0, deps=[dv2_async, dk2_async])
                mbarrier.arrive(free.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
        else:
            for _ in range(steps):
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.arrive(free.index(stage), count=1)
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase ^= 1
    row = own + gl.arange(0, KEYS, gl.SliceLayout(1, SUMS))
    at = row.to(gl.int64)[:, None] * d_s + gl.arange(0, D, gl.SliceLayout(0, SUMS))[None, :]
    seen = (row < T)[:, None] & (at >= 0)
    gl.store(dk2_ptr + at, (dk2 * scale).to(dk2_ptr.dtype.element_ty), mask=seen)
    gl.store(dv2_ptr + at, dv2.to(dv2_ptr.dtype.element_ty), mask=seen)


@gluon.jit(do_not_specialize=["T", "N", "group", "window_1", "window_2", "splits"])
def second_wgmma(
    q_ptr,
    k1_ptr,
    v1_ptr,
    k2_ptr,
    v2_ptr,
    grad_ptr,
    lse_ptr,
    delta_ptr,
    begin_ptr,
    end_ptr,
    dk2_ptr,
    dv2_ptr,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    d_split,
    d_b,
    d_s,
    d_h,
    T,
    N,
    group,
    scale,
    scale2,
    window_1,
    window_2,
    splits,
    DOCS: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Arguments as of `backward_triton.second_kernel`; ROWS divides the query heads of a KV head, and a program owns
    2 · KEYS keys."""
    kind: gl.constexpr = k2_ptr.dtype.element_ty
    kv_head, split = gl.program_id(1) // splits, gl.program_id(1) % splits
    batch = gl.program_id(2).to(gl.int64)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    q_tile = gl.allocate_shared_memory(kind, [ROWS, D], TILE)
    grad_tile = gl.allocate_shared_memory(kind, [ROWS, D], TILE)
    k2_tiles = gl.allocate_shared_memory(kind, [2, KEYS, D], TILE)
    v2_tiles = gl.allocate_shared_memory(kind, [2, KEYS, D], TILE)
    q_k1 = gl.allocate_shared_memory(kind, [STAGES, ROWS, D], TILE)
    grad_v1 = gl.allocate_shared_memory(kind, [STAGES, ROWS, D], TILE)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()

    first_key = gl.program_id(0) * 2 * KEYS
    last_key = gl.minimum(first_key + 2 * KEYS, T) - 1
    last = gl.minimum(T, last_key + window_2)
    if DOCS:
        last = gl.minimum(last, gl.load(end_ptr + batch * T + last_key))
    each = gl.cdiv(last - first_key, splits)
    begin = first_key + split * each
    end = gl.minimum(last, begin + each)
    blocks = group // ROWS
    row_0 = gl.program_id(2) * T
    heads_at = kv_head * group
    at = split.to(gl.int64) * d_split + batch * d_b + kv_head * d_h
    k_at, v_at = batch * k_b + kv_head * k_h, batch * v_b + kv_head * v_h
    rings, barriers = (q_k1, grad_v1, lses, deltas), (ready, free)
    sources = (
        q_ptr + batch * q_b + heads_at * q_n,
        k1_ptr + k_at,
        v1_ptr + v_at,
        grad_ptr + heads_at * D,
        lse_ptr + heads_at,
        delta_ptr + heads_at,
        begin_ptr,
    )
    own = (k2_ptr + k_at, v2_ptr + v_at, dk2_ptr + at, dv2_ptr + at, begin_ptr)
    own_strides, own_span, own_sizes = (k_s, v_s, d_s), (begin, end, row_0, first_key, T), (blocks, window_1, window_2)
    scales = (scale, scale2)
    gl.warp_specialize(
        [
            (
                _gather_second,
                (
                    k2_tiles.index(0),
                    v2_tiles.index(0),
                    rings,
                    barriers,
                    own,
                    own_strides,
                    own_span,
                    own_sizes,
                    scales,
                    0,
                    ROWS,
                    STAGES,
                    DOCS,
                ),
            ),
            (
                _gather_second,
                (
                    k2_tiles.index(1),
                    v2_tiles.index(1),
                    rings,
                    barriers,
                    own,
                    own_strides,
                    own_span,
                    own_sizes,
                    scales,
                    1,
                    ROWS,
                    STAGES,
                    DOCS,
                ),
            ),
            (
                _multiply_first,
                (
                    (q_tile, grad_tile),
                    rings,
                    barriers,
                    sources,
                    (q_t.to(gl.int64), q_n, k_s.to(gl.int64), v_s.to(gl.int64)),
                    (begin, end, row_0),
                    (N.to(gl.int64), blocks, window_1, window_2),
                    ROWS,
                    D,
                    STAGES,
                    DOCS,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
