"""Mixture of experts for a few tokens in three launches, none of which waits for the host.

1. `_route_kernel`: norm, router, and in the program that ends last the choice of experts for all tokens.
2. `_up_kernel`: gate and up rows of each token's experts, activation, and the weight of the choice.
3. `_down_kernel`: a program sums all experts of its outputs in the order of the choice, so the same inputs give the
   same bits, and adds the residual.

Rows of weights go straight into registers, as in gemm/gemv_triton.py. Two tokens with the same expert read it twice,
mostly from the cache; for more tokens than MAX_TOKENS a grouped GEMM is faster.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, dense, early_launch, on, power_of_two
from armillary.kernels.core.row_loads_triton import load_rows
from armillary.kernels.moe.small_moe import MoEWeights
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token, P = M·k pairs of both

_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}
_LIMIT: tl.constexpr = tl.constexpr(7.0)
_ALPHA: tl.constexpr = tl.constexpr(1.702)
_WHOLE_BYTES = 8192  # largest row that is loaded at once


class MoETiles(NamedTuple):
    """Tile sizes: rows of a weight per program, depth of the inner dim per step, warps."""

    up_rows: int
    up_depth: int
    up_warps: int
    down_rows: int
    down_depth: int
    down_warps: int
    route_rows: int = 1
    route_warps: int = 1


def plan(hidden: int, ffn: int, itemsize: int) -> MoETiles:
    """Sizes measured on an H200 in a chain of layers."""
    up, down = (_depth(inputs, itemsize) for inputs in (hidden, ffn))
    return MoETiles(4, up, max(1, up * itemsize // 1024), 4, down, max(1, down * itemsize // 512))


def _depth(inputs: int, itemsize: int) -> int:
    padded = max(64, power_of_two(inputs))
    return padded if padded * itemsize <= _WHOLE_BYTES else 2048 // itemsize


class Routed(NamedTuple):
    """What the first kernel leaves for the others."""

    weights_Mk: Tensor
    experts_Mk: Tensor
    rstd_M: Tensor  # 1 / root mean square of each token


def small_moe(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str = "silu",
    norm_H: Tensor | None = None,
    residual_MH: Tensor | None = None,
    eps: float = 1e-6,
    tiles: MoETiles | None = None,
) -> Tensor:
    """small_moe.small_moe in three kernels."""
    x_MH, norm_H, residual_MH = x_MH.contiguous(), dense(norm_H), dense(residual_MH)
    if not len(x_MH):
        return x_MH.clone()
    weights = MoEWeights(*(dense(each) for each in weights))  # type: ignore[arg-type]
    tiles = tiles or plan(x_MH.shape[1], weights.down_EHF.shape[2], x_MH.element_size())
    with on(x_MH):
        routed = route(x_MH, weights, moe, norm_H, eps, tiles)
        inner_PF = _up(x_MH, weights, moe, activation, norm_H, routed, tiles)
        return _down(inner_PF, weights, moe, residual_MH, routed, tiles)


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """Programs that have ended, of the kernel that now runs on a stream; the last one sets it back to 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def route(x_MH: Tensor, weights: MoEWeights, moe: MoE, norm_H: Tensor | None, eps: float, tiles: MoETiles) -> Routed:
    (M, H), E, k = x_MH.shape, moe.num_experts, moe.top_k
    routed = Routed(
        weights_Mk=x_MH.new_empty(M, k, dtype=torch.float32),
        experts_Mk=x_MH.new_empty(M, k, dtype=torch.int32),
        rstd_M=x_MH.new_empty(M, dtype=torch.float32),
    )
    early, depth = can_start_early(x_MH.device), min(4096, max(16, power_of_two(H)))
    _route_kernel[(ceil_div(E, tiles.route_rows), M)](
        x_MH,
        norm_H,
        weights.router_EH,
        weights.router_bias_E,
        weights.selection_bias_E,
        x_MH.new_empty(M, E, dtype=torch.float32),
        _counter(x_MH.device, _stream(x_MH.device)),
        *routed,
        M,
        E,
        H,
        eps,
        moe.routed_scale if moe.score != "softmax_topk" else 1.0,
        EARLY=early,
        HAS_NORM=norm_H is not None,
        HAS_BIAS=weights.router_bias_E is not None,
        HAS_SELECTION=weights.selection_bias_E is not None,
        SCORE=_SCORES[moe.score],
        NORMALIZE=moe.normalize,
        GROUPS=moe.groups,
        TOP_GROUPS=moe.top_groups,
        BEST=2 if moe.selection_bias else 1,
        TOP_K=k,
        K_PAD=power_of_two(k),
        E_PAD=power_of_two(E),
        ROWS=tiles.route_rows,
        DEPTH=depth,
        num_warps=tiles.route_warps,
        **early_launch(early),
    )
    return routed


def _up(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str,
    norm_H: Tensor | None,
    routed: Routed,
    tiles: MoETiles,
) -> Tensor:
    (M, H), k, F = x_MH.shape, moe.top_k, weights.down_EHF.shape[2]
    inner_PF = x_MH.new_empty(M * k, F)
    early = can_start_early(x_MH.device)
    _up_kernel[(ceil_div(2 * F, tiles.up_rows), M * k)](
        x_MH,
        norm_H,
        weights.up_E2FH,
        weights.up_bias_E2F,
        *routed,
        inner_PF,
        H,
        F,
        TOP_K=k,
        EARLY=early,
        HAS_NORM=norm_H is not None,
        HAS_BIAS=weights.up_bias_E2F is not None,
        SCALE_INPUT=moe.scale_input,
        CLAMPED=activation == "swiglu_clamped",
        EVEN=H % tiles.up_depth == 0,
        ROWS=tiles.up_rows,
        DEPTH=tiles.up_depth,
        num_warps=tiles.up_warps,
        **early_launch(early),
    )
    return inner_PF


def _down(
    inner_PF: Tensor, weights: MoEWeights, moe: MoE, residual_MH: Tensor | None, routed: Routed, tiles: MoETiles
) -> Tensor:
    (M, k), (_, H, F) = routed.weights_Mk.shape, weights.down_EHF.shape
    out_MH = inner_PF.new_empty(M, H)
    early = can_start_early(inner_PF.device)
    _down_kernel[(ceil_div(H, tiles.down_rows), M)](
        inner_PF,
        weights.down_EHF,
        weights.down_bias_EH,
        residual_MH,
        routed.weights_Mk,
        routed.experts_Mk,
        out_MH,
        H,
        F,
        EARLY=early,
        HAS_BIAS=weights.down_bias_EH is not None,
        HAS_RESIDUAL=residual_MH is not None,
        SCALE_INPUT=moe.scale_input,
        TOP_K=k,
        EVEN=F % tiles.down_depth == 0,
        ONCE=tiles.down_depth >= F,
        ROWS=tiles.down_rows,
        DEPTH=tiles.down_depth,
        num_warps=tiles.down_warps,
        **early_launch(early),
    )
    return out_MH


# --- routing


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
    M,
    E,
    H,
    eps,
    scale,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    norm = _vector(norm_ptr, k, H) if HAS_NORM else 1.0
    if EARLY:
        gdc_wait()
    x = _vector(x_ptr + token * H, k, H)
    squares = x * x
    sums = w.to(tl.float32) * (x * norm)[None, :]
    for begin in range(DEPTH, H, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        w, x = load_rows(w_row, k, H, False), _vector(x_ptr + token * H, k, H)
        squares += x * x
        if HAS_NORM:
            x = x * _vector(norm_ptr, k, H)
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
        for each in range(0, M):
            _choose(
                logits_ptr + each * E,
                selection_ptr,
                weights_ptr + each * TOP_K,
                experts_ptr + each * TOP_K,
                E,
                scale,
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
def _vector(pointer, k, K):
    return tl.load(pointer + k, mask=k < K, other=0.0).to(tl.float32)


@triton.jit
def _choose(
    logits_ptr,
    selection_ptr,
    weights_ptr,
    experts_ptr,
    E,
    scale,
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
    """The top k experts of a token, and their weights."""
    e, slot = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    logits = tl.load(logits_ptr + e, mask=e < E, other=float("-inf"), cache_modifier=".cg")
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
    if GROUPS > 1:
        choice = _limited(choice, e, e // (E // GROUPS), GROUPS, TOP_GROUPS, BEST)
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


@triton.jit
def _limited(choice, e, group, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr):
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


# --- experts


@triton.jit
def _activated(pair_of_token, ROWS: tl.constexpr, CLAMPED: tl.constexpr):
    """[…, ROWS] with gate and up alternating -> […, ROWS / 2]."""
    gate, up = tl.split(pair_of_token)
    if CLAMPED:
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up))
        return (up + 1.0) * gate * tl.sigmoid(gate * _ALPHA)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _up_kernel(
    x_ptr,
    norm_ptr,
    up_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    rstd_ptr,
    inner_ptr,
    H,
    F,
    TOP_K: tl.constexpr,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of one chosen expert times its token."""
    if EARLY:
        gdc_launch_dependents()
    pair = tl.program_id(1)
    token = pair // TOP_K
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), 2 * F - 1)
    if EARLY:
        gdc_wait()
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    w_row = up_ptr + (expert * 2 * F + row[:, None]) * H
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    for begin in range(0, H, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        w = load_rows(w_row, k, H, EVEN)
        x = _vector(x_ptr + token * H, k, H)
        if HAS_NORM:
            x = x * _vector(norm_ptr, k, H)
        sums += w.to(tl.float32) * x[None, :]
    total = tl.sum(sums, 1)
    weight = tl.load(weights_ptr + pair)
    if HAS_NORM:
        total = total * tl.load(rstd_ptr + token)
    if SCALE_INPUT:
        total = total * weight
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * 2 * F + row).to(tl.float32)
    inner = _activated(tl.reshape(total, [ROWS // 2, 2]), ROWS, CLAMPED)
    if not SCALE_INPUT:
        inner = inner * weight
    at = first // 2 + tl.arange(0, ROWS // 2)
    tl.store(inner_ptr + pair * F + at, inner.to(inner_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def _down_kernel(
    inner_ptr,
    down_ptr,
    bias_ptr,
    residual_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    H,
    F,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS outputs of a token, summed over its experts."""
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(at, H - 1)
    if EARLY:
        gdc_wait()
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    biases = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        w_row = down_ptr + (expert * H + row[:, None]) * F
        if ONCE:
            sums += _products(w_row, inner_ptr + pair * F, tl.arange(0, DEPTH), F, EVEN)
        else:
            for begin in range(0, F, DEPTH):
                sums += _products(w_row, inner_ptr + pair * F, begin + tl.arange(0, DEPTH), F, EVEN)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * H + row).to(tl.float32)
            biases += bias if SCALE_INPUT else bias * tl.load(weights_ptr + pair)
    total = tl.sum(sums, 1) + biases
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * H + row).to(tl.float32)
    tl.store(out_ptr + token * H + at, total.to(out_ptr.dtype.element_ty), mask=at < H)


@triton.jit
def _products(w_row, x_ptr, k, K, EVEN: tl.constexpr):
    w = load_rows(w_row, k, K, EVEN)
    return w.to(tl.float32) * _vector(x_ptr, k, K)[None, :]
