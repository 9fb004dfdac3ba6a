"""Log-probabilities in four launches: sums and maxima of pieces, of rows, the candidates, their order; the likeliest
token alone takes two.

As in sampling, the n-th largest of many group maxima bounds the n likeliest tokens from below, and few others reach it.
A token is ranked by an integer that holds its logit's bits and, below them, its id counted from the end, so that equals
have an order. Rows where too many tokens reach the bound (masked or all equal) are searched as a whole.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.core.launch import ceil_div, is_bare, on, power_of_two

_BLOCK, _GROUPS, _CAPACITY, _BISECTIONS = 2048, 4096, 512, 20
_LEAST: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def _ranks(x, token):
    """Integers in the order of logits; of equals the lower token is the larger. -0 and 0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _value(rank):
    """The logit of a rank."""
    ordered = (rank >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _pieces(
    logits,
    tops,
    sums,
    group_tops,
    bests,
    V: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
):
    """Program (row, piece): its largest logit, the sum of exponentials, and what the likeliest are found by: the
    largest logit of each group, or the largest rank where one is requested."""
    b, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    groups = tl.max(tl.reshape(tl.where(x == x, x, float("-inf")), [IN_BLOCK, BLOCK // IN_BLOCK]), 1)
    top = tl.max(groups, 0)
    if N > 1:
        tl.store(group_tops + (b * pieces + piece) * IN_BLOCK + tl.arange(0, IN_BLOCK), groups)
    if N == 1:
        tl.store(bests + b * pieces + piece, tl.max(tl.where(token < V, _ranks(x, token), _LEAST), 0))
    tl.store(tops + b * pieces + piece, top)
    tl.store(sums + b * pieces + piece, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def _rows(
    logits,
    tokens,
    tops,
    sums,
    group_tops,
    bests,
    normalizers,
    bounds,
    arrived,
    chosen,
    values,
    ids,
    V: tl.constexpr,
    N: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BISECTIONS: tl.constexpr,
):
    """Program (row): its normaliser, the chosen token, and the likeliest or a logit that N groups reach."""
    b = tl.program_id(0)
    piece, group = tl.arange(0, PIECES_PAD), tl.arange(0, GROUPS_PAD)
    each = tl.load(tops + b * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    total = tl.load(sums + b * PIECES + piece, mask=piece < PIECES, other=0.0)
    top = tl.max(each, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(each - tl.where(top == float("-inf"), 0.0, top)), 0))
    tl.store(normalizers + b, normalizer)
    tl.store(arrived + b, 0)
    token = tl.load(tokens + b)
    x = tl.load(logits + b.to(tl.int64) * V + tl.maximum(token, 0)).to(tl.float32)
    tl.store(chosen + b, tl.where(token < 0, float("nan"), x - normalizer))
    if N == 1:
        best = tl.max(tl.load(bests + b * PIECES + piece, mask=piece < PIECES, other=_LEAST), 0)
        tl.store(values + b, _value(best) - normalizer)
        tl.store(ids + b, 0x7FFFFFFF - (best & 0x7FFFFFFF))
    if N > 1:
        groups = tl.load(group_tops + b * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
        finite = tl.sum((groups > float("-inf")).to(tl.int32), 0)
        low = tl.min(tl.where(groups > float("-inf"), groups, top), 0)
        low, high = tl.where(finite >= N, low, float("-inf")), top
        for _ in range(BISECTIONS):
            middle = tl.where(low > float("-inf"), low + 0.5 * (tl.maximum(high, low) - low), low)
            enough = tl.sum((groups >= middle).to(tl.int32), 0) >= N
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        tl.store(bounds + b, low)


@triton.jit
def _collect(logits, bounds, arrived, candidates, V: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Program (row, piece): ranks of the tokens that reach the bound."""
    b, piece = tl.program_id(0), tl.program_id(1)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + b.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    likely = (token < V) & ((x >= tl.load(bounds + b)) | (x != x))
    place = tl.atomic_add(arrived + b + tl.zeros_like(token), 1, mask=likely, sem="relaxed")
    tl.store(candidates + b * CAPACITY + place, _ranks(x, token), mask=likely & (place < CAPACITY))


@triton.jit
def _next(logits, candidates, b, size, last, V: tl.constexpr, CAPACITY: tl.constexpr):
    """The largest rank below `last`, among the candidates or all tokens of the row."""
    at = tl.arange(0, CAPACITY)
    if size <= CAPACITY:
        rank = tl.load(candidates + b * CAPACITY + at, mask=at < size, other=_LEAST)
        best = tl.max(tl.where(rank < last, rank, _LEAST), 0)
    else:
        most = tl.full([CAPACITY], _LEAST, tl.int64)
        for start in range(0, V, CAPACITY):
            there = start + at < V
            x = tl.load(logits + b.to(tl.int64) * V + start + at, mask=there, other=0.0).to(tl.float32)
            rank = _ranks(x, start + at)
            most = tl.maximum(most, tl.where(there & (rank < last), rank, _LEAST))
        best = tl.max(most, 0)
    return best


@triton.jit
def _order(
    logits, normalizers, arrived, candidates, values, ids, V: tl.constexpr, N: tl.constexpr, CAPACITY: tl.constexpr
):
    """Program (row): the likeliest, one after the other."""
    b = tl.program_id(0)
    size, normalizer = tl.load(arrived + b), tl.load(normalizers + b)
    last = tl.full([], 2**63 - 1, tl.int64)
    for i in range(N):
        last = _next(logits, candidates, b, size, last, V, CAPACITY)
        tl.store(values + b * N + i, _value(last) - normalizer)
        tl.store(ids + b * N + i, 0x7FFFFFFF - (last & 0x7FFFFFFF))


def logprobs(logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `armillary.kernels.sampling.logprobs.logprobs`."""
    return (_launched if is_bare(logits_BV) else _logprobs)(logits_BV, tokens_B, num_top)


def _launched(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, vocab = logits.shape
    num_top = min(num_top, vocab)
    logits, tokens, pieces = logits.contiguous(), tokens.contiguous(), ceil_div(vocab, _BLOCK)

    new = partial(torch.empty, dtype=torch.float32, device=logits.device)
    out = new(batch), new(batch, num_top), new(batch, num_top, dtype=torch.int64)
    if not batch:
        return out
    in_block = max(1, min(_BLOCK, _GROUPS // power_of_two(pieces)))
    groups = pieces * in_block
    tops, sums, group_tops = new(batch, pieces), new(batch, pieces), new(batch, groups)
    normalizers, bounds, arrived = new(batch), new(batch), new(batch, dtype=torch.int32)
    bests, candidates = (new(batch, count, dtype=torch.int64) for count in (pieces, _CAPACITY))
    with on(logits):
        _pieces[(batch, pieces)](
            logits, tops, sums, group_tops, bests, V=vocab, N=num_top, BLOCK=_BLOCK, IN_BLOCK=in_block
        )
        _rows[(batch,)](
            logits,
            tokens,
            tops,
            sums,
            group_tops,
            bests,
            normalizers,
            bounds,
            arrived,
            *out,
            V=vocab,
            N=num_top,
            PIECES=pieces,
            PIECES_PAD=power_of_two(pieces),
            GROUPS=groups,
            GROUPS_PAD=power_of_two(groups),
            BISECTIONS=_BISECTIONS,
        )
        if num_top > 1:
            _collect[(batch, pieces)](logits, bounds, arrived, candidates, V=vocab, BLOCK=_BLOCK, CAPACITY=_CAPACITY)
            _order[(batch,)](
                logits, normalizers, arrived, candidates, *out[1:], V=vocab, N=num_top, CAPACITY=_CAPACITY, num_warps=1
            )
    return out


_logprobs = torch.library.custom_op("armillary::logprobs", _launched, mutates_args=())


@_logprobs.register_fake
def _(logits, tokens, num_top):
    batch, count = logits.shape[0], min(num_top, logits.shape[1])
    floats = logits.new_empty(batch, dtype=torch.float32), logits.new_empty(batch, count, dtype=torch.float32)
    return (*floats, logits.new_empty(batch, count, dtype=torch.int64))
