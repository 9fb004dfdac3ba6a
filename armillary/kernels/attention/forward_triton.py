"""Attention for training in Triton, forward: online softmax in base 2 over key blocks.

A query block sees three ranges of key blocks: some at the far edge (window, start of its document) that need a mask,
the many that are fully visible, and those on the diagonal; both edges are one loop. A block-sparse mask gives a list of
key blocks instead. Under a narrow window, heads that share keys are rows of one block.
"""

import triton
import triton.language as tl

from armillary.kernels.attention.scores_triton import key_range, place, rows, scores, tile

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


@triton.jit
def _over_keys(
    acc,
    total,
    top,
    q,
    query,
    query_doc,
    k_src,
    v_src,
    k_stride,
    v_stride,
    batch,
    kv_head,
    doc_ptr,
    list_ptr,
    first,
    last,
    gap_at,
    gap,
    slope,
    scale2,
    softcap,
    T,
    S,
    window,
    shift,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCS: tl.constexpr,
    SLOPES: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RAW: tl.constexpr,
    TMA: tl.constexpr,
):
    """Steps first … last − 1; from step `gap_at` on, blocks are `gap` further: both edges of the visible range are one
    loop, whose loads are in flight together. RAW leaves the scale to the exponential, where it costs nothing."""
    for step in tl.range(first, last, num_stages=STAGES):
        if LISTED > 0:  # LISTED steps share a listed block
            begin = (tl.load(list_ptr + step // LISTED) * LISTED + step % LISTED) * BLOCK_N
        elif MASKED:
            begin = tl.where(step < gap_at, step, step + gap) * BLOCK_N
        else:
            begin = step * BLOCK_N
        key = begin + tl.arange(0, BLOCK_N)
        k = tile(k_src, k_stride, batch, kv_head, begin, S, D, BLOCK_D, BLOCK_N, MASKED, TMA)
        qk = tl.dot(q, tl.trans(k), input_precision="tf32x3" if FP32 else "tf32")
        key_doc = key
        if MASKED and DOCS:
            key_doc = tl.load(doc_ptr + key, mask=key < S, other=-1)
        qk = scores(
            qk,
            query[:, None],
            key[None, :],
            query_doc[:, None],
            key_doc[None, :],
            slope,
            1.0 if RAW else scale2,
            softcap,
            T,
            S,
            window,
            shift,
            MASKED,
            CAUSAL,
            WINDOW,
            DOCS,
            SLOPES,
            CAPPED,
        )
        highest = tl.max(qk, 1)
        new = tl.maximum(top, highest * scale2 if RAW else highest)
        base = new
        if MASKED:
            base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(qk * scale2 - base[:, None]) if RAW else tl.exp2(qk - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = tile(v_src, v_stride, batch, kv_head, begin, S, D, BLOCK_D, BLOCK_N, MASKED, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="tf32x3" if FP32 else "tf32")
        top = new
    return acc, total, top


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    doc_ptr,
    begin_ptr,
    run_ptr,
    list_ptr,
    count_ptr,
    sink_ptr,
    slope_ptr,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_n,
    v_b,
    v_s,
    v_n,
    T,
    S,
    N,
    group,
    scale2,
    softcap,
    window,
    lists,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCS: tl.constexpr,
    SLOPES: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    LISTED: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
    PACK: tl.constexpr,
    RAW: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """Queries of one block and head, or of PACK heads that share their keys, side by side; late blocks, which see most
    keys, come first, those of one head after those of another, or with HEADS_FIRST of all heads. EDGE_STAGES: of the
    loop over blocks that are masked."""
    TOKENS: tl.constexpr = BLOCK_M // PACK
    block, heads, batch = place(HEADS_FIRST, N // PACK)
    block = tl.num_programs(1 if HEADS_FIRST else 0) - 1 - block
    shift = S - T
    row = tl.arange(0, BLOCK_M)
    head, query = heads, block * BLOCK_M + row
    if PACK > 1:
        head, query = heads * PACK + row % PACK, block * TOKENS + row // PACK
    kv_head = heads * PACK // group
    k_src, v_src = k_ptr, v_ptr
    if not TMA:
        k_src += batch.to(tl.int64) * k_b + kv_head * k_n
        v_src += batch.to(tl.int64) * v_b + kv_head * v_n
    d = tl.arange(0, BLOCK_D)
    if PACK > 1:
        at = q_ptr + batch.to(tl.int64) * q_b + (query.to(tl.int64) * q_t + head * q_n)[:, None] + d[None, :]
        q = tl.load(at, mask=(query < T)[:, None] & (d[None, :] < D), other=0.0)
    else:
        q = rows(q_ptr + batch.to(tl.int64) * q_b + head * q_n, q_t, block * BLOCK_M, T, D, BLOCK_D, BLOCK_M, True)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slope_ptr + head).to(tl.float32) * 1.4426950408889634
    query_doc = query
    if DOCS:
        doc_ptr += batch.to(tl.int64) * S
        query_doc = tl.load(doc_ptr + query, mask=query < T, other=-2)
    if LISTED > 0:
        listed = block // (LISTED * BLOCK_N // BLOCK_M)
        list_ptr += listed * lists
        full_first, full_last = 0, tl.load(count_ptr + 2 * listed) * LISTED
        first, last = full_last, tl.load(count_ptr + 2 * listed + 1) * LISTED
        gap_at, gap = 0, 0
    else:
        first, full_first, full_last, last = key_range(
            block,
            begin_ptr,
            run_ptr,
            batch.to(tl.int64) * S,
            T,
            S,
            window,
            shift,
            CAUSAL,
            WINDOW,
            DOCS,
            TOKENS,
            BLOCK_N,
        )
        gap_at, gap = full_first, full_last - full_first
    for edge in tl.static_range(2):  # blocks of keys that all queries see, then the ones around them
        acc, total, top = _over_keys(
            acc,
            total,
            top,
            q,
            query,
            query_doc,
            k_src,
            v_src,
            k_s,
            v_s,
            batch,
            kv_head,
            doc_ptr,
            list_ptr,
            first if edge else full_first,
            last - gap if edge else full_last,
            gap_at,
            gap,
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            edge == 1,
            CAUSAL,
            WINDOW,
            DOCS,
            SLOPES,
            CAPPED,
            LISTED,
            FP32,
            D,
            BLOCK_D,
            BLOCK_N,
            EDGE_STAGES if edge else STAGES,
            RAW,
            TMA,
        )
    if SINKS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(top, sink)
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.exp2(sink - new)
        acc = acc * shrink[:, None]
        top = new
    # a query that sees nothing gives zeros; its infinite lse makes its weights zero in the backward pass
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    lse = tl.where(nothing, float("inf"), top + tl.log2(tl.where(nothing, 1.0, total)))
    tl.store(lse_ptr + (batch.to(tl.int64) * N + head) * T + query, lse, mask=query < T)
    at = ((batch.to(tl.int64) * T + query) * N + head)[:, None] * D + d[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(query[:, None] < T) & (d[None, :] < D))
