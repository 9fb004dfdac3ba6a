"""Log-probabilities in two launches: maximum, sum and likeliest tokens of pieces, then of rows.

The likeliest are taken out one after the other: n is small, and a piece is in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.launch import ceil_div, on, power_of_two

_BLOCK = 4096


@triton.jit
def _take(values, number, at, N: tl.constexpr, N_PAD: tl.constexpr, SIZE: tl.constexpr):
    """The N largest of `values`, and the `number`s beside them, in falling order; equals in their own order."""
    place = tl.arange(0, N_PAD)
    best = tl.full([N_PAD], float("-inf"), tl.float32)
    ids = tl.full([N_PAD], -1, tl.int32)
    live = at >= 0
    for i in range(N):
        left = tl.where(live, values, float("-inf"))
        top, _ = tl.max(left, 0, return_indices=True)
        first = tl.min(tl.where(live & (left == top), at, SIZE), 0)
        best = tl.where(place == i, top, best)
        ids = tl.where(place == i, tl.sum(tl.where(at == first, number, 0), 0), ids)
        live = live & (at != first)
    return best, ids


@triton.jit
def _pieces(
    logits, tops, sums, best, best_ids, V: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, piece)."""
    b, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, BLOCK)
    token = piece * BLOCK + at
    x = tl.load(logits + b.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    tl.store(tops + b * pieces + piece, top)
    tl.store(sums + b * pieces + piece, tl.sum(tl.exp(x - safe), 0))
    if N > 0:
        values, ids = _take(x, token, tl.where(token < V, at, -1), N, N_PAD, BLOCK)
        place = (b * pieces + piece) * N_PAD + tl.arange(0, N_PAD)
        tl.store(best + place, values)
        tl.store(best_ids + place, ids)


@triton.jit
def _rows(
    logits, tokens, tops, sums, best, best_ids, chosen, values, ids,
    V: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr,
):  # fmt: skip
    """Program (row)."""
    b = tl.program_id(0)
    piece = tl.arange(0, PIECES_PAD)
    each = tl.load(tops + b * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    total = tl.load(sums + b * PIECES + piece, mask=piece < PIECES, other=0.0)
    top = tl.max(each, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    normalizer = top + tl.log(tl.sum(total * tl.exp(each - safe), 0))
    token = tl.load(tokens + b)
    x = tl.load(logits + b.to(tl.int64) * V + tl.maximum(token, 0)).to(tl.float32)
    tl.store(chosen + b, tl.where(token < 0, float("nan"), x - normalizer))
    if N > 0:
        at = tl.arange(0, PIECES_PAD * N_PAD)
        there = at < PIECES * N_PAD
        found = tl.load(best + b * (PIECES * N_PAD) + at, mask=there, other=float("-inf"))
        number = tl.load(best_ids + b * (PIECES * N_PAD) + at, mask=there, other=-1)
        likeliest, numbers = _take(found, number, tl.where(number >= 0, at, -1), N, N_PAD, PIECES_PAD * N_PAD)
        place = tl.arange(0, N_PAD)
        tl.store(values + b * N + place, likeliest - normalizer, mask=place < N)
        tl.store(ids + b * N + place, numbers.to(tl.int64), mask=place < N)


def logprobs(logits_BV: Tensor, tokens_B: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `armillary.kernels.logprobs.logprobs`."""
    return _logprobs(logits_BV, tokens_B, num_top)


@torch.library.custom_op("armillary::logprobs", mutates_args=())
def _logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, vocab = logits.shape
    num_top = min(num_top, vocab)
    logits, pieces = logits.contiguous(), ceil_div(vocab, _BLOCK)

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    out = new(torch.float32, batch), new(torch.float32, batch, num_top), new(torch.int64, batch, num_top)
    if not batch:
        return out
    width = power_of_two(num_top)
    tops, sums = new(torch.float32, batch, pieces), new(torch.float32, batch, pieces)
    best, best_ids = new(torch.float32, batch, pieces, width), new(torch.int32, batch, pieces, width)
    with on(logits):
        _pieces[(batch, pieces)](logits, tops, sums, best, best_ids, V=vocab, N=num_top, N_PAD=width, BLOCK=_BLOCK,
                                 num_warps=8)  # fmt: skip
        _rows[(batch,)](logits, tokens, tops, sums, best, best_ids, *out, V=vocab, N=num_top, N_PAD=width,
                        PIECES=pieces, PIECES_PAD=power_of_two(pieces))  # fmt: skip
    return out


@_logprobs.register_fake
def _(logits, tokens, num_top):
    batch, count = logits.shape[0], min(num_top, logits.shape[1])
    floats = logits.new_empty(batch, dtype=torch.float32), logits.new_empty(batch, count, dtype=torch.float32)
    return (*floats, logits.new_empty(batch, count, dtype=torch.int64))
