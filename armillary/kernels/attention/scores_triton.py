"""What the forward and backward kernels of attention share: tiles loaded, their scores under every mask, and the range
of keys that a block of queries sees."""

import triton
import triton.language as tl

# B batch, T queries, S keys, N query heads, K KV heads, D head dim


@triton.jit
def scores(
    qk,
    query,
    key,
    query_doc,
    key_doc,
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
    BOUNDED: tl.constexpr = True,
):
    """Raw q·k to scores in base-2 units, -inf where not visible. query, key and their documents broadcast to qk.
    BOUNDED: also beyond the ends of the sequences, which the backward pass has no need of: log-sum-exps are infinite
    there, keys are zero, and rows are not stored."""
    qk = qk * scale2
    if CAPPED:  # scale2 is then scale / softcap, and softcap in base-2 units
        qk = (2 * tl.sigmoid(2 * qk) - 1) * softcap
    distance = query + shift - key
    if SLOPES:
        qk = qk - slope * distance.to(tl.float32)
    if MASKED:
        seen = (key < S) & (query < T) if BOUNDED else distance == distance
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW:
            seen = seen & (distance < window)
        if DOCS:
            seen = seen & (query_doc == key_doc)
        qk = tl.where(seen, qk, float("-inf"))
    return qk


@triton.jit
def place(HEADS_FIRST: tl.constexpr, heads):
    """(block, head, batch) of a program: blocks of one head after another, or with HEADS_FIRST block after block of all
    heads, so that what takes longest starts first everywhere."""
    if HEADS_FIRST:
        block, head, batch = tl.program_id(1), tl.program_id(0) % heads, tl.program_id(0) // heads
    else:
        block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    return block, head, batch


@triton.jit
def rows(base, stride, first, limit, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile of rows from `first` on; rows from `limit` on and columns from D on are zero. Only the base pointer moves,
    so offsets stay the same from tile to tile and cost few registers."""
    index, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = base + first.to(tl.int64) * stride + (index[:, None] * stride + d[None, :])
    if BLOCK_D != D:
        x = tl.load(at, mask=(index[:, None] < limit - first) & (d[None, :] < D), other=0.0)
    elif MASKED:
        x = tl.load(at, mask=index[:, None] < limit - first, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def tile(
    source,
    stride,
    batch,
    head,
    first,
    limit,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows of one head by TMA, from a descriptor of [B, T, heads, D]; or from a pointer to the head."""
    if TMA:  # the compiler also visits code after a return, hence the else
        x = source.load([batch, first, head, 0]).reshape(BLOCK, BLOCK_D)
    else:
        x = rows(source, stride, first, limit, D, BLOCK_D, BLOCK, MASKED)
    return x


@triton.jit
def key_range(
    block,
    begin_ptr,
    run_ptr,
    row,
    T,
    S,
    window,
    shift,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Key blocks of a query block: from the first to the last that is at least partly visible, and the range between
    that is fully visible."""
    first_query, last_query = block * BLOCK_M, tl.minimum(block * BLOCK_M + BLOCK_M, T) - 1
    begin, full_begin = 0, 0
    if WINDOW:
        begin = tl.maximum(0, first_query + shift - window + 1)
        full_begin = tl.maximum(0, last_query + shift - window + 1)
    if DOCS:
        begin = tl.maximum(begin, tl.load(begin_ptr + row + first_query))
        full_begin = tl.maximum(full_begin, tl.load(run_ptr + row + last_query))
        if not CAUSAL:  # documents also end later: all blocks need the mask
            full_begin = S
    end, diagonal = S, S
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, last_query + shift + 1))
        diagonal = tl.maximum(0, tl.minimum(S, first_query + shift + 1))
    last = tl.cdiv(end, BLOCK_N)
    first = tl.minimum(begin // BLOCK_N, last)
    full_first = tl.maximum(first, tl.minimum(tl.cdiv(full_begin, BLOCK_N), last))
    full_last = tl.maximum(full_first, diagonal // BLOCK_N)
    return first, full_first, full_last, last
