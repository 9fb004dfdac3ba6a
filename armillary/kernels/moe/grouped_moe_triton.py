"""Mixture of experts for many tokens: grouped GEMMs that gather tokens, activate, and put results back by themselves.

1. The router is a plain GEMM; expert_sort_triton.py chooses and sorts in two launches.
2. `_experts_kernel`: a tile of an expert's rows gathered from the tokens, times gate and up, activated and weighted.
3. The same kernel: times down, written to the place of the choice.
4. `_sum_kernel`: each token's experts, in the order of the choice, and the residual, so the same inputs give the same
   bits.

Weights are loaded by TMA, or by plain pointers from compute capability 8.0 on. Few rows per expert are the second
operand of the tensor cores (which take 64 rows of the first): the weight is the first, and it is read once.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import (
    can_start_early,
    ceil_div,
    dense,
    early_launch,
    first_fitting,
    on,
    power_of_two,
)
from armillary.kernels.moe.expert_sort_triton import SortedChoices, choose_and_sort
from armillary.kernels.moe.moe import MoEWeights
from armillary.kernels.norm.norm import norm
from armillary.kernels.pointwise.activation_triton import activated_pairs
from armillary.machine.accelerator import accelerator_of
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token, P = M·k choices, T tiles


class GroupedMoETile(NamedTuple):
    """Tile sizes and launch options of both GEMMs."""

    rows: int
    columns: int
    step: int  # summed elements per step of the loop
    warps: int
    stages: int  # steps whose operands are in shared memory
    swapped: bool = False  # the weight is the first operand
    group: int = 1  # tiles whose columns are next to each other in time

    def shared_bytes(self, itemsize: int) -> int:
        return self.stages * (self.rows + self.columns) * self.step * itemsize


class GroupedMoETiles(NamedTuple):
    """Of both GEMMs, with as many rows each."""

    up: GroupedMoETile
    down: GroupedMoETile

    def shared_bytes(self, itemsize: int) -> int:
        return max(tile.shared_bytes(itemsize) for tile in self)


def _both(tile: GroupedMoETile) -> GroupedMoETiles:
    return GroupedMoETiles(tile, tile)


_INTERPRETED = _both(GroupedMoETile(16, 32, 32, warps=4, stages=1, swapped=True, group=2))
_FP32 = (_both(GroupedMoETile(32, 64, 32, 4, 3)),)
# largest number of rows per expert -> tiles, best first, as timed on an H200
_TILES = {
    6: (
        GroupedMoETiles(GroupedMoETile(16, 128, 128, 4, 5, True), GroupedMoETile(16, 128, 128, 4, 3, True)),
        _both(GroupedMoETile(16, 128, 64, 4, 3)),
    ),
    20: (
        GroupedMoETiles(GroupedMoETile(32, 128, 128, 4, 5, True), GroupedMoETile(32, 128, 64, 4, 5, True)),
        _both(GroupedMoETile(32, 128, 64, 4, 3)),
    ),
    44: (
        GroupedMoETiles(GroupedMoETile(64, 256, 64, 8, 3), GroupedMoETile(64, 128, 64, 4, 3)),
        _both(GroupedMoETile(64, 128, 64, 4, 3)),
    ),
    1 << 60: (
        _both(GroupedMoETile(128, 256, 64, 8, 4, False, 8)),
        _both(GroupedMoETile(128, 128, 32, 8, 3, False, 8)),
    ),
}


def grouped_moe(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str = "silu",
    norm_H: Tensor | None = None,
    residual_MH: Tensor | None = None,
    eps: float = 1e-6,
    tiles: GroupedMoETiles | None = None,
    *,
    tma: bool = True,
) -> Tensor:
    """`moe.moe_layer` in six launches."""
    x_MH, residual_MH = x_MH.contiguous(), dense(residual_MH)
    if not len(x_MH):
        return x_MH.clone()
    if norm_H is not None:
        x_MH = norm(x_MH, norm_H, None, eps)
    weights = MoEWeights(*(dense(each) for each in weights))  # type: ignore[arg-type]
    up, down = tiles or tiles_for(x_MH, moe)
    with on(x_MH):
        choices = choose_and_sort(_logits(x_MH, weights.router_EH), weights, moe, up.rows)
        inner_PF = _up(x_MH, weights, moe, activation, choices, up, tma)
        out_PH = _down(inner_PF, weights, moe, choices, down, tma)
        return _sum(out_PH, residual_MH, moe.top_k)


grouped_moe_pointers = partial(grouped_moe, tma=False)


def tiles_for(x_MH: Tensor, moe: MoE) -> GroupedMoETiles:
    if accelerator_of(x_MH.device) is None:
        return _INTERPRETED
    rows = len(x_MH) * moe.top_k / moe.num_experts
    tiles = _FP32 if x_MH.dtype == torch.float32 else next(tiles for most, tiles in _TILES.items() if rows <= most)
    return first_fitting(x_MH.device, tiles, lambda tile: tile.shared_bytes(x_MH.element_size()))


def _logits(x_MH: Tensor, router_EH: Tensor) -> Tensor:
    """[M, E] in fp32: rounded to 16 bits, near ties would be decided by the rounding."""
    if x_MH.is_cuda and x_MH.dtype != torch.float32:
        return torch.mm(x_MH, router_EH.t(), out_dtype=torch.float32)
    return F.linear(x_MH, router_EH).float()


def _up(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str,
    choices: SortedChoices,
    tile: GroupedMoETile,
    tma: bool,
) -> Tensor:
    inner_PF = x_MH.new_empty(len(choices.order_P), weights.down_EHF.shape[2])
    _launch(
        x_MH,
        weights.up_E2FH,
        weights.up_bias_E2F,
        choices,
        inner_PF,
        tile,
        tma,
        gathered=moe.top_k,
        UP=True,
        SCALE_INPUT=moe.scale_input,
        CLAMPED=activation == "swiglu_clamped",
    )
    return inner_PF


def _down(
    inner_PF: Tensor, weights: MoEWeights, moe: MoE, choices: SortedChoices, tile: GroupedMoETile, tma: bool
) -> Tensor:
    out_PH = inner_PF.new_empty(len(inner_PF), weights.down_EHF.shape[1])
    _launch(
        inner_PF,
        weights.down_EHF,
        weights.down_bias_EH,
        choices,
        out_PH,
        tile,
        tma,
        gathered=0,
        UP=False,
        SCALE_INPUT=moe.scale_input,
        CLAMPED=False,
    )
    return out_PH


def _launch(
    a: Tensor,
    weight_ENK: Tensor,
    bias_EN: Tensor | None,
    choices: SortedChoices,
    out: Tensor,
    tile: GroupedMoETile,
    tma: bool,
    gathered: int,
    **options: Any,
) -> None:
    _, N, K = weight_ENK.shape
    early, tiles = can_start_early(a.device), len(choices.tiles_T2)
    tma = tma and K * a.element_size() % 16 == 0  # a shard may have shorter rows than the model
    sources: tuple[Any, Any] = a, weight_ENK
    if tma:
        rows = a if gathered else TensorDescriptor.from_tensor(a, [tile.rows, tile.step])
        sources = rows, TensorDescriptor.from_tensor(weight_ENK.flatten(0, 1), [tile.columns, tile.step])
    _experts_kernel[(tiles * ceil_div(N, tile.columns),)](
        *sources,
        bias_EN,
        *choices,
        out,
        tiles,
        N,
        K,
        GATHER=gathered,
        HAS_BIAS=bias_EN is not None,
        EXACT="ieee" if a.dtype == torch.float32 else "tf32",
        EARLY=early,
        TMA=tma,
        EVEN=K % tile.step == 0,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        STEP=tile.step,
        SWAPPED=tile.swapped,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
        **early_launch(early),
    )


def _sum(out_PH: Tensor, residual_MH: Tensor | None, k: int) -> Tensor:
    P, H = out_PH.shape
    sum_MH = out_PH.new_empty(P // k, H)
    early, block = can_start_early(out_PH.device), min(1024, power_of_two(H))
    _sum_kernel[(P // k, ceil_div(H, block))](
        out_PH,
        residual_MH,
        sum_MH,
        H,
        EARLY=early,
        HAS_RESIDUAL=residual_MH is not None,
        TOP_K=k,
        BLOCK=block,
        num_warps=4,
        **early_launch(early),
    )
    return sum_MH


# --- kernels


@triton.jit(do_not_specialize=["T"])
def _experts_kernel(
    a_src,
    weight_src,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    order_ptr,
    tiles_ptr,
    ends_ptr,
    out_ptr,
    T,
    N,
    K,
    GATHER: tl.constexpr,
    UP: tl.constexpr,
    SCALE_INPUT: tl.constexpr,
    CLAMPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    EARLY: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One tile of an expert's rows times COLUMNS rows of its weight. Up: rows are gathered from tokens (each has GATHER
    choices), and gate and up alternate. Down: rows are sorted already, and go to the place of their choice."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    across = tl.cdiv(N, COLUMNS)
    begin = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(T - begin, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = begin + within % height, within // height * COLUMNS
    expert = tl.load(tiles_ptr + 2 * tile)
    if expert >= 0:
        first = tl.load(tiles_ptr + 2 * tile + 1)
        row = first + tl.arange(0, ROWS)
        end = tl.load(ends_ptr + expert)
        choice = tl.load(order_ptr + row, mask=row < end, other=0)
        n = column + tl.arange(0, COLUMNS)
        LOADS_ROWS: tl.constexpr = TMA and GATHER == 0
        if LOADS_ROWS:  # the next expert's rows may be among them: they are not stored
            a_row = a_src
        else:
            source = choice // GATHER if GATHER > 0 else tl.minimum(row, end - 1)
            a_row = a_src + source.to(tl.int64)[:, None] * K
        acc = _product(
            a_row,
            weight_src,
            expert,
            first,
            n,
            column,
            N,
            K,
            EXACT,
            TMA,
            LOADS_ROWS,
            EVEN,
            ROWS,
            COLUMNS,
            STEP,
            SWAPPED,
        )
        weight = tl.load(weights_ptr + choice, mask=row < end, other=0.0)[:, None]
        if UP and SCALE_INPUT:
            acc = acc * weight
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            acc += bias if UP or SCALE_INPUT else bias * weight
        if UP:
            inner = activated_pairs(tl.reshape(acc, [ROWS, COLUMNS // 2, 2]), CLAMPED)
            if not SCALE_INPUT:
                inner = inner * weight
            at = column // 2 + tl.arange(0, COLUMNS // 2)
            out = out_ptr + row.to(tl.int64)[:, None] * (N // 2) + at[None, :]
            tl.store(out, inner.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (at < N // 2)[None, :])
        else:
            out = out_ptr + choice.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (n < N)[None, :])


@triton.jit
def _product(
    a_row,
    weight_src,
    expert,
    first,
    n,
    column,
    N,
    K,
    EXACT: tl.constexpr,
    TMA: tl.constexpr,
    LOADS_ROWS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SWAPPED: tl.constexpr,
):
    """[ROWS, COLUMNS] in fp32."""
    if not TMA:
        w_row = weight_src + (expert.to(tl.int64) * N + tl.minimum(n, N - 1))[:, None] * K
    acc = tl.zeros((COLUMNS, ROWS) if SWAPPED else (ROWS, COLUMNS), tl.float32)
    for begin in tl.range(0, K, STEP):
        k = (begin + tl.arange(0, STEP))[None, :]
        a = a_row.load([first, begin]) if LOADS_ROWS else _step(a_row, k, K, EVEN)
        w = weight_src.load([expert * N + column, begin]) if TMA else _step(w_row, k, K, EVEN)
        if SWAPPED:
            acc = tl.dot(w, tl.trans(a), acc, input_precision=EXACT)
        else:
            acc = tl.dot(a, tl.trans(w), acc, input_precision=EXACT)
    return tl.trans(acc) if SWAPPED else acc


@triton.jit
def _step(rows, k, K, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(rows + k)
    else:
        return tl.load(rows + k, mask=k < K, other=0.0)


@triton.jit
def _sum_kernel(
    out_ptr,
    residual_ptr,
    sum_ptr,
    H,
    EARLY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a token's outputs."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(out_ptr + (token * TOP_K + slot) * H + h, mask=h < H, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + token * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(sum_ptr + token * H + h, total.to(sum_ptr.dtype.element_ty), mask=h < H)
