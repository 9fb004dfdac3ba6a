"""Attention for training in Triton, backward: dK and dV.

A program sums over all query heads that share its keys, so grouped heads need no second pass and results are
deterministic.
"""

import triton
import triton.language as tl

from armillary.kernels.attention.backward_triton import score_gradient
from armillary.kernels.attention.scores_triton import place, rows, scores, tile

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


@triton.jit
def _over_queries(
    dk,
    dv,
    k,
    v,
    key,
    key_doc,
    sources,
    strides,
    batch,
    head,
    rows_ptr,
    doc_ptr,
    list_ptr,
    slope_ptr,
    heads,
    blocks,
    first,
    gap_at,
    gap,
    factors,
    sizes,
    MASKED: tl.constexpr,
    FLAGS: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """Of each of `heads` heads from `head` on, `blocks` blocks of queries from `first` on, those from `gap_at` on being
    `gap` further: one loop, so that the next head's queries are loaded while this one's are computed."""
    CAUSAL: tl.constexpr = FLAGS[0]
    WINDOW: tl.constexpr = FLAGS[1]
    DOCS: tl.constexpr = FLAGS[2]
    SLOPES: tl.constexpr = FLAGS[3]
    CAPPED: tl.constexpr = FLAGS[4]
    LISTED: tl.constexpr = FLAGS[5]
    precision: tl.constexpr = "tf32x3" if FP32 else "tf32"
    q_src, g_src = sources
    q_t, q_n, g_t, g_n = strides
    lse_ptr, delta_ptr = rows_ptr
    scale2, softcap, window = factors
    T, S = sizes
    each = tl.maximum(blocks, 1)
    for step in tl.range(0, heads * blocks, num_stages=STAGES):
        member = step // each
        at = first + step - member * each
        if MASKED:
            at = tl.where(at < gap_at, at, at + gap)
        begin = at * BLOCK_M
        if LISTED > 0:  # LISTED steps share a listed block
            begin = (tl.load(list_ptr + at // LISTED) * LISTED + at % LISTED) * BLOCK_M
        query = begin + tl.arange(0, BLOCK_M)
        if TMA:
            q = tile(q_src, q_t, batch, head + member, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
            grad = tile(g_src, g_t, batch, head + member, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
        else:
            q = tile(q_src + member * q_n, q_t, batch, head, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
            grad = tile(g_src + member * g_n, g_t, batch, head, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
        if MASKED:
            lse = tl.load(lse_ptr + member * T + query, mask=query < T, other=float("inf"))
            delta = tl.load(delta_ptr + member * T + query, mask=query < T, other=0.0)
        else:
            lse = tl.load(lse_ptr + member * T + query)
            delta = tl.load(delta_ptr + member * T + query)
        slope = 0.0
        if SLOPES:
            slope = tl.load(slope_ptr + head + member).to(tl.float32) * 1.4426950408889634
        query_doc = query
        if MASKED and DOCS:
            query_doc = tl.load(doc_ptr + query, mask=query < T, other=-2)
        qk = tl.dot(k, tl.trans(q), input_precision=precision)
        s = scores(
            qk,
            query[None, :],
            key[:, None],
            query_doc[None, :],
            key_doc[:, None],
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            S - T,
            MASKED,
            CAUSAL,
            WINDOW,
            DOCS,
            SLOPES,
            CAPPED,
            False,
        )
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=precision)
        dp = tl.dot(v, tl.trans(grad), input_precision=precision)
        ds = score_gradient(qk, p, dp, delta[None, :], scale2, CAPPED)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=precision)
    return dk, dv


@triton.jit
def key_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    doc_ptr,
    end_ptr,
    run_end_ptr,
    list_ptr,
    count_ptr,
    order_ptr,
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
    g_b,
    g_t,
    g_n,
    T,
    S,
    N,
    group,
    scale,
    scale2,
    softcap,
    window,
    lists,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCS: tl.constexpr,
    SLOPES: tl.constexpr,
    CAPPED: tl.constexpr,
    LISTED: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NARROW: tl.constexpr,
    MERGED: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK and dV of one block of keys and one KV head; the first blocks, which most queries see, come first. Two loops:
    over blocks of queries that see all keys, and over those around them, whose scores are masked. MERGED: each of the
    two goes over all heads. NARROW: few blocks of queries see a key, so the first loop is empty."""
    block, kv_head, batch = place(HEADS_FIRST, N // group)
    if LISTED > 0:
        PER_LIST: tl.constexpr = LISTED * BLOCK_M // BLOCK_N
        block = tl.load(order_ptr + block // PER_LIST) * PER_LIST + block % PER_LIST
    batch_row = batch.to(tl.int64)
    shift = S - T
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = rows(k_ptr + batch_row * k_b + kv_head * k_n, k_s, block * BLOCK_N, S, D, BLOCK_D, BLOCK_N, True)
    v = rows(v_ptr + batch_row * v_b + kv_head * v_n, v_s, block * BLOCK_N, S, D, BLOCK_D, BLOCK_N, True)
    key_doc = key
    if DOCS:
        doc_ptr += batch_row * S
        key_doc = tl.load(doc_ptr + key, mask=key < S, other=-1)
    first_key, last_key = block * BLOCK_N, tl.minimum(block * BLOCK_N + BLOCK_N, S) - 1
    begin, full_begin, end, part = 0, 0, T, T
    if CAUSAL:
        begin = tl.maximum(0, first_key - shift)
        full_begin = tl.maximum(0, last_key - shift)
    if WINDOW:
        end = tl.maximum(0, tl.minimum(T, last_key + window - shift))
        part = tl.maximum(0, tl.minimum(T, first_key + window - shift))
    if DOCS:
        end = tl.minimum(end, tl.load(end_ptr + batch_row * S + last_key))
        part = tl.minimum(part, tl.load(run_end_ptr + batch_row * S + first_key))
        if not CAUSAL:  # documents also begin earlier: all blocks need the mask
            full_begin = T
    last = tl.cdiv(end, BLOCK_M)
    first = tl.minimum(begin // BLOCK_M, last)
    full_first = tl.maximum(first, tl.minimum(tl.cdiv(full_begin, BLOCK_M), last))
    full_last = tl.maximum(full_first, part // BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if NARROW:
        full_first, full_last = last, last
    if LISTED > 0:
        listed = block // (LISTED * BLOCK_M // BLOCK_N)
        list_ptr += listed * lists
        first, full_first, full_last = 0, 0, tl.load(count_ptr + 2 * listed) * LISTED
        last = tl.load(count_ptr + 2 * listed + 1) * LISTED
    FLAGS: tl.constexpr = (CAUSAL, WINDOW, DOCS, SLOPES, CAPPED, LISTED)
    for loop in range(1 if MERGED else group):
        head = kv_head * group + loop
        q_src, g_src = q_ptr, grad_ptr
        if not TMA:
            q_src += batch_row * q_b + head * q_n
            g_src += batch_row * g_b + head * g_n
        row = (batch_row * N + head) * T
        for edge in tl.static_range(1 if NARROW else 0, 2):
            # the blocks around are before full_first and from full_last on
            around = full_first - first + last - full_last
            dk, dv = _over_queries(
                dk,
                dv,
                k,
                v,
                key,
                key_doc,
                (q_src, g_src),
                (q_t, q_n, g_t, g_n),
                batch,
                head,
                (lse_ptr + row, delta_ptr + row),
                doc_ptr,
                list_ptr,
                slope_ptr,
                group if MERGED else 1,
                around if edge else full_last - full_first,
                first if edge else full_first,
                full_first,
                full_last - full_first,
                (scale2, softcap, window),
                (T, S),
                edge == 1,
                FLAGS,
                FP32,
                D,
                BLOCK_D,
                BLOCK_M,
                STAGES,
                TMA,
            )
    d = tl.arange(0, BLOCK_D)
    heads = N // group
    at = ((batch_row * S + key) * heads + kv_head)[:, None] * D + d[None, :]
    inside = (key[:, None] < S) & (d[None, :] < D)
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)
