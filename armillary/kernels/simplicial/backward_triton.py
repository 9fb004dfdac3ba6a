"""2-simplicial attention in Triton, backward: weights are computed again from the log-sum-exp, in two kernels.

With p the softmax weights of a row (j, h), dp its gradient and ds = p·(dp − delta): `query_kernel` goes over a query's
pairs like the forward kernel and gives dq = Σ_j k1_j ⊙ (ds·K2) and, per first key of its window, the sums over heads
of q ⊙ (ds·K2) and dO ⊙ (p·V2), which `first_kernel` adds up by key; `second_kernel` owns a tile of second keys and
gives dK2 = dsᵀ·(q ⊙ k1) and dV2 = pᵀ·(dO ⊙ v1). Nothing is added atomically, so results are the same every time.
"""

import triton
import triton.language as tl

from armillary.kernels.simplicial.forward_triton import places, row_heads, rows_of, second_tile, times, vectors

# B batch, T tokens, N query heads, K KV heads, D head dim; a row is (first key j, head)


@triton.jit
def delta_kernel(out_ptr, grad_ptr, delta_ptr, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """sum(out · d out) of each row of D numbers."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    out = rows_of(out_ptr, row, D, row < rows, D, BLOCK_D).to(tl.float32)
    grad = rows_of(grad_ptr, row, D, row < rows, D, BLOCK_D).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(out * grad, 1), mask=row < rows)


@triton.jit
def query_kernel(
    q_ptr,
    k1_ptr,
    v1_ptr,
    k2_src,
    v2_src,
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
    group,
    scale,
    scale2,
    window_1,
    window_2,
    DOCS: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FLAT: tl.constexpr,
    TMA: tl.constexpr,
):
    """Gradients of one token's queries, and its shares of the gradients of first keys and values: fp32 [B, tokens of
    the launch, parts, first keys of the window from the query back, 2, D]. Gradients of the output are contiguous."""
    local, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = local + first_token
    row = batch * T + token
    kv_head = part // tl.cdiv(group, GROUP)
    pair, head = row_heads(part, group, GROUP, PAIRS * GROUP)
    own = head < group
    k1_ptr, v1_ptr = k1_ptr + batch * k_b + kv_head * k_h, v1_ptr + batch * v_b + kv_head * v_h
    k2_at, v2_at = k2_src, v2_src
    if not TMA:
        k2_at, v2_at = k2_at + batch * k_b + kv_head * k_h, v2_at + batch * v_b + kv_head * v_h
    low = 0
    if DOCS:
        low = tl.load(begin_ptr + row)
    first_1, first_2 = tl.maximum(low, token - window_1 + 1), tl.maximum(low, token - window_2 + 1)
    heads_at = row * N + kv_head * group
    q = rows_of(q_ptr + batch * q_b + token.to(tl.int64) * q_t + kv_head * group * q_n, head, q_n, own, D, BLOCK_D)
    grad = rows_of(grad_ptr + heads_at * D, head, D, own, D, BLOCK_D)
    lse = tl.load(lse_ptr + heads_at + head, mask=own, other=float("inf"))
    delta = tl.load(delta_ptr + heads_at + head, mask=own, other=0.0)
    dq = tl.zeros((GROUP, BLOCK_D), tl.float32)
    d = tl.arange(0, BLOCK_D)
    part_ptr += ((batch * tl.num_programs(0) + local) * tl.num_programs(1) + part) * window_1 * 2 * D
    for j in tl.range(first_1, token + 1, PAIRS, flatten=FLAT):
        first = j + pair
        near = first <= token
        k1 = vectors(k1_ptr, places(first, k_s, k1_ptr, 0, False, 1, D, near), near, D, BLOCK_D)
        v1 = vectors(v1_ptr, places(first, v_s, v1_ptr, 0, False, 1, D, near), near, D, BLOCK_D)
        product, dproduct = times(q, k1), times(grad, v1)
        dsk = tl.zeros((PAIRS * GROUP, BLOCK_D), tl.float32)
        pv = tl.zeros((PAIRS * GROUP, BLOCK_D), tl.float32)
        for begin in tl.range(first_2, token + 1, BLOCK_N, num_stages=STAGES):
            k2 = second_tile(
                k2_at, k_s, k1_ptr, 0, batch.to(tl.int32), kv_head, begin, token + 1, D, BLOCK_D, BLOCK_N, TMA, False, 1
            )
            v2 = second_tile(
                v2_at, v_s, k1_ptr, 0, batch.to(tl.int32), kv_head, begin, token + 1, D, BLOCK_D, BLOCK_N, TMA, False, 1
            )
            logits = tl.dot(product, tl.trans(k2), input_precision="tf32x3" if FP32 else "tf32")
            dweights = tl.dot(dproduct, tl.trans(v2), input_precision="tf32x3" if FP32 else "tf32")
            weights = tl.exp2(logits * scale2 - lse[:, None])
            if begin + BLOCK_N > token + 1:
                weights = tl.where((begin + tl.arange(0, BLOCK_N) <= token)[None, :], weights, 0.0)
            ds = weights * (dweights - delta[:, None])
            dsk = tl.dot(ds.to(k2.dtype), k2, dsk, input_precision="tf32x3" if FP32 else "tf32")
            pv = tl.dot(weights.to(v2.dtype), v2, pv, input_precision="tf32x3" if FP32 else "tf32")
        dk1, dv1 = dsk * q.to(tl.float32), pv * grad.to(tl.float32)
        dsk = dsk * k1.to(tl.float32)
        if PAIRS > 1:
            dq += tl.sum(tl.reshape(dsk, (PAIRS, GROUP, BLOCK_D)), 0)
            back = token - j - tl.arange(0, PAIRS)
            at = part_ptr + back[:, None] * 2 * D + d[None, :]
            seen = (back >= 0)[:, None] & (d[None, :] < D)
            tl.store(at, tl.sum(tl.reshape(dk1, (PAIRS, GROUP, BLOCK_D)), 1) * scale, mask=seen)
            tl.store(at + D, tl.sum(tl.reshape(dv1, (PAIRS, GROUP, BLOCK_D)), 1), mask=seen)
        else:
            dq += dsk
            at = part_ptr + (token - j) * 2 * D + d
            tl.store(at, tl.sum(dk1, 0) * scale, mask=d < D)
            tl.store(at + D, tl.sum(dv1, 0), mask=d < D)
    out_head = (part % tl.cdiv(group, GROUP)) * GROUP + tl.arange(0, GROUP)
    at = (heads_at + out_head)[:, None] * D + d[None, :]
    tl.store(dq_ptr + at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(out_head < group)[:, None] & (d[None, :] < D))


@triton.jit
def first_kernel(
    part_ptr,
    begin_ptr,
    sums_ptr,
    first_token,
    last_token,
    T,
    K,
    blocks,
    window_1,
    DOCS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the shares of the tokens first … last − 1 to the gradients of the first keys and values they see: fp32
    [B, T, K, 2, D]. Programs own keys, from the first that the first token sees."""
    key = tl.maximum(0, first_token - window_1 + 1) + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kv_head, batch = tl.program_id(1) // 2, tl.program_id(2).to(tl.int64)
    which, d = tl.program_id(1) % 2, tl.arange(0, BLOCK_D)
    inside = key < last_token
    at = ((batch * T + key) * K + kv_head)[:, None] * 2 * D + which * D + d[None, :]
    total = tl.load(sums_ptr + at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    for back in range(0, window_1):
        token = key + back
        seen = (token >= first_token) & (token < last_token)
        if DOCS:
            seen = seen & (tl.load(begin_ptr + batch * T + token, mask=seen, other=0) <= key)
        share = (batch * (last_token - first_token) + token - first_token) * K * blocks + kv_head * blocks
        for block in range(0, blocks):
            from_ptr = part_ptr + ((share + block) * window_1 + back)[:, None] * 2 * D + which * D + d[None, :]
            total += tl.load(from_ptr, mask=seen[:, None] & (d[None, :] < D), other=0.0)
    tl.store(sums_ptr + at, total, mask=inside[:, None] & (d[None, :] < D))


@triton.jit
def second_kernel(
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
    DOCS: tl.constexpr,
    FP32: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Gradients of a tile of second keys and values of one KV head, from one of `splits` ranges of queries."""
    kv_head, split, batch = tl.program_id(1) // splits, tl.program_id(1) % splits, tl.program_id(2).to(tl.int64)
    first_key = tl.program_id(0) * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, T) - 1
    key = first_key + tl.arange(0, BLOCK_N)
    inside = key <= last_key
    k1_ptr, v1_ptr = k1_ptr + batch * k_b + kv_head * k_h, v1_ptr + batch * v_b + kv_head * v_h
    k2_ptr, v2_ptr = k2_ptr + batch * k_b + kv_head * k_h, v2_ptr + batch * v_b + kv_head * v_h
    k2 = vectors(k2_ptr, places(key, k_s, k1_ptr, 0, False, 1, D, inside), inside, D, BLOCK_D)
    v2 = vectors(v2_ptr, places(key, v_s, v1_ptr, 0, False, 1, D, inside), inside, D, BLOCK_D)
    dk2 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv2 = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    last = tl.minimum(T, last_key + window_2)
    if DOCS:
        last = tl.minimum(last, tl.load(end_ptr + batch * T + last_key))
    each = tl.cdiv(last - first_key, splits)
    begin = first_key + split * each
    for token in tl.range(begin, tl.minimum(last, begin + each)):
        row = batch * T + token
        low = 0
        if DOCS:
            low = tl.load(begin_ptr + row)
        first_1, first_2 = tl.maximum(low, token - window_1 + 1), tl.maximum(low, token - window_2 + 1)
        for block in range(0, tl.cdiv(group, GROUP)):
            pair, head = row_heads(block, group, GROUP, PAIRS * GROUP)
            own = head < group
            heads_at = row * N + kv_head * group
            q_at = q_ptr + batch * q_b + (row - batch * T) * q_t + kv_head * group * q_n
            q = rows_of(q_at, head, q_n, own, D, BLOCK_D)
            grad = rows_of(grad_ptr + heads_at * D, head, D, own, D, BLOCK_D)
            lse = tl.load(lse_ptr + heads_at + head, mask=own, other=float("inf"))
            delta = tl.load(delta_ptr + heads_at + head, mask=own, other=0.0)
            for j in tl.range(first_1, token + 1, PAIRS, flatten=FLAT):
                first = j + pair
                near = first <= token
                k1 = vectors(k1_ptr, places(first, k_s, k1_ptr, 0, False, 1, D, near), near, D, BLOCK_D)
                v1 = vectors(v1_ptr, places(first, v_s, v1_ptr, 0, False, 1, D, near), near, D, BLOCK_D)
                product, dproduct = times(q, k1), times(grad, v1)
                logits = tl.dot(k2, tl.trans(product), input_precision="tf32x3" if FP32 else "tf32")
                weights = tl.exp2(logits * scale2 - lse[None, :])
                if (first_key < first_2) | (last_key > token):
                    weights = tl.where(((key >= first_2) & (key <= token))[:, None], weights, 0.0)
                dv2 = tl.dot(weights.to(q.dtype), dproduct, dv2, input_precision="tf32x3" if FP32 else "tf32")
                dweights = tl.dot(v2, tl.trans(dproduct), input_precision="tf32x3" if FP32 else "tf32")
                ds = weights * (dweights - delta[None, :])
                dk2 = tl.dot(ds.to(q.dtype), product, dk2, input_precision="tf32x3" if FP32 else "tf32")
    d = tl.arange(0, BLOCK_D)
    at = split.to(tl.int64) * d_split + batch * d_b + kv_head * d_h
    at = at + key.to(tl.int64)[:, None] * d_s + d[None, :]
    seen = inside[:, None] & (d[None, :] < D)
    tl.store(dk2_ptr + at, (dk2 * scale).to(dk2_ptr.dtype.element_ty), mask=seen)
    tl.store(dv2_ptr + at, dv2.to(dv2_ptr.dtype.element_ty), mask=seen)
