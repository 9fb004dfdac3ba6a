"""Mixture of experts for a few tokens in three launches, none of which waits for the host.

1. expert_choice_triton.py: norm, router, and in the program that ends last the choice of experts for all tokens.
2. `_up_kernel`: gate and up rows of each token's experts, activation, and the weight of the choice.
3. `_down_kernel`: a program sums all experts of its outputs in the order of the choice, so the same inputs give the
   same bits, and adds the residual.

Rows of weights go straight into registers, as in gemm/gemv_triton.py. Two tokens with the same expert read it twice,
mostly from the cache; for more tokens than MAX_TOKENS a grouped GEMM is faster.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from armillary.kernels.core.launch import can_start_early, ceil_div, dense, early_launch, on, power_of_two
from armillary.kernels.core.row_loads_triton import load_rows
from armillary.kernels.moe.expert_choice_triton import Routed, route, vector
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.moe import MoEWeights
from armillary.kernels.moe.packed_stack import PackedStack
from armillary.kernels.moe.packed_stack_triton import packed_options, packed_products, stored
from armillary.kernels.pointwise.activation_triton import activated_pairs
from armillary.machine.accelerator import accelerator_of
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token, P = M·k pairs of both

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


def plan(hidden: int, ffn: int, itemsize: int, *, packed: bool = False, interpreted: bool = False) -> MoETiles:
    """Sizes measured on an H200 in a chain of layers, those of packed experts not yet; the interpreter's time is that
    of its programs."""
    up, down = (_depth(inputs, itemsize) for inputs in (hidden, ffn))
    if interpreted:
        return MoETiles(16, up, 1, 16, down, 1, route_rows=4)
    if packed:
        return MoETiles(4, up, max(1, up // 1024), 4, down, max(1, down // 1024))
    return MoETiles(4, up, max(1, up * itemsize // 1024), 4, down, max(1, down * itemsize // 512))


def _depth(inputs: int, itemsize: int) -> int:
    padded = max(64, power_of_two(inputs))
    return padded if padded * itemsize <= _WHOLE_BYTES else 2048 // itemsize


def small_moe(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str = "silu",
    norm_H: Tensor | None = None,
    residual_MH: Tensor | None = None,
    eps: float = 1e-6,
    load: ExpertLoad | None = None,
    tiles: MoETiles | None = None,
) -> Tensor:
    """`moe.moe_layer` in three kernels."""
    x_MH, norm_H, residual_MH = x_MH.contiguous(), dense(norm_H), dense(residual_MH)
    if not len(x_MH):
        return x_MH.clone()
    weights = MoEWeights(*(dense(each) for each in weights))  # type: ignore[arg-type]
    if tiles is None:
        sizes = x_MH.shape[1], weights.down_EHF.shape[2], x_MH.element_size()
        packed = isinstance(weights.down_EHF, PackedStack)
        tiles = plan(*sizes, packed=packed, interpreted=accelerator_of(x_MH.device) is None)
    with on(x_MH):
        routed = route(x_MH, weights, moe, norm_H, eps, tiles.route_rows, tiles.route_warps, load)
        inner_PF = _up(x_MH, weights, moe, activation, norm_H, routed, tiles)
        return _down(inner_PF, weights, moe, residual_MH, routed, tiles)


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
        *stored(weights.up_E2FH),
        weights.up_bias_E2F,
        *routed,
        inner_PF,
        H,
        F,
        TOP_K=k,
        COLUMNS=H,
        **packed_options(weights.up_E2FH),
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
        *stored(weights.down_EHF),
        weights.down_bias_EH,
        residual_MH,
        routed.weights_Mk,
        routed.experts_Mk,
        out_MH,
        H,
        F,
        COLUMNS=F,
        **packed_options(weights.down_EHF),
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


# --- experts


@triton.jit
def _up_kernel(
    x_ptr,
    norm_ptr,
    up_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    rstd_ptr,
    inner_ptr,
    H,
    F,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
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
    at_row = expert * 2 * F + row[:, None]
    if KIND != "":
        chunks = tl.zeros([ROWS, DEPTH // 32], tl.float32)
        for begin in range(0, COLUMNS, DEPTH):
            chunks += packed_products(
                up_ptr,
                scale_ptr,
                zero_ptr,
                at_row,
                x_ptr + token * COLUMNS,
                norm_ptr,
                begin,
                COLUMNS,
                SCALE_GROUP,
                HAS_NORM,
                KIND,
                ZEROS,
                ROWS,
                DEPTH,
            )
        total = tl.sum(chunks, 1)
    else:
        sums = tl.zeros([ROWS, DEPTH], tl.float32)
        for begin in range(0, H, DEPTH):
            k = begin + tl.arange(0, DEPTH)
            w = load_rows(up_ptr + at_row * H, k, H, EVEN)
            x = vector(x_ptr + token * H, k, H)
            if HAS_NORM:
                x = x * vector(norm_ptr, k, H)
            sums += w.to(tl.float32) * x[None, :]
        total = tl.sum(sums, 1)
    weight = tl.load(weights_ptr + pair)
    if HAS_NORM:
        total = total * tl.load(rstd_ptr + token)
    if SCALE_INPUT:
        total = total * weight
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * 2 * F + row).to(tl.float32)
    inner = activated_pairs(tl.reshape(total, [ROWS // 2, 2]), CLAMPED)
    if not SCALE_INPUT:
        inner = inner * weight
    at = first // 2 + tl.arange(0, ROWS // 2)
    tl.store(inner_ptr + pair * F + at, inner.to(inner_ptr.dtype.element_ty), mask=at < F)


@triton.jit
def _down_kernel(
    inner_ptr,
    down_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    H,
    F,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    SCALE_GROUP: tl.constexpr,
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
    sums = tl.zeros([ROWS, DEPTH // 32 if KIND != "" else DEPTH], tl.float32)
    biases = tl.zeros([ROWS], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        at_row = expert * H + row[:, None]
        w_row = down_ptr + at_row * F
        if KIND != "":
            for begin in range(0, COLUMNS, DEPTH):
                sums += packed_products(
                    down_ptr,
                    scale_ptr,
                    zero_ptr,
                    at_row,
                    inner_ptr + pair * F,
                    None,
                    begin,
                    COLUMNS,
                    SCALE_GROUP,
                    False,
                    KIND,
                    ZEROS,
                    ROWS,
                    DEPTH,
                )
        elif ONCE:
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
    return w.to(tl.float32) * vector(x_ptr, k, K)[None, :]
