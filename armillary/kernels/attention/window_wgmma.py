"""Sliding-window attention, forward, for Hopper and 8 query heads per KV head, in Gluon.

One program runs per multiprocessor. Rows of a tile are 8 tokens × 8 heads. They see WINDOW keys, of which the first 8
are hidden from some rows, and the 8 keys at their own positions: a softmax in one pass, with no maximum to carry along.
Keys and values of a chunk of tokens lie in shared memory once; four partitions of four warps take its tiles in turn, so
that one copies, one multiplies and one takes exponentials at a time. The first partition also copies the next chunk's
keys and values.
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

# B batch, T tokens, N query heads, K KV heads, D head dim; a group is 8 tokens, a row of it 8 heads

GROUP = gl.constexpr(8)
PARTS = gl.constexpr(4)
Q_STAGES = gl.constexpr(2)


@gluon.jit
def _copy_chunk(
    sources, rings, place, first_group, buffer, WINDOW: gl.constexpr, CHUNK: gl.constexpr, BOX: gl.constexpr
):
    """Keys and values from a window before the chunk to its end; what is outside of the sequence arrives as zeros."""
    k_desc, v_desc = sources
    k_ring, v_ring, keys_ready, values_ready, _ = rings
    batch, _, kv_head = place
    GROUPS: gl.constexpr = (WINDOW + CHUNK) // GROUP
    BOXES: gl.constexpr = (WINDOW + CHUNK) // BOX
    D: gl.constexpr = k_ring.shape[2]
    k_arrived, v_arrived = keys_ready.index(buffer), values_ready.index(buffer)
    mbarrier.expect(k_arrived, BOXES * k_desc.block_type.nbytes)
    mbarrier.expect(v_arrived, BOXES * v_desc.block_type.nbytes)
    for part in range(BOXES):
        group, row = buffer * GROUPS + part * (BOX // GROUP), first_group * GROUP - WINDOW + part * BOX
        k_tile = k_ring.index(group)._reinterpret(k_ring.dtype, [1, BOX, 1, D], k_desc.layout)
        tma.async_copy_global_to_shared(k_desc, [batch, row, kv_head, 0], k_arrived, k_tile)
        v_tile = v_ring.index(group)._reinterpret(v_ring.dtype, [1, BOX, 1, D], v_desc.layout)
        tma.async_copy_global_to_shared(v_desc, [batch, row, kv_head, 0], v_arrived, v_tile)


@gluon.jit
def _copy_queries(q_desc, rings, place, group, slot):
    """The queries of a group of tokens."""
    q_ring, q_ready = rings
    batch, heads, _ = place
    arrived = q_ready.index(slot)
    mbarrier.expect(arrived, q_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(q_desc, [batch, group * GROUP, heads * GROUP, 0], arrived, q_ring.index(slot))


@gluon.jit
def _attend(
    sources,
    rings,
    row_rings,
    out_tile,
    outputs,
    place,
    span,
    scale2,
    PART: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    BOX: gl.constexpr,
    SINKS: gl.constexpr,
):
    """One partition: every fourth group of 8 tokens of each chunk."""
    q_desc, k_desc, v_desc, out_desc = sources
    k_ring, v_ring, keys_ready, values_ready, chunk_free = rings
    q_ring, q_ready = row_rings
    lse_ptr, sink_ptr, T, N = outputs
    batch, heads, _ = place
    first_group, num_groups = span  # of tokens
    kind: gl.constexpr = k_ring.dtype
    D: gl.constexpr = k_ring.shape[2]
    ROWS: gl.constexpr = GROUP * GROUP
    EACH: gl.constexpr = CHUNK // GROUP // PARTS
    GROUPS: gl.constexpr = (WINDOW + CHUNK) // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * D, element_bitwidth=16, rank=2)
    MAIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, WINDOW, 16])
    EDGE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * GROUP, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MAIN))
    edge_row = gl.arange(0, ROWS, gl.SliceLayout(1, EDGE))
    key = gl.arange(0, WINDOW, gl.SliceLayout(0, MAIN))
    edge_key = gl.arange(0, 2 * GROUP, gl.SliceLayout(0, EDGE))
    gl.static_assert(EACH >= Q_STAGES)
    for step in gl.static_range(Q_STAGES):
        _copy_queries(q_desc, row_rings, place, first_group + step * PARTS + PART, PART * Q_STAGES + step)
    if PART == 0:
        _copy_chunk((k_desc, v_desc), rings, place, first_group, 0, WINDOW, CHUNK, BOX)
    sink = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, MAIN))
    if SINKS:
        sink = gl.load(sink_ptr + heads * GROUP + row % GROUP).to(gl.float32) * 1.4426950408889634
    lse_at = (batch * N + heads * GROUP + row % GROUP) * T + row // GROUP
    for group in range(PART, num_groups, PARTS):
        chunk, local = group // (CHUNK // GROUP), group // PARTS % EACH
        buffer, phase, q_phase = chunk % 2, chunk // 2 % 2, group // (PARTS * Q_STAGES) % 2
        token = (first_group + group) * GROUP
        first = buffer * GROUPS + group % (CHUNK // GROUP)  # of the groups of keys that the tile sees
        slot = PART * Q_STAGES + group // PARTS % Q_STAGES
        q = q_ring.index(slot)._reinterpret(kind, [ROWS, D], TILE)
        k_main = k_ring.index(first)._reinterpret(kind, [WINDOW, D], TILE)
        k_edge = k_ring.index(first + WINDOW // GROUP - 1)._reinterpret(kind, [2 * GROUP, D], TILE)
        mbarrier.wait(keys_ready.index(buffer), phase)
        mbarrier.wait(q_ready.index(slot), q_phase)
        main_async = warpgroup_mma(
            q, k_main.permute((1, 0)), gl.zeros([ROWS, WINDOW], gl.float32, MAIN), use_acc=False, is_async=True
        )
        edge_async = warpgroup_mma(
            q, k_edge.permute((1, 0)), gl.zeros([ROWS, 2 * GROUP], gl.float32, EDGE), use_acc=False, is_async=True
        )
        main, edge = warpgroup_mma_wait(0, deps=[main_async, edge_async])
        _all_arrive()
        if group + Q_STAGES * PARTS < num_groups:
            _copy_queries(q_desc, row_rings, place, first_group + group + Q_STAGES * PARTS, slot)

        # key c of the first is at c − WINDOW from the group's first token, key c of the others at c − 8
        main = gl.where(key[None, :] > (row // GROUP)[:, None], main, float("-inf"))
        if token < WINDOW:
            main = gl.where((key >= WINDOW - token)[None, :], main, float("-inf"))
        seen = (edge_key[None, :] >= GROUP) & (edge_key[None, :] <= (edge_row // GROUP + GROUP)[:, None])
        edge = gl.where(seen, edge, float("-inf"))
        edge_top = gl.convert_layout(gl.max(edge, 1), gl.SliceLayout(1, MAIN))
        top = gl.maximum(gl.max(main, 1), edge_top) * scale2
        if SINKS:
            top = gl.maximum(top, sink)
        main = gl.exp2(main * scale2 - top[:, None])
        edge = gl.exp2(edge * scale2 - gl.convert_layout(top, gl.SliceLayout(1, EDGE))[:, None])
        total = gl.sum(main, 1) + gl.convert_layout(gl.sum(edge, 1), gl.SliceLayout(1, MAIN))
        if SINKS:
            total += gl.exp2(sink - top)

        v_main = v_ring.index(first)._reinterpret(kind, [WINDOW, D], TILE)
        v_edge = v_ring.index(first + WINDOW // GROUP - 1)._reinterpret(kind, [2 * GROUP, D], TILE)
        mbarrier.wait(values_ready.index(buffer), phase)
        sums = warpgroup_mma(
            gl.convert_layout(main.to(kind), WEIGHT),
            v_main,
            gl.zeros([ROWS, D], gl.float32, SUMS),
            use_acc=False,
            is_async=True,
        )
        sums = warpgroup_mma(gl.convert_layout(edge.to(kind), WEIGHT), v_edge, sums, is_async=True)
        gl.store(lse_ptr + lse_at + token, top + gl.log2(total), mask=row // GROUP < T - token)
        factor = gl.convert_layout(1.0 / total, gl.SliceLayout(1, SUMS))
        result = warpgroup_mma_wait(0, deps=[sums]) * factor[:, None]
        if local == EACH - 1:
            mbarrier.arrive(chunk_free.index(buffer), count=1)
        tma.store_wait(0)
        _all_arrive()
        out_tile._reinterpret(kind, [ROWS, D], TILE).store(result.to(kind))
        fence_async_shared()
        _all_arrive()
        tma.async_copy_shared_to_global(out_desc, [batch, token, heads * GROUP, 0], out_tile)
        if PART == 0:
            following = group + CHUNK // GROUP  # local is 0, so this is where the next chunk begins
            if (local == 0) & (following < num_groups):  # into the place of the last chunk but one
                mbarrier.wait(chunk_free.index(1 - buffer), phase ^ 1 ^ buffer)
                _copy_chunk((k_desc, v_desc), rings, place, first_group + following, 1 - buffer, WINDOW, CHUNK, BOX)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "N", "run", "shares"])
def window_wgmma(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    sink_ptr,
    T,
    N,
    run,
    shares,
    scale2,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    BOX: gl.constexpr,
    SINKS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """out[B, T, N, D] and the log-sum-exp in base 2 [B, N, T]; a program has `run` chunks of tokens of 8 heads;
    `shares` such eights share keys.
    Descriptors are of tiles [1, 8, 8, D] of queries and outputs, and [1, BOX, 1, D] of keys and values."""
    kind: gl.constexpr = q_desc.dtype
    D: gl.constexpr = q_desc.block_type.shape[3]
    GROUPS: gl.constexpr = (WINDOW + CHUNK) // GROUP
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * D, element_bitwidth=16, rank=2)
    k_ring = gl.allocate_shared_memory(kind, [2 * GROUPS, GROUP, D], TILE)
    v_ring = gl.allocate_shared_memory(kind, [2 * GROUPS, GROUP, D], TILE)
    q_ring = gl.allocate_shared_memory(kind, [PARTS * Q_STAGES, 1, GROUP, GROUP, D], q_desc.layout)
    out_tiles = gl.allocate_shared_memory(kind, [PARTS, 1, GROUP, GROUP, D], out_desc.layout)
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
    last = gl.minimum(first + run, gl.cdiv(T, CHUNK))
    span = (first * (CHUNK // GROUP), (last - first) * (CHUNK // GROUP))
    place = (gl.program_id(2), gl.program_id(1), gl.program_id(1) // shares)
    sources, outputs = (q_desc, k_desc, v_desc, out_desc), (lse_ptr, sink_ptr, T, N)
    rings, rows = (k_ring, v_ring, keys_ready, values_ready, chunk_free), (q_ring, q_ready)
    gl.warp_specialize(
        [
            (
                _attend,
                (sources, rings, rows, out_tiles.index(0), outputs, place, span, scale2, 0, WINDOW, CHUNK, BOX, SINKS),
            ),
            (
                _attend,
                (sources, rings, rows, out_tiles.index(1), outputs, place, span, scale2, 1, WINDOW, CHUNK, BOX, SINKS),
            ),
            (
                _attend,
                (sources, rings, rows, out_tiles.index(2), outputs, place, span, scale2, 2, WINDOW, CHUNK, BOX, SINKS),
            ),
            (
                _attend,
                (sources, rings, rows, out_tiles.index(3), outputs, place, span, scale2, 3, WINDOW, CHUNK, BOX, SINKS),
            ),
        ],
        [4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS],
    )
