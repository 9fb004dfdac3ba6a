"""Mixture of experts for a few tokens in three launches, none of which waits for the host.

1. `_route_kernel`: norm, router, and in the program that ends last the choice of experts and the list of those chosen.
2. `_up_kernel` (one token: `_up_vector_kernel`): each chosen expert's gate and up rows times its tokens, activation and
   the weight of the choice.
3. `_down_kernel` (`_down_vector_kernel`): sums over all chosen experts of a tile of outputs, with the residual. One
   program sums all experts of its outputs, in the order of their numbers, so the same inputs give the same bits.

For a single token rows of weights go straight into registers, as in gemm/gemv_triton.py; more tokens use tensor cores,
up to 16 tokens of an expert at once.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, dense, early_launch, on, power_of_two
from armillary.kernels.moe.small_moe import MoEWeights
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token, P = M·k pairs of both

_SCORES = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}
_LIMIT: tl.constexpr = tl.constexpr(7.0)
_ALPHA: tl.constexpr = tl.constexpr(1.702)
_LANES: tl.constexpr = tl.constexpr(16)  # tokens of an expert that are multiplied at once
_WHOLE_BYTES = 8192  # largest row that is loaded at once


class MoETiles(NamedTuple):
    """Tile sizes: outputs per program, depth of the inner dim per step, warps, loads in flight."""

    up_rows: int
    up_depth: int
    up_warps: int
    down_rows: int
    down_depth: int
    down_warps: int
    stages: int = 1


def plan(tokens: int, hidden: int, ffn: int, itemsize: int) -> MoETiles:
    if tokens > 1:
        return MoETiles(64, 256 // itemsize, 4, 16, 256 // itemsize, 4, 4)
    up, down = (_depth(inputs, itemsize) for inputs in (hidden, ffn))
    return MoETiles(4, up, max(1, up * itemsize // 1024), 2, down, max(1, down * itemsize // 512))


def _depth(inputs: int, itemsize: int) -> int:
    padded = max(64, power_of_two(inputs))
    return padded if padded * itemsize <= _WHOLE_BYTES else 2048 // itemsize


class Routed(NamedTuple):
    """What the first kernel leaves for the others."""

    weights_Mk: Tensor
    experts_Mk: Tensor
    active: Tensor  # numbers of the chosen experts in ascending order; their count is the last element
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
    tiles = tiles or plan(len(x_MH), x_MH.shape[1], weights.down_EHF.shape[2], x_MH.element_size())
    with on(x_MH):
        routed = route(x_MH, weights, moe, norm_H, eps)
        inner_PF = _up(x_MH, weights, moe, activation, norm_H, routed, tiles)
        return _down(inner_PF, weights, moe, residual_MH, routed, tiles)


@cache
def _counter(device: torch.device, stream: int) -> Tensor:
    """Programs that have ended, of the kernel that now runs on a stream; the last one sets it back to 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def route(x_MH: Tensor, weights: MoEWeights, moe: MoE, norm_H: Tensor | None, eps: float) -> Routed:
    (M, H), E, k = x_MH.shape, moe.num_experts, moe.top_k
    routed = Routed(
        weights_Mk=x_MH.new_empty(M, k, dtype=torch.float32),
        experts_Mk=x_MH.new_empty(M, k, dtype=torch.int32),
        active=x_MH.new_empty(min(M * k, E) + 1, dtype=torch.int32),
        rstd_M=x_MH.new_empty(M, dtype=torch.float32),
    )
    logits_ME = x_MH.new_empty(M, E, dtype=torch.float32)
    padded = 1 if M == 1 else max(16, power_of_two(M))
    rows = 2 if M == 1 else 16
    early = can_start_early(x_MH.device)
    _route_kernel[(ceil_div(E, rows),)](
        x_MH,
        norm_H,
        weights.router_EH,
        weights.router_bias_E,
        weights.selection_bias_E,
        logits_ME,
        _counter(x_MH.device, _stream(x_MH.device)),
        *routed,
        M,
        E,
        H,
        min(M * k, E),
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
        M_PAD=padded,
        E_PAD=power_of_two(E),
        CHUNK=min(padded, max(1, 4096 // power_of_two(E))),
        ROWS=rows,
        DEPTH=min(1024 if M == 1 else 64, max(16, power_of_two(H))),
        num_warps=4,
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
    parts = ceil_div(2 * F, tiles.up_rows)
    options = {
        "EARLY": early,
        "HAS_NORM": norm_H is not None,
        "HAS_BIAS": weights.up_bias_E2F is not None,
        "SCALE_INPUT": moe.scale_input,
        "CLAMPED": activation == "swiglu_clamped",
        "EVEN": H % tiles.up_depth == 0,
        "ROWS": tiles.up_rows,
        "DEPTH": tiles.up_depth,
        "num_warps": tiles.up_warps,
    }
    tensors = (x_MH, norm_H, weights.up_E2FH, weights.up_bias_E2F, routed.weights_Mk, routed.experts_Mk)
    if M == 1:
        _up_vector_kernel[(parts, k)](*tensors, routed.rstd_M, inner_PF, H, F, **options, **early_launch(early))
        return inner_PF
    _up_kernel[(parts, len(routed.active) - 1)](
        *tensors,
        routed.rstd_M,
        routed.active,
        inner_PF,
        M,
        H,
        F,
        len(routed.active) - 1,
        TOP_K=k,
        K_PAD=power_of_two(k),
        M_PAD=max(16, power_of_two(M)),
        num_stages=tiles.stages,
        **options,
        **early_launch(early),
    )
    return inner_PF


def _down(
    inner_PF: Tensor, weights: MoEWeights, moe: MoE, residual_MH: Tensor | None, routed: Routed, tiles: MoETiles
) -> Tensor:
    (M, k), (_, H, F) = routed.weights_Mk.shape, weights.down_EHF.shape
    out_MH = inner_PF.new_empty(M, H)
    early = can_start_early(inner_PF.device)
    options = {
        "EARLY": early,
        "HAS_BIAS": weights.down_bias_EH is not None,
        "HAS_RESIDUAL": residual_MH is not None,
        "SCALE_INPUT": moe.scale_input,
        "TOP_K": k,
        "EVEN": F % tiles.down_depth == 0,
        "ROWS": tiles.down_rows,
        "DEPTH": tiles.down_depth,
        "num_warps": tiles.down_warps,
    }
    grid = (ceil_div(H, tiles.down_rows),)
    tensors = (inner_PF, weights.down_EHF, weights.down_bias_EH, residual_MH, routed.weights_Mk, routed.experts_Mk)
    if M == 1:
        _down_vector_kernel[grid](*tensors, out_MH, H, F, ONCE=tiles.down_depth >= F, **options, **early_launch(early))
        return out_MH
    _down_kernel[grid](
        *tensors,
        routed.active,
        out_MH,
        M,
        H,
        F,
        len(routed.active) - 1,
        K_PAD=power_of_two(k),
        M_PAD=max(16, power_of_two(M)),
        num_stages=tiles.stages,
        **options,
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
    active_ptr,
    rstd_ptr,
    M,
    E,
    H,
    most_active,
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
    M_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Logits of ROWS experts; the last program to end chooses."""
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, M_PAD)
    if EARLY:
        gdc_wait()
    sums = tl.zeros([M_PAD, ROWS], tl.float32)
    squares = tl.zeros([M_PAD], tl.float32)
    for begin in range(0, H, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        w = tl.load(router_ptr + row[:, None] * H + k[None, :], mask=(row < E)[:, None] & (k < H)[None, :], other=0.0)
        x = tl.load(x_ptr + m[:, None] * H + k[None, :], mask=(m < M)[:, None] & (k < H)[None, :], other=0.0)
        x = x.to(tl.float32)
        if HAS_NORM:
            squares += tl.sum(x * x, 1)
            x = x * tl.load(norm_ptr + k, mask=k < H, other=0.0).to(tl.float32)[None, :]
        if M_PAD == 1:
            sums += tl.sum(w.to(tl.float32) * x, 1)[None, :]
        elif w.dtype == tl.bfloat16:  # two parts: rounded inputs would choose other experts where scores are close
            high = x.to(tl.bfloat16)
            low = (x - high.to(tl.float32)).to(tl.bfloat16)
            sums = tl.dot(high, tl.trans(w), sums)
            sums = tl.dot(low, tl.trans(w), sums)
        else:
            sums = tl.dot(x, tl.trans(w.to(tl.float32)), sums, input_precision="ieee")
    if HAS_NORM:
        rstd = tl.rsqrt(squares / H + eps)
        sums = sums * rstd[:, None]
        if tl.program_id(0) == 0:
            tl.store(rstd_ptr + m, rstd, mask=m < M)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + row, mask=row < E, other=0.0).to(tl.float32)[None, :]
    tl.store(logits_ptr + m[:, None] * E + row[None, :], sums, mask=(m < M)[:, None] & (row < E)[None, :])
    tl.debug_barrier()  # all of them, before one thread says so
    ended = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    if ended == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        _choose(
            logits_ptr,
            selection_ptr,
            weights_ptr,
            experts_ptr,
            active_ptr,
            M,
            E,
            most_active,
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
            CHUNK,
        )


@triton.jit
def _choose(
    logits_ptr,
    selection_ptr,
    weights_ptr,
    experts_ptr,
    active_ptr,
    M,
    E,
    most_active,
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
    CHUNK: tl.constexpr,
):
    """The top k of every token, their weights, and the list of all experts that were chosen."""
    e, slot = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    times = tl.zeros([E_PAD], tl.int32)
    for begin in range(0, M, CHUNK):
        m = begin + tl.arange(0, CHUNK)
        at = logits_ptr + m[:, None] * E + e[None, :]
        logits = tl.load(at, mask=(m < M)[:, None] & (e < E)[None, :], other=0.0, cache_modifier=".cg")
        logits = tl.where((e < E)[None, :], logits, float("-inf"))
        if SCORE == 0:
            scores = tl.exp(logits - tl.max(logits, 1)[:, None])
            scores = scores / tl.sum(scores, 1)[:, None]
        elif SCORE == 1:
            scores = 1 / (1 + tl.exp(-logits))
        else:
            scores = logits
        choice = tl.where((e < E)[None, :], scores, float("-inf"))
        if HAS_SELECTION:
            choice += tl.load(selection_ptr + e, mask=e < E, other=0.0)[None, :]
        if GROUPS > 1:
            choice = _limited(choice, e // (E // GROUPS), GROUPS, TOP_GROUPS, BEST, CHUNK)
        chosen = tl.full([CHUNK, K_PAD], float("-inf") if SCORE == 2 else 0.0, tl.float32)
        experts = tl.zeros([CHUNK, K_PAD], tl.int32)
        for j in tl.static_range(TOP_K):
            best = tl.argmax(choice, 1)
            is_best = e[None, :] == best[:, None]
            value = tl.sum(tl.where(is_best, scores, 0.0), 1)
            chosen = tl.where((slot == j)[None, :], value[:, None], chosen)
            experts = tl.where((slot == j)[None, :], best[:, None], experts)
            choice = tl.where(is_best, float("-inf"), choice)
            times += tl.sum((is_best & (m < M)[:, None]).to(tl.int32), 0)
        if SCORE == 2:
            chosen = tl.exp(chosen - tl.max(chosen, 1)[:, None])
            chosen = chosen / tl.sum(chosen, 1)[:, None]
        elif NORMALIZE:
            chosen = chosen / tl.maximum(tl.sum(chosen, 1), 1e-20)[:, None]
        stored = (m < M)[:, None] & (slot < TOP_K)[None, :]
        tl.store(weights_ptr + m[:, None] * TOP_K + slot[None, :], chosen * scale, mask=stored)
        tl.store(experts_ptr + m[:, None] * TOP_K + slot[None, :], experts, mask=stored)
    is_active = (times > 0).to(tl.int32)
    tl.store(active_ptr + tl.cumsum(is_active, 0) - 1, e, mask=is_active > 0)
    tl.store(active_ptr + most_active, tl.sum(is_active, 0))


@triton.jit
def _limited(choice, group, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, CHUNK: tl.constexpr):
    """Scores of the experts of the best groups; the others are -inf."""
    g = tl.arange(0, GROUPS)
    totals = tl.zeros([CHUNK, GROUPS], tl.float32)
    for each in tl.static_range(GROUPS):
        own = tl.where((group == each)[None, :], choice, float("-inf"))
        total = tl.max(own, 1)
        if BEST == 2:
            position = tl.arange(0, choice.shape[1])
            own = tl.where(position[None, :] == tl.argmax(own, 1)[:, None], float("-inf"), own)
            total += tl.max(own, 1)
        totals = tl.where((g == each)[None, :], total[:, None], totals)
    is_kept = tl.zeros_like(choice)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(totals, 1)
        totals = tl.where(g[None, :] == best[:, None], float("-inf"), totals)
        is_kept = tl.where(group[None, :] == best[:, None], 1.0, is_kept)
    return tl.where(is_kept > 0, choice, float("-inf"))


# --- experts, a single token


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
def _rows(pointer, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + k[None, :], eviction_policy="evict_first")
    else:
        return tl.load(pointer + k[None, :], mask=k[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _up_vector_kernel(
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
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """ROWS of one chosen expert times the token."""
    if EARLY:
        gdc_launch_dependents()
    slot = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), 2 * F - 1)
    if EARLY:
        gdc_wait()
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    w_row = up_ptr + (expert * 2 * F + row[:, None]) * H
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    for begin in range(0, H, DEPTH):
        k = begin + tl.arange(0, DEPTH)
        w = _rows(w_row, k, H, EVEN)
        x = tl.load(x_ptr + k, mask=k < H, other=0.0).to(tl.float32)
        if HAS_NORM:
            x = x * tl.load(norm_ptr + k, mask=k < H, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * x[None, :]
    total = tl.sum(sums, 1)
    weight = tl.load(weights_ptr + slot)
    if HAS_NORM:
        total = total * tl.load(rstd_ptr)
    if SCALE_INPUT:
        total = total * weight
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * 2 * F + row).to(tl.float32)
    inner = _activated(tl.reshape(total, [ROWS // 2, 2]), ROWS, CLAMPED)
    if not SCALE_INPUT:
        inner = inner * weight
    at = first // 2 + tl.arange(0, ROWS // 2)
    tl.store(inner_ptr + slot * F + at, inner.to(inner_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def _down_vector_kernel(
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
    """ROWS outputs, summed over all chosen experts."""
    if EARLY:
        gdc_launch_dependents()
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(at, H - 1)
    if EARLY:
        gdc_wait()
    sums = tl.zeros([ROWS, DEPTH], tl.float32)
    biases = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        w_row = down_ptr + (expert * H + row[:, None]) * F
        if ONCE:
            sums += _products(w_row, inner_ptr + slot * F, tl.arange(0, DEPTH), F, EVEN)
        else:
            for begin in range(0, F, DEPTH):
                sums += _products(w_row, inner_ptr + slot * F, begin + tl.arange(0, DEPTH), F, EVEN)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * H + row).to(tl.float32)
            biases += bias if SCALE_INPUT else bias * tl.load(weights_ptr + slot)
    total = tl.sum(sums, 1) + biases
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < H)


@triton.jit
def _products(w_row, x_ptr, k, K, EVEN: tl.constexpr):
    w = _rows(w_row, k, K, EVEN)
    return w.to(tl.float32) * tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]


# --- experts, up to 64 tokens


@triton.jit
def _up_kernel(
    x_ptr,
    norm_ptr,
    up_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    rstd_ptr,
    active_ptr,
    inner_ptr,
    M,
    H,
    F,
    most_active,
    EARLY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
):
    """ROWS of one chosen expert times its tokens."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(1) < tl.load(active_ptr + most_active):
        expert = tl.load(active_ptr + tl.program_id(1))
        m, choice = tl.arange(0, M_PAD), tl.arange(0, K_PAD)
        valid = (m < M)[:, None] & (choice < TOP_K)[None, :]
        chosen = tl.load(experts_ptr + m[:, None] * TOP_K + choice[None, :], mask=valid, other=-1) == expert
        is_its = tl.max(chosen.to(tl.int32), 1)
        pair = m * TOP_K + tl.sum(tl.where(chosen, choice[None, :], 0), 1)
        place = tl.cumsum(is_its, 0) - 1
        count = tl.sum(is_its, 0)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        w_row = up_ptr + (expert.to(tl.int64) * 2 * F + tl.minimum(row, 2 * F - 1)[:, None]) * H
        for begin in range(0, count, _LANES):
            offset = tl.arange(0, _LANES)
            here = (place[None, :] == (begin + offset)[:, None]) & (is_its > 0)[None, :]
            pair_of_token = tl.sum(tl.where(here, pair[None, :], 0), 1)
            tokens, is_used = pair_of_token // TOP_K, begin + offset < count
            rstd = tl.load(rstd_ptr + tokens, mask=is_used & HAS_NORM, other=1.0)
            sums = tl.zeros([_LANES, ROWS], tl.float32)
            for start in range(0, H, DEPTH):
                k = start + tl.arange(0, DEPTH)
                w = _rows(w_row, k, H, EVEN)
                x = tl.load(
                    x_ptr + tokens[:, None] * H + k[None, :], mask=is_used[:, None] & (k < H)[None, :], other=0.0
                )
                if HAS_NORM:
                    scale = tl.load(norm_ptr + k, mask=k < H, other=0.0).to(tl.float32)
                    x = (x.to(tl.float32) * rstd[:, None] * scale[None, :]).to(w.dtype)
                sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
            weight = tl.load(weights_ptr + pair_of_token, mask=is_used, other=0.0)
            if SCALE_INPUT:
                sums = sums * weight[:, None]
            if HAS_BIAS:
                sums += tl.load(bias_ptr + expert * 2 * F + row, mask=row < 2 * F, other=0.0).to(tl.float32)[None, :]
            inner = _activated(tl.reshape(sums, [_LANES, ROWS // 2, 2]), ROWS, CLAMPED)
            if not SCALE_INPUT:
                inner = inner * weight[:, None]
            at = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            tl.store(
                inner_ptr + pair_of_token[:, None] * F + at[None, :],
                inner.to(inner_ptr.dtype.element_ty),
                mask=is_used[:, None] & (at < F)[None, :],
            )


@triton.jit
def _down_kernel(
    inner_ptr,
    down_ptr,
    bias_ptr,
    residual_ptr,
    weights_ptr,
    experts_ptr,
    active_ptr,
    out_ptr,
    M,
    H,
    F,
    most_active,
    EARLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    TOP_K: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    K_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
):
    """ROWS outputs of all tokens, summed over all chosen experts; tokens that did not choose an expert add zeros."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    m, choice = tl.arange(0, M_PAD), tl.arange(0, K_PAD)
    valid = (m < M)[:, None] & (choice < TOP_K)[None, :]
    experts = tl.load(experts_ptr + m[:, None] * TOP_K + choice[None, :], mask=valid, other=-1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(at, H - 1)
    steps = tl.cdiv(F, DEPTH)
    sums = tl.zeros([M_PAD, ROWS], tl.float32)
    for step in range(0, tl.load(active_ptr + most_active) * steps):
        expert = tl.load(active_ptr + step // steps)
        chosen = experts == expert
        is_its = tl.max(chosen.to(tl.int32), 1) > 0
        pair = m * TOP_K + tl.sum(tl.where(chosen, choice[None, :], 0), 1)
        k = (step % steps) * DEPTH + tl.arange(0, DEPTH)
        w = _rows(down_ptr + (expert.to(tl.int64) * H + row[:, None]) * F, k, F, EVEN)
        x = tl.load(inner_ptr + pair[:, None] * F + k[None, :], mask=is_its[:, None] & (k < F)[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
    stored = (m < M)[:, None] & (at < H)[None, :]
    if HAS_BIAS:
        for slot in tl.static_range(TOP_K):
            expert = tl.load(experts_ptr + m * TOP_K + slot, mask=m < M, other=0).to(tl.int64)
            bias = tl.load(bias_ptr + expert[:, None] * H + row[None, :]).to(tl.float32)
            if not SCALE_INPUT:
                bias = bias * tl.load(weights_ptr + m * TOP_K + slot, mask=m < M, other=0.0)[:, None]
            sums += bias
    if HAS_RESIDUAL:
        sums += tl.load(residual_ptr + m[:, None] * H + at[None, :], mask=stored, other=0.0).to(tl.float32)
    tl.store(out_ptr + m[:, None] * H + at[None, :], sums.to(out_ptr.dtype.element_ty), mask=stored)
