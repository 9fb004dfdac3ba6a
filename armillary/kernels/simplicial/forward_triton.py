"""2-simplicial attention in Triton, forward: one program per query token, whose rows are heads.

Neighbouring queries see shifted windows, so tiles of queries would be mostly masked; heads of one query see the same.
The rows of a program are the query heads of a KV head, times as many first keys as fill the tensor cores' tile: a row
(j, h) is plain attention of q_h ⊙ k1_j over the second keys and values. Its result is multiplied by v1_j once per
window, and rows of a head are merged by their log-sum-exp. Sequences may lie in pages.
"""

import triton
import triton.language as tl

# B batch, T queries, S keys, N query heads, K KV heads, D head dim; a row is (first key j, head)


@triton.jit
def row_heads(part, group, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(first keys of the rows, relative; heads within the KV head) for a program's part: KV head · blocks + block."""
    blocks = tl.cdiv(group, GROUP)
    row = tl.arange(0, ROWS)
    return row // GROUP, (part % blocks) * GROUP + row % GROUP


@triton.jit
def rows_of(base, row, stride, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One vector per row, zero where not `seen`."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(base + row[:, None] * stride + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def places(token, stride, table_ptr, page_stride, PAGED: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, seen):
    """Offsets of tokens of a sequence: in rows of `stride`, or in pages by the block table."""
    if PAGED:
        page = tl.load(table_ptr + token // PAGE, mask=seen, other=0).to(tl.int64)
        at = page * page_stride + (token % PAGE) * D
    else:
        at = token.to(tl.int64) * stride
    return at


@triton.jit
def vectors(base, at, seen, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    return tl.load(base + at[:, None] + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def times(a, b):
    """a ⊙ b, rounded once to their dtype."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def second_tile(
    source,
    stride,
    table_ptr,
    page_stride,
    batch,
    kv_head,
    begin,
    end,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    TMA: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Second keys or values from `begin` on; those from `end` on are zero, or not this query's to see."""
    if TMA:
        x = source.load([batch, begin, kv_head, 0]).reshape(BLOCK, BLOCK_D)
    else:
        token = begin + tl.arange(0, BLOCK)
        seen = token < end
        x = vectors(source, places(token, stride, table_ptr, page_stride, PAGED, PAGE, D, seen), seen, D, BLOCK_D)
    return x


@triton.jit
def forward_kernel(
    q_ptr,
    k1_ptr,
    v1_ptr,
    k2_src,
    v2_src,
    out_ptr,
    lse_ptr,
    begin_ptr,
    table_ptr,
    start_ptr,
    length_ptr,
    q_b,
    q_t,
    q_n,
    k_b,
    k_s,
    k_h,
    v_b,
    v_s,
    v_h,
    pages,
    T,
    N,
    group,
    scale2,
    window_1,
    window_2,
    DOCS: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE: tl.constexpr,
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
    """Heads of one KV head at one token; in pages k_b, v_b are strides of pages."""
    token, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position, row = token, batch * T + token
    if PAGED:
        first_row, length = tl.load(start_ptr + batch), tl.load(length_ptr + batch)
        count = tl.load(start_ptr + batch + 1) - first_row
        if (token >= count) | (length == 0):
            return
        position, row = length - count + token, (first_row + token).to(tl.int64)
        table_ptr += batch * pages
        q_ptr += row * q_t
    else:
        q_ptr += batch * q_b + token.to(tl.int64) * q_t
    kv_head = part // tl.cdiv(group, GROUP)
    pair, head = row_heads(part, group, GROUP, PAIRS * GROUP)
    k1_ptr, v1_ptr = k1_ptr + kv_head * k_h, v1_ptr + kv_head * v_h
    k2_at, v2_at = k2_src, v2_src
    if not TMA:
        k2_at, v2_at = k2_at + kv_head * k_h, v2_at + kv_head * v_h
        if not PAGED:
            k2_at, v2_at = k2_at + batch * k_b, v2_at + batch * v_b
    if not PAGED:
        k1_ptr, v1_ptr = k1_ptr + batch * k_b, v1_ptr + batch * v_b
    low = 0
    if DOCS:
        low = tl.load(begin_ptr + row)
    first_1, first_2 = tl.maximum(low, position - window_1 + 1), tl.maximum(low, position - window_2 + 1)
    own = head < group
    q = rows_of(q_ptr + kv_head * group * q_n, head, q_n, own, D, BLOCK_D)
    total = tl.zeros((GROUP, BLOCK_D), tl.float32)
    mass = tl.zeros((GROUP,), tl.float32)
    top = tl.full((GROUP,), float("-inf"), tl.float32)
    for j in tl.range(first_1, position + 1, PAIRS, flatten=FLAT):
        first = j + pair
        near = first <= position
        k1 = vectors(k1_ptr, places(first, k_s, table_ptr, k_b, PAGED, PAGE, D, near), near, D, BLOCK_D)
        product = times(q, k1)
        acc = tl.zeros((PAIRS * GROUP, BLOCK_D), tl.float32)
        part_mass = tl.zeros((PAIRS * GROUP,), tl.float32)
        part_top = tl.full((PAIRS * GROUP,), float("-inf"), tl.float32)
        for begin in tl.range(first_2, position + 1, BLOCK_N, num_stages=STAGES):
            k2 = second_tile(
                k2_at,
                k_s,
                table_ptr,
                k_b,
                batch.to(tl.int32),
                kv_head,
                begin,
                position + 1,
                D,
                BLOCK_D,
                BLOCK_N,
                TMA,
                PAGED,
                PAGE,
            )
            logits = tl.dot(product, tl.trans(k2), input_precision="tf32x3" if FP32 else "tf32")
            if begin + BLOCK_N > position + 1:
                seen = begin + tl.arange(0, BLOCK_N) <= position
                logits = tl.where(seen[None, :], logits, float("-inf"))
            new = tl.maximum(part_top, tl.max(logits, 1) * scale2)
            weights = tl.exp2(logits * scale2 - new[:, None])
            shrink = tl.exp2(part_top - new)
            part_mass = part_mass * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None]
            v2 = second_tile(
                v2_at,
                v_s,
                table_ptr,
                v_b,
                batch.to(tl.int32),
                kv_head,
                begin,
                position + 1,
                D,
                BLOCK_D,
                BLOCK_N,
                TMA,
                PAGED,
                PAGE,
            )
            acc = tl.dot(weights.to(v2.dtype), v2, acc, input_precision="tf32x3" if FP32 else "tf32")
            part_top = new
        v1 = vectors(v1_ptr, places(first, v_s, table_ptr, v_b, PAGED, PAGE, D, near), near, D, BLOCK_D)
        acc = acc * v1.to(tl.float32)
        if PAIRS > 1:
            acc, part_mass, part_top = _merged(acc, part_mass, part_top, near, PAIRS, GROUP, BLOCK_D)
        new_top = tl.maximum(top, part_top)
        keep, add = tl.exp2(top - new_top), tl.exp2(part_top - new_top)
        total = total * keep[:, None] + acc * add[:, None]
        mass = mass * keep + part_mass * add
        top = new_top
    out_head = (part % tl.cdiv(group, GROUP)) * GROUP + tl.arange(0, GROUP)
    d = tl.arange(0, BLOCK_D)
    at = (row * N + kv_head * group + out_head)[:, None] * D + d[None, :]
    out = total / mass[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(out_head < group)[:, None] & (d[None, :] < D))
    if not PAGED:
        tl.store(lse_ptr + row * N + kv_head * group + out_head, top + tl.log2(mass), mask=out_head < group)


@triton.jit
def _merged(acc, mass, top, near, PAIRS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head as one: Σ_j 2^(top_j − max top) · acc_j."""
    top = tl.where(near, top, float("-inf"))
    tops = tl.reshape(top, (PAIRS, GROUP))
    highest = tl.max(tops, 0)
    weights = tl.exp2(tops - highest[None, :])
    acc = acc * tl.reshape(weights, (PAIRS * GROUP,))[:, None]
    masses = tl.reshape(mass, (PAIRS, GROUP)) * weights
    return tl.sum(tl.reshape(acc, (PAIRS, GROUP, BLOCK_D)), 0), tl.sum(masses, 0), highest
