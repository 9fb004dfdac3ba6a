"""Tokens' choices sorted by expert on the device, in two launches that depend on shapes only.

`choose_and_sort` takes the router's logits; the tiles it writes never cross an expert, so that a program of a grouped
GEMM learns with two loads which rows of which expert it has.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, power_of_two
from armillary.kernels.moe.expert_choice_triton import choice_options, choice_scale, choose
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.moe import MoEWeights
from armillary.spec.model import MoE

# M tokens, E experts, k experts per token, P = M·k choices, T tiles

_CHUNK = 1024  # choices that a program of the sort reads at once


class SortedChoices(NamedTuple):
    """Choices in the order of their experts, those of one expert in the order of their tokens."""

    weights_P: Tensor  # by choice, fp32
    experts_P: Tensor  # by choice
    order_P: Tensor  # the choice at each sorted row
    tiles_T2: Tensor  # expert and first sorted row of each tile; -1 for a tile that is not used
    ends_E: Tensor  # sorted rows of each expert end here


def most_tiles(choices: int, experts: int, rows: int) -> int:
    """Tiles that any distribution of the choices may need: each expert with choices may begin one more."""
    return ceil_div(choices, rows) + min(choices, experts)


def choose_and_sort(
    logits_ME: Tensor, weights: MoEWeights, moe: MoE, rows: int, load: ExpertLoad | None = None
) -> SortedChoices:
    """Top k of each token's logits (still without the router's bias), sorted into tiles of at most `rows`."""
    (M, E), k, new = logits_ME.shape, moe.top_k, logits_ME.new_empty
    P, tiles = M * k, most_tiles(M * k, moe.num_experts, rows)
    choices = SortedChoices(
        weights_P=new(P, dtype=torch.float32),
        experts_P=new(P, dtype=torch.int32),
        order_P=new(P, dtype=torch.int32),
        tiles_T2=new(tiles, 2, dtype=torch.int32),
        ends_E=new(E, dtype=torch.int32),
    )
    early = can_start_early(logits_ME.device)
    _choose_kernel[(M,)](
        logits_ME,
        weights.router_bias_E,
        weights.selection_bias_E,
        choices.weights_P,
        choices.experts_P,
        *(load or (None, None)),
        E,
        choice_scale(moe),
        EARLY=early,
        HAS_BIAS=weights.router_bias_E is not None,
        HAS_LOAD=load is not None,
        **choice_options(moe),
        num_warps=1,
        **early_launch(early),
    )
    _sort_kernel[(E + 1,)](
        choices.experts_P,
        choices.order_P,
        choices.tiles_T2,
        choices.ends_E,
        P,
        tiles,
        E,
        EARLY=early,
        ROWS=rows,
        E_PAD=power_of_two(E),
        CHUNK=_CHUNK,
        num_warps=4,
        **early_launch(early),
    )
    return choices


@triton.jit
def _choose_kernel(
    logits_ptr,
    bias_ptr,
    selection_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    live_ptr,
    E,
    scale,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOAD: tl.constexpr,
    HAS_SELECTION: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """The choice of one token."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    choose(
        logits_ptr + token * E,
        bias_ptr,
        selection_ptr,
        weights_ptr + token * TOP_K,
        experts_ptr + token * TOP_K,
        counts_ptr,
        token < (tl.load(live_ptr) if HAS_LOAD else 0),
        E,
        scale,
        HAS_BIAS,
        HAS_LOAD,
        HAS_SELECTION,
        SCORE,
        NORMALIZE,
        GROUPS,
        TOP_GROUPS,
        BEST,
        TOP_K,
        K_PAD,
        E_PAD,
    )


@triton.jit(do_not_specialize=["P", "T"])
def _sort_kernel(
    experts_ptr,
    order_ptr,
    tiles_ptr,
    ends_ptr,
    P,
    T,
    E,
    EARLY: tl.constexpr,
    ROWS: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program counts all choices, then writes rows and tiles of its expert; one more marks the unused tiles."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    own, e = tl.program_id(0), tl.arange(0, E_PAD)
    counts = tl.zeros([E_PAD], tl.int32)
    for begin in range(0, P, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        expert = tl.load(experts_ptr + at, mask=at < P, other=0)
        counts += tl.histogram(expert, E_PAD, mask=at < P).to(tl.int32)
    start = tl.sum(tl.where(e < own, counts, 0), 0)
    first_tile = tl.sum(tl.where(e < own, (counts + ROWS - 1) // ROWS, 0), 0)
    if own == E:
        for begin in range(first_tile, T, CHUNK):
            tile = begin + tl.arange(0, CHUNK)
            tl.store(tiles_ptr + 2 * tile, -1, mask=tile < T)
    else:
        count = tl.sum(tl.where(e == own, counts, 0), 0)
        tl.store(ends_ptr + own, start + count)
        for begin in range(0, (count + ROWS - 1) // ROWS, CHUNK):
            tile = begin + tl.arange(0, CHUNK)
            is_used = tile < (count + ROWS - 1) // ROWS
            tl.store(tiles_ptr + 2 * (first_tile + tile), own, mask=is_used)
            tl.store(tiles_ptr + 2 * (first_tile + tile) + 1, start + tile * ROWS, mask=is_used)
        for begin in range(0, P, CHUNK):
            at = begin + tl.arange(0, CHUNK)
            is_own = (tl.load(experts_ptr + at, mask=at < P, other=-1) == own).to(tl.int32)
            tl.store(order_ptr + start + tl.cumsum(is_own, 0) - 1, at, mask=is_own > 0)
            start += tl.sum(is_own, 0)
