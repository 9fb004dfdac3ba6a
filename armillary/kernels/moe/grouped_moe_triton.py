"""Mixture of experts for many tokens: grouped GEMMs that gather tokens, activate, and put results back by themselves.

1. The router is a plain GEMM; expert_sort_triton.py chooses and sorts in two launches.
2. `experts_kernel`: a tile of an expert's rows gathered from the tokens, times gate and up, activated and weighted.
3. The same kernel: times down, written to the place of the choice.
4. `sum_kernel`: each token's experts, in the order of the choice, and the residual, so the same inputs give the same
   bits.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import (
    can_start_early,
    ceil_div,
    dense,
    early_launch,
    on,
    power_of_two,
)
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.expert_sort_triton import SortedChoices, choose_and_sort
from armillary.kernels.moe.grouped_moe_kernels_triton import experts_kernel, sum_kernel
from armillary.kernels.moe.grouped_moe_tiles import GroupedMoETile, GroupedMoETiles, tiles_for
from armillary.kernels.moe.moe import MoEWeights
from armillary.kernels.moe.packed_stack import PackedStack
from armillary.kernels.moe.packed_stack_triton import dequantised, packed_options, stored
from armillary.kernels.norm.norm import norm
from armillary.spec.model import MoE

# M tokens, H hidden, E experts, F inner size of an expert, k experts per token, P = M·k choices, T tiles

_DEQUANTISED_ROWS = 256
"""rows per expert from which packed experts are dequantised first: below, their codes become numbers at most twice, a
tile of rows each time, and experts without rows are not read (by counting bytes, not measured)"""


def grouped_moe(
    x_MH: Tensor,
    weights: MoEWeights,
    moe: MoE,
    activation: str = "silu",
    norm_H: Tensor | None = None,
    residual_MH: Tensor | None = None,
    eps: float = 1e-6,
    load: ExpertLoad | None = None,
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
    if len(x_MH) * moe.top_k >= _DEQUANTISED_ROWS * moe.num_experts:
        weights = _plain(weights, x_MH)
    weights = MoEWeights(*(dense(each) for each in weights))  # type: ignore[arg-type]
    up, down = tiles or tiles_for(x_MH, moe, packed=isinstance(weights.up_E2FH, PackedStack))
    with on(x_MH):
        choices = choose_and_sort(_logits(x_MH, weights.router_EH), weights, moe, up.rows, load)
        inner_PF = _up(x_MH, weights, moe, activation, choices, up, tma)
        out_PH = _down(inner_PF, weights, moe, choices, down, tma)
        return _sum(out_PH, residual_MH, moe.top_k)


grouped_moe_pointers = partial(grouped_moe, tma=False)


def _plain(weights: MoEWeights, template: Tensor) -> MoEWeights:
    up, down = (
        dequantised(each, template) if isinstance(each, PackedStack) else each
        for each in (weights.up_E2FH, weights.down_EHF)
    )
    return weights._replace(up_E2FH=up, down_EHF=down)


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
    weight_ENK: Tensor | PackedStack,
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
    weight, *scales = stored(weight_ENK)
    sources: tuple[Any, Any] = a, weight
    if isinstance(weight_ENK, PackedStack):
        tma = False
    elif tma:
        rows = a if gathered else TensorDescriptor.from_tensor(a, [tile.rows, tile.step])
        sources = rows, TensorDescriptor.from_tensor(weight.flatten(0, 1), [tile.columns, tile.step])
    experts_kernel[(tiles * ceil_div(N, tile.columns),)](
        *sources,
        *scales,
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
        **packed_options(weight_ENK),
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
    sum_kernel[(P // k, ceil_div(H, block))](
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
