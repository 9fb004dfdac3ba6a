"""The choice of experts for a few tokens in one launch: norm, router, and in the program that ends last the top k."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, early_launch, power_of_two
from armillary.kernels.core.row_loads_triton import load_rows
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.moe import MoEWeights
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, k experts per token

_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}


class Routed(NamedTuple):
    """What the first kernel leaves for the others."""

    weights_Mk: Tensor
    experts_Mk: Tensor
    rstd_M: Tensor  # 1 / root mean square of each token


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """Programs that have ended, of the kernel that now runs on a stream; the last one sets it back to 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def route(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    norm_H: Tensor | None,
    eps: float,
    rows: int,
    warps: int,
    load: ExpertLoad | None = None,
) -> Routed:
    (M, H), E, k = x_MH.shape, moe.num_experts, moe.top_k
    routed = Routed(
        weights_Mk=x_MH.new_empty(M, k, dtype=torch.float32),
        experts_Mk=x_MH.new_empty(M, k, dtype=torch.int32),
        rstd_M=x_MH.new_empty(M, dtype=torch.float32),
    )
    early, depth = can_start_early(x_MH.device), min(4096, max(16, power_of_two(H)))
    _route_kernel[(ceil_div(E, rows), M)](
        x_MH,
        norm_H,
        weights.router_EH,
        weights.router_bias_E,
        weights.selection_bias_E,
        x_MH.new_empty(M, E, dtype=torch.float32),
        _counter(x_MH.device, _stream(x_MH.device)),
        *routed,
        *(load or (None, None)),
        M,
        E,
        H,
        eps,
        choice_scale(moe),
        EARLY=early,
        HAS_NORM=norm_H is not None,
        HAS_BIAS=weights.router_bias_E is not None,
        HAS_LOAD=load is not None,
        **choice_options(moe),
        ROWS=rows,
        DEPTH=depth,
        num_warps=warps,
        **early_launch(early),
    )
    return routed


def choice_options(moe: MoE) -> dict[str, Any]:
    """Compile-time options of `choose`."""
    return {
        "HAS_SELECTION": moe.selection_bias,
        "SCORE": _SCORES[moe.score],
        "NORMALIZE": moe.normalize,
        "GROUPS": moe.groups,
        "TOP_GROUPS": moe.top_groups,
        "BEST": 2 if moe.selection_bias else 1,
        "TOP_K": moe.top_k,
        "K_PAD": power_of_two(moe.top_k),
        "E_PAD": power_of_two(moe.num_experts),
    }


def choice_scale(moe: MoE) -> float:
    return moe.routed_scale if moe.score != "softmax_topk" else 1.0


# --- kernels


@triton.jit
def vector(pointer, k, K):
    return tl.load(pointer + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _route_kernel(
    x_ptr,
    norm_ptr,
    router_ptr,
    bias_ptr,
    selection_ptr,
    logits_ptr,
    counter_ptr,
    weights_ptr,
    experts_ptr,
    rstd_ptr,
    counts_ptr,
    live_ptr,
    M,
    E,
    H,
    eps,
    scale,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
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
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Logits of ROWS experts for a token; the last program to end chooses for all. The first loads of the router's
    weight do not wait for the previous kernel, which never writes it."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    k = tl.arange(0, DEPTH)
    w_row = router_ptr + tl.minimum(row, E - 1)[:, None] * H
    w = load_rows(w_row, k, H, False)
    norm = vector(norm_ptr, k, H) if HAS_NORM else 1.0
    if EARLY:
        gdc_wait()
    x = vector(x_ptr + token * H, k, H)
    squares = x * x
    sums = w.to(tl.float32) * (x * norm)[None, :]
    for begin in range(DEPTH, H, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        w, x = load_rows(w_row, k, H, False), vector(x_ptr + token * H, k, H)
        squares += x * x
        if HAS_NORM:
            x = x * vector(norm_ptr, k, H)
        sums += w.to(tl.float32) * x[None, :]
    logits = tl.sum(sums, 1)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(squares, 0) / H + eps)
        logits = logits * rstd
        if tl.program_id(0) == 0:
            tl.store(rstd_ptr + token, rstd)
    if HAS_BIAS:
        logits += tl.load(bias_ptr + row, mask=row < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * E + row, logits, mask=row < E)
    tl.debug_barrier()  # all of them, before one thread says so
    ended = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if ended == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(counter_ptr, 0)
        num_live = tl.load(live_ptr) if HAS_LOAD else 0
        for each in range(0, M):
            choose(
                logits_ptr + each * E,
                None,
                selection_ptr,
                weights_ptr + each * TOP_K,
                experts_ptr + each * TOP_K,
                counts_ptr,
                each < num_live,
                E,
                scale,
                False,
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


@triton.jit
def choose(
    logits_ptr,
    bias_ptr,
    selection_ptr,
    weights_ptr,
    experts_ptr,
    counts_ptr,
    is_live,
    E,
    scale,
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
    """The top k experts of a token, and their weights; a token that `is_live` is counted."""
    e, slot = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    logits = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
    if HAS_BIAS:
        logits += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    if SCORE == 0:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORE == 1:
        scores = 1 / (1 + tl.exp(-logits))
    else:
        scores = logits
    choice = tl.where(e < E, scores, float("-inf"))
    if HAS_SELECTION:
        choice += tl.load(selection_ptr + e, mask=e < E, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # of NaN, argmax would prefer the padding
    if GROUPS > 1:
        choice = limited(choice, e, e // (E // GROUPS), GROUPS, TOP_GROUPS, BEST)
    chosen = tl.full([K_PAD], float("-inf") if SCORE == 2 else 0.0, tl.float32)
    experts = tl.zeros([K_PAD], tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        value = tl.sum(tl.where(e == best, scores, 0.0), 0)
        chosen = tl.where(slot == j, value, chosen)
        experts = tl.where(slot == j, best, experts)
        choice = tl.where(e == best, float("-inf"), choice)
    if SCORE == 2:
        chosen = tl.exp(chosen - tl.max(chosen, 0))
        chosen = chosen / tl.sum(chosen, 0)
    elif NORMALIZE:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0), 1e-20)
    tl.store(weights_ptr + slot, chosen * scale, mask=slot < TOP_K)
    tl.store(experts_ptr + slot, experts, mask=slot < TOP_K)
    if HAS_LOAD:
        ones = tl.full([K_PAD], 1, tl.int64)
        tl.atomic_add(counts_ptr + experts, ones, mask=(slot < TOP_K) & is_live, sem="relaxed")


@triton.jit
def limited(choice, e, group, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr):
    """Scores of the experts of the best groups; the others are -inf."""
    g = tl.arange(0, GROUPS)
    totals = tl.zeros([GROUPS], tl.float32)
    for each in tl.static_range(GROUPS):
        own = tl.where(group == each, choice, float("-inf"))
        total = tl.max(own, 0)
        if BEST == 2:
            total += tl.max(tl.where(e == tl.argmax(own, 0), float("-inf"), own), 0)
        totals = tl.where(g == each, total, totals)
    is_kept = tl.zeros_like(choice)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(totals, 0)
        totals = tl.where(g == best, float("-inf"), totals)
        is_kept = tl.where(group == best, 1.0, is_kept)
    return tl.where(is_kept > 0, choice, float("-inf"))
