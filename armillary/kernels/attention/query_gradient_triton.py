"""Attention for training in Triton, backward: dQ."""

import triton
import triton.language as tl

from armillary.kernels.attention.backward_triton import score_gradient
from armillary.kernels.attention.scores_triton import key_range, place, rows, scores, tile

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


@triton.jit
def _over_keys(
    dq,
    q,
    grad,
    lse,
    delta,
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
    TMA: tl.constexpr,
):
    """Steps first … last − 1; from step `gap_at` on, blocks are `gap` further: both edges are one loop."""
    precision: tl.constexpr = "tf32x3" if FP32 else "tf32"
    for step in tl.range(first, last, num_stages=STAGES):
        if LISTED > 0:
            begin = (tl.load(list_ptr + step // LISTED) * LISTED + step % LISTED) * BLOCK_N
        elif MASKED:
            begin = tl.where(step < gap_at, step, step + gap) * BLOCK_N
        else:
            begin = step * BLOCK_N
        key = begin + tl.arange(0, BLOCK_N)
        k = tile(k_src, k_stride, batch, kv_head, begin, S, D, BLOCK_D, BLOCK_N, MASKED, TMA)
        v = tile(v_src, v_stride, batch, kv_head, begin, S, D, BLOCK_D, BLOCK_N, MASKED, TMA)
        key_doc = key
        if MASKED and DOCS:
            key_doc = tl.load(doc_ptr + key, mask=key < S, other=-1)
        qk = tl.dot(q, tl.trans(k), input_precision=precision)
        dp = tl.dot(grad, tl.trans(v), input_precision=precision)
        s = scores(
            qk,
            query[:, None],
            key[None, :],
            query_doc[:, None],
            key_doc[None, :],
            slope,
            scale2,
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
            False,
        )
        p = tl.exp2(s - lse[:, None])
        ds = score_gradient(qk, p, dp, delta[:, None], scale2, CAPPED)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=precision)
    return dq


@triton.jit
def query_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    doc_ptr,
    begin_ptr,
    run_ptr,
    list_ptr,
    count_ptr,
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
    HEADS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
):
    """dQ of one block of queries and one head; late blocks, which see most keys, come first. NARROW: few blocks of keys
    are seen, so all of them are one masked loop."""
    block, head, batch = place(HEADS_FIRST, N)
    block = tl.num_programs(1 if HEADS_FIRST else 0) - 1 - block
    batch_row = batch.to(tl.int64)
    shift = S - T
    query = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (batch_row * N + head) * T
    q = rows(q_ptr + batch_row * q_b + head * q_n, q_t, block * BLOCK_M, T, D, BLOCK_D, BLOCK_M, True)
    grad = rows(grad_ptr + batch_row * g_b + head * g_n, g_t, block * BLOCK_M, T, D, BLOCK_D, BLOCK_M, True)
    lse = tl.load(lse_ptr + row + query, mask=query < T, other=float("inf"))
    delta = tl.load(delta_ptr + row + query, mask=query < T, other=0.0)
    kv_head = head // group
    k_src, v_src = k_ptr, v_ptr
    if not TMA:
        k_src += batch_row * k_b + kv_head * k_n
        v_src += batch_row * v_b + kv_head * v_n
    query_doc = query
    if DOCS:
        doc_ptr += batch_row * S
        query_doc = tl.load(doc_ptr + query, mask=query < T, other=-2)
    slope = 0.0
    if SLOPES:
        slope = tl.load(slope_ptr + head).to(tl.float32) * 1.4426950408889634
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
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
            batch_row * S,
            T,
            S,
            window,
            shift,
            CAUSAL,
            WINDOW,
            DOCS,
            BLOCK_M,
            BLOCK_N,
        )
        if NARROW:
            full_first, full_last = last, last
        gap_at, gap = full_first, full_last - full_first
    for edge in tl.static_range(1 if NARROW else 0, 2):  # blocks of keys that all queries see, then the ones around
        dq = _over_keys(
            dq,
            q,
            grad,
            lse,
            delta,
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
            STAGES,
            TMA,
        )
    d = tl.arange(0, BLOCK_D)
    at = ((batch_row * T + query) * N + head)[:, None] * D + d[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(query[:, None] < T) & (d[None, :] < D))
