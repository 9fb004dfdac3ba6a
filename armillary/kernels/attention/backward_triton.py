"""Attention for training in Triton, backward: one kernel for dK and dV, one for dQ, no atomics.

Both recompute the scores from the saved log-sum-exp. A program of the first sums over all query heads that share its
keys, so grouped heads need no second pass and results are deterministic.
"""

import triton
import triton.language as tl

from armillary.kernels.attention.forward_triton import key_range, rows, scores, tile

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


@triton.jit
def delta_kernel(
    out_ptr, grad_ptr, delta_ptr, g_b, g_t, g_n, T, N, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """sum(out · d out) of each query and head, in the layout of the lse: [B, N, T]."""
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_M
    query = first + tl.arange(0, BLOCK_M)
    out = rows(out_ptr + (batch * T * N + head) * D, N * D, first, T, D, BLOCK_D, BLOCK_M, True).to(tl.float32)
    grad = rows(grad_ptr + batch * g_b + head * g_n, g_t, first, T, D, BLOCK_D, BLOCK_M, True).to(tl.float32)
    tl.store(delta_ptr + (batch * N + head) * T + query, tl.sum(out * grad, 1), mask=query < T)


@triton.jit
def _gradient(qk, p, dp, delta, scale2, CAPPED: tl.constexpr):
    """d loss / d (q·k) up to the scale."""
    ds = p * (dp - delta)
    if CAPPED:
        bent = 2 * tl.sigmoid(2 * (qk * scale2)) - 1
        ds = ds * (1 - bent * bent)
    return ds


@triton.jit
def _over_queries(
    dk,
    dv,
    k,
    v,
    key,
    key_doc,
    q_src,
    g_src,
    q_stride,
    g_stride,
    batch,
    head,
    lse_ptr,
    delta_ptr,
    doc_ptr,
    list_ptr,
    first,
    last,
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
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    EACH: tl.constexpr = False,
    first_block=0,
    blocks=1,
    q_head=0,
    g_head=0,
):
    """EACH: of every head from `head` on, `blocks` blocks from `first_block` on, so that the next head's queries are
    loaded while this one's are computed; `q_head` and `g_head` are strides between heads."""
    precision: tl.constexpr = "tf32x3" if FP32 else "tf32"
    for step in tl.range(first, last, num_stages=STAGES):
        member = 0
        if EACH:
            member = step // blocks
            begin = (first_block + step - member * blocks) * BLOCK_M
        elif LISTED > 0:
            begin = (tl.load(list_ptr + step // LISTED) * LISTED + step % LISTED) * BLOCK_M
        else:
            begin = step * BLOCK_M
        query = begin + tl.arange(0, BLOCK_M)
        if EACH and not TMA:
            q = tile(q_src + member * q_head, q_stride, batch, head, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
            grad = tile(g_src + member * g_head, g_stride, batch, head, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
        else:
            q = tile(q_src, q_stride, batch, head + member, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
            grad = tile(g_src, g_stride, batch, head + member, begin, T, D, BLOCK_D, BLOCK_M, MASKED, TMA)
        if EACH:
            lse = tl.load(lse_ptr + member * T + query, mask=query < T, other=float("inf"))
            delta = tl.load(delta_ptr + member * T + query, mask=query < T, other=0.0)
        elif MASKED:
            lse = tl.load(lse_ptr + query, mask=query < T, other=float("inf"))
            delta = tl.load(delta_ptr + query, mask=query < T, other=0.0)
        else:
            lse = tl.load(lse_ptr + query)
            delta = tl.load(delta_ptr + query)
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
            shift,
            MASKED,
            CAUSAL,
            WINDOW,
            DOCS,
            SLOPES,
            CAPPED,
        )
        p = tl.exp2(s - lse[None, :])
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=precision)
        dp = tl.dot(v, tl.trans(grad), input_precision=precision)
        ds = _gradient(qk, p, dp, delta[None, :], scale2, CAPPED)
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
    EVEN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    NARROW: tl.constexpr,
    TMA: tl.constexpr,
):
    """dK and dV of one block of keys and one KV head; the first blocks, which most queries see, come first. NARROW: few
    blocks of queries see a key, so all of them, of all heads, are one masked loop."""
    block, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
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
        head, blocks = kv_head * group, tl.maximum(last - first, 0)
        q_src, g_src = q_ptr, grad_ptr
        if not TMA:
            q_src += batch_row * q_b + head * q_n
            g_src += batch_row * g_b + head * g_n
        row = (batch_row * N + head) * T
        dk, dv = _over_queries(
            dk,
            dv,
            k,
            v,
            key,
            key_doc,
            q_src,
            g_src,
            q_t,
            g_t,
            batch,
            head,
            lse_ptr + row,
            delta_ptr + row,
            doc_ptr,
            list_ptr,
            0,
            group * blocks,
            0.0,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            True,
            CAUSAL,
            WINDOW,
            DOCS,
            False,
            CAPPED,
            0,
            FP32,
            D,
            BLOCK_D,
            BLOCK_M,
            STAGES,
            TMA,
            True,
            first,
            tl.maximum(blocks, 1),
            q_n,
            g_n,
        )
    for member in range(0 if NARROW else group):
        head = kv_head * group + member
        q_src, g_src = q_ptr, grad_ptr
        if not TMA:
            q_src += batch_row * q_b + head * q_n
            g_src += batch_row * g_b + head * g_n
        row = (batch_row * N + head) * T
        slope = 0.0
        if SLOPES:
            slope = tl.load(slope_ptr + head).to(tl.float32) * 1.4426950408889634
        if LISTED > 0:
            listed = block // (LISTED * BLOCK_M // BLOCK_N)
            full = tl.load(count_ptr + 2 * listed) * LISTED
            dk, dv = _over_queries(
                dk,
                dv,
                k,
                v,
                key,
                key_doc,
                q_src,
                g_src,
                q_t,
                g_t,
                batch,
                head,
                lse_ptr + row,
                delta_ptr + row,
                doc_ptr,
                list_ptr + listed * lists,
                0,
                full,
                slope,
                scale2,
                softcap,
                T,
                S,
                window,
                shift,
                False,
                CAUSAL,
                WINDOW,
                DOCS,
                SLOPES,
                CAPPED,
                LISTED,
                FP32,
                D,
                BLOCK_D,
                BLOCK_M,
                STAGES,
                TMA,
            )
            dk, dv = _over_queries(
                dk,
                dv,
                k,
                v,
                key,
                key_doc,
                q_src,
                g_src,
                q_t,
                g_t,
                batch,
                head,
                lse_ptr + row,
                delta_ptr + row,
                doc_ptr,
                list_ptr + listed * lists,
                full,
                tl.load(count_ptr + 2 * listed + 1) * LISTED,
                slope,
                scale2,
                softcap,
                T,
                S,
                window,
                shift,
                True,
                CAUSAL,
                WINDOW,
                DOCS,
                SLOPES,
                CAPPED,
                LISTED,
                FP32,
                D,
                BLOCK_D,
                BLOCK_M,
                STAGES,
                TMA,
            )
        else:
            if CAUSAL or DOCS:
                dk, dv = _over_queries(
                    dk,
                    dv,
                    k,
                    v,
                    key,
                    key_doc,
                    q_src,
                    g_src,
                    q_t,
                    g_t,
                    batch,
                    head,
                    lse_ptr + row,
                    delta_ptr + row,
                    doc_ptr,
                    list_ptr,
                    first,
                    full_first,
                    slope,
                    scale2,
                    softcap,
                    T,
                    S,
                    window,
                    shift,
                    True,
                    CAUSAL,
                    WINDOW,
                    DOCS,
                    SLOPES,
                    CAPPED,
                    LISTED,
                    FP32,
                    D,
                    BLOCK_D,
                    BLOCK_M,
                    STAGES,
                    TMA,
                )
            dk, dv = _over_queries(
                dk,
                dv,
                k,
                v,
                key,
                key_doc,
                q_src,
                g_src,
                q_t,
                g_t,
                batch,
                head,
                lse_ptr + row,
                delta_ptr + row,
                doc_ptr,
                list_ptr,
                full_first,
                full_last,
                slope,
                scale2,
                softcap,
                T,
                S,
                window,
                shift,
                False,
                CAUSAL,
                WINDOW,
                DOCS,
                SLOPES,
                CAPPED,
                LISTED,
                FP32,
                D,
                BLOCK_D,
                BLOCK_M,
                STAGES,
                TMA,
            )
            if WINDOW or DOCS or not EVEN:
                dk, dv = _over_queries(
                    dk,
                    dv,
                    k,
                    v,
                    key,
                    key_doc,
                    q_src,
                    g_src,
                    q_t,
                    g_t,
                    batch,
                    head,
                    lse_ptr + row,
                    delta_ptr + row,
                    doc_ptr,
                    list_ptr,
                    full_last,
                    last,
                    slope,
                    scale2,
                    softcap,
                    T,
                    S,
                    window,
                    shift,
                    True,
                    CAUSAL,
                    WINDOW,
                    DOCS,
                    SLOPES,
                    CAPPED,
                    LISTED,
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
    precision: tl.constexpr = "tf32x3" if FP32 else "tf32"
    for step in tl.range(first, last, num_stages=STAGES):
        if LISTED > 0:
            begin = (tl.load(list_ptr + step // LISTED) * LISTED + step % LISTED) * BLOCK_N
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
        )
        p = tl.exp2(s - lse[:, None])
        ds = _gradient(qk, p, dp, delta[:, None], scale2, CAPPED)
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
    TMA: tl.constexpr,
):
    """dQ of one block of queries and one head; late blocks, which see most keys, come first. NARROW: few blocks of keys
    are seen, so all of them are one masked loop."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2)
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
        full = tl.load(count_ptr + 2 * listed) * LISTED
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
            list_ptr + listed * lists,
            0,
            full,
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            False,
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
            list_ptr + listed * lists,
            full,
            tl.load(count_ptr + 2 * listed + 1) * LISTED,
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            True,
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
            full_first, full_last = first, first
        if (WINDOW or DOCS) and not NARROW:
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
                first,
                full_first,
                slope,
                scale2,
                softcap,
                T,
                S,
                window,
                shift,
                True,
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
            full_first,
            full_last,
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            False,
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
            full_last,
            last,
            slope,
            scale2,
            softcap,
            T,
            S,
            window,
            shift,
            True,
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
