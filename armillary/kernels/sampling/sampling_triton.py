"""Sampling without sorting, in four launches: maxima of pieces, of rows, weights and candidates, the draw.

The largest values of a few hundred small groups of tokens bound the few hundred likeliest tokens from below. Those are
collected, and the thresholds of top-k and top-p are found among them; a row whose filters reach further down (large k,
flat distributions) is searched as a whole.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, is_bare, on, power_of_two
from armillary.kernels.sampling.draw_triton import draw, factor_of, least_of, mass_of, scores_of, weights_of
from armillary.kernels.sampling.sampling import Draws, Penalties

_BLOCK, _WARPS = 2048, 4
_GROUPS = 4096  # groups per row whose maxima are kept
_LARGEST = 1024  # fewest tokens that are collected, where there are as many groups
_CAPACITY = 4096
_BISECTIONS = 12
# candidates are at most this far below the largest score: weights further down are 0
_REACH: tl.constexpr = tl.constexpr(40.0)


@triton.jit
def _maxima(
    logits,
    repetition,
    presence,
    frequency,
    counts,
    prompt,
    rows,
    allowed,
    tops,
    bests,
    group_tops,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, piece): the largest score (NaN where there is one), its first token, the largest of each group."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    b, piece = tl.program_id(0), tl.program_id(1)
    source = (logits, repetition, presence, frequency, counts, prompt, rows, allowed)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    scores = scores_of(b, token, source, V, WORDS, PENALTIES, ROWS, ALLOWED)
    numbers = tl.where(scores == scores, scores, float("-inf"))
    groups = tl.max(tl.reshape(numbers, [IN_BLOCK, BLOCK // IN_BLOCK]), 1)
    tl.store(group_tops + (b * PIECES + piece) * IN_BLOCK + tl.arange(0, IN_BLOCK), groups)
    top = tl.max(groups, 0)
    broken = tl.max((scores != scores).to(tl.int32), 0) > 0
    tl.store(tops + b * PIECES + piece, tl.where(broken, float("nan"), top))
    tl.store(bests + b * PIECES + piece, tl.min(tl.where(scores == top, token, V), 0))


@triton.jit
def _rows(
    temperature,
    top_k,
    top_p,
    tops,
    bests,
    group_tops,
    row_tops,
    bounds,
    arrived,
    out,
    PIECES: tl.constexpr,
    PIECES_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    LARGEST: tl.constexpr,
    BISECTIONS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row): its largest score, the token where that decides it, and, for a row that has filters, a score that
    LARGEST groups reach or that is close below it: at least that many tokens reach it too."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    b = tl.program_id(0)
    piece, group = tl.arange(0, PIECES_PAD), tl.arange(0, GROUPS_PAD)
    each = tl.load(tops + b * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    best = tl.load(bests + b * PIECES + piece, mask=piece < PIECES, other=0)
    groups = tl.load(group_tops + b * GROUPS + group, mask=group < GROUPS, other=float("-inf"))
    top = tl.max(tl.where(each == each, each, float("-inf")), 0)
    broken = (tl.max((each != each).to(tl.int32), 0) > 0) | (top == float("-inf"))
    first = tl.min(tl.where(each == top, best, 0x7FFFFFFF), 0)
    tl.store(row_tops + b, tl.where(broken, float("nan"), top))
    tl.store(out + b, tl.where(broken, -1, first).to(tl.int64))
    tl.store(arrived + b, 0)
    filtered = (tl.load(top_k + b) > 0) | (tl.load(top_p + b).to(tl.float32) < 1.0)
    if (filtered == 0) | (tl.load(temperature + b) <= 0):
        return
    high = tl.where(top == float("inf"), tl.max(tl.where(groups == top, float("-inf"), groups), 0), top)
    reach = _REACH * tl.maximum(tl.load(temperature + b).to(tl.float32), 0.0)
    low = tl.maximum(tl.min(tl.where(groups == float("-inf"), high, groups), 0), high - reach)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        enough = tl.sum((groups >= middle).to(tl.int32), 0) >= LARGEST
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    tl.store(bounds + b, low)


@triton.jit
def _collect(
    logits,
    repetition,
    presence,
    frequency,
    counts,
    prompt,
    rows,
    allowed,
    temperature,
    top_k,
    top_p,
    min_p,
    row_tops,
    bounds,
    masses,
    arrived,
    candidates,
    candidate_ids,
    V: tl.constexpr,
    WORDS: tl.constexpr,
    PENALTIES: tl.constexpr,
    ROWS: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    CAPACITY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (row, piece): the mass of a piece after min-p, and its tokens that may be among the likeliest."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    b, piece = tl.program_id(0), tl.program_id(1)
    top = tl.load(row_tops + b)
    if (tl.load(temperature + b) <= 0) | (top != top):
        return
    source = (logits, repetition, presence, frequency, counts, prompt, rows, allowed)
    token = piece * BLOCK + tl.arange(0, BLOCK)
    factor = factor_of(temperature, b)
    weights = weights_of(scores_of(b, token, source, V, WORDS, PENALTIES, ROWS, ALLOWED), top, factor)
    mass = mass_of(weights)
    least = least_of(min_p, b)
    tl.store(masses + b * PIECES + piece, tl.sum(tl.where(mass >= least, mass, 0), 0))
    if (tl.load(top_k + b) > 0) | (tl.load(top_p + b).to(tl.float32) < 1.0):
        bound = tl.max(weights_of(tl.zeros([1], tl.float32) + tl.load(bounds + b), top, factor), 0)
        likely = (weights >= bound) & (mass > 0)
        place = tl.atomic_add(arrived + b + tl.zeros_like(token), 1, mask=likely, sem="relaxed")
        fits = likely & (place < CAPACITY)
        tl.store(candidates + b.to(tl.int64) * (CAPACITY + V) + place, weights, mask=fits)
        tl.store(candidate_ids + b * CAPACITY + place, token, mask=fits)


def sample(
    logits_BV: Tensor, draws: Draws, penalties: Penalties | None = None, allowed_BW: Tensor | None = None
) -> Tensor:
    """See `armillary.kernels.sampling.sampling.sample`; it needs memory for fp32 weights of all logits."""
    d, p = draws, penalties
    against: tuple[Tensor | None, ...] = (None,) * 6
    if p is not None:
        against = (p.repetition_B, p.presence_B, p.frequency_B, p.counts_SV, p.prompt_SV, p.rows_B)
    run: Callable[..., Tensor] = _launched if is_bare(logits_BV) else _sample
    return run(logits_BV, d.temperature_B, d.top_k_B, d.top_p_B, d.min_p_B, d.seeds_B, d.steps_B, *against, allowed_BW)


def _launched(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
    repetition: Tensor | None,
    presence: Tensor | None,
    frequency: Tensor | None,
    counts: Tensor | None,
    prompt: Tensor | None,
    rows: Tensor | None,
    allowed: Tensor | None,
) -> Tensor:
    batch, vocab = logits.shape
    new = partial(torch.empty, dtype=torch.float32, device=logits.device)
    out = new(batch, dtype=torch.int64)
    if not batch:
        return out
    pieces, logits = ceil_div(vocab, _BLOCK), logits.contiguous()
    in_block = max(1, min(_BLOCK // 2, _GROUPS // power_of_two(pieces)))
    groups = pieces * in_block
    tops, bests = new(batch, pieces), new(batch, pieces, dtype=torch.int32)
    group_tops, masses = new(batch, groups), new(batch, pieces, dtype=torch.int64)
    row_tops, bounds, arrived = new(batch), new(batch), new(batch, dtype=torch.int32)
    candidates, candidate_ids = new(batch, _CAPACITY + vocab), new(batch, _CAPACITY, dtype=torch.int32)
    in_prompt = None if prompt is None else prompt.contiguous().view(torch.uint8)
    optional = (repetition, presence, frequency, counts, in_prompt, rows, allowed)
    source = [logits, *(logits if x is None else x.contiguous() for x in optional)]
    draw_parameters = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seeds, steps)]
    early = can_start_early(logits.device)
    shape = {
        "V": vocab,
        "WORDS": 0 if allowed is None else allowed.shape[1],
        "PENALTIES": counts is not None,
        "ROWS": rows is not None,
        "ALLOWED": allowed is not None,
        "BLOCK": _BLOCK,
        "PIECES": pieces,
        "num_warps": _WARPS,
        "enable_fp_fusion": False,
        "EARLY": early,
        **early_launch(early),
    }
    padded = {"PIECES_PAD": power_of_two(pieces)}
    with on(logits):
        _maxima[(batch, pieces)](*source, tops, bests, group_tops, IN_BLOCK=in_block, **shape)
        _rows[(batch,)](
            *draw_parameters[:3],
            tops,
            bests,
            group_tops,
            row_tops,
            bounds,
            arrived,
            out,
            PIECES=pieces,
            GROUPS=groups,
            GROUPS_PAD=power_of_two(groups),
            LARGEST=_LARGEST,
            BISECTIONS=_BISECTIONS,
            EARLY=early,
            **padded,
            **early_launch(early),
        )
        _collect[(batch, pieces)](
            *source,
            *draw_parameters[:4],
            row_tops,
            bounds,
            masses,
            arrived,
            candidates,
            candidate_ids,
            CAPACITY=_CAPACITY,
            **shape,
        )
        draw[(batch,)](
            *source,
            *draw_parameters,
            row_tops,
            masses,
            arrived,
            candidates,
            candidate_ids,
            out,
            CAPACITY=_CAPACITY,
            **padded,
            **(shape | {"num_warps": 8}),
        )
    return out


_sample = torch.library.custom_op("armillary::sample", _launched, mutates_args=())


@_sample.register_fake
def _(logits, *rest):
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
