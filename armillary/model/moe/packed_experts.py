"""Experts whose weights stay packed: each is dequantised when tokens come to it, or kernels read all of a layer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.kernels.moe.fp4_stack import GROUP, Fp4Stack
from armillary.model.layers.mlp import activate
from armillary.model.moe.experts import Experts
from armillary.model.quantized.formats import Fp4
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.quantized.packed_rows import FusedRows


class PackedExperts(nn.Module):
    """The experts of a layer: `single` for `plain_dispatch`, stacks for the kernels of `kernels.moe`."""

    up_E2FH: Fp4Stack
    down_EHF: Fp4Stack
    up_bias_E2F: Tensor | None
    down_bias_EH: Tensor | None

    def __init__(self, experts: Experts, up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.moe, self.activation = experts.moe, experts.activation
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

    @property
    def can_stack(self) -> bool:
        """Whether all are in MXFP4, as kernels take them."""
        return all(_is_mxfp4(linear.weight) for linear in self.linears)

    def stack(self) -> None:
        """Put codes and scales of all experts beside each other; each expert's become views of them."""
        self.up_E2FH, self.up_bias_E2F = _stacked(self.up)
        self.down_EHF, self.down_bias_EH = _stacked(self.down)

    @property
    def linears(self) -> Sequence[PackedLinear]:
        return (*self.up, *self.down)  # type: ignore[return-value]

    def single(self, x_MH: Tensor, expert: int) -> Tensor:
        if not len(x_MH):
            return x_MH
        inner: Tensor = self.up[expert](x_MH)
        return self.down[expert](activate(inner, self.activation, gated=True))  # type: ignore[no-any-return]


def stackable_experts(model: nn.Module) -> list[PackedExperts]:
    """The packed experts of every layer, where kernels may read each layer as one stack; none where one cannot be."""
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    return packed if all(each.can_stack for each in packed) else []


def _is_mxfp4(weight: FusedRows) -> bool:
    match weight:
        case FusedRows(parts=(part,), order_N=None):
            return part.order_K is None and part.format == Fp4(group=GROUP, powers=True)
    return False


def _stacked(linears: nn.ModuleList) -> tuple[Fp4Stack, Tensor | None]:
    """(weights, biases) of one projection."""
    rows = [linear.weight.parts[0].rows for linear in linears]  # type: ignore[union-attr]
    stack = Fp4Stack(*(torch.stack([each[name] for each in rows]) for name in ("codes", "scale")))  # type: ignore[index]
    for linear, codes, scale in zip(linears, *stack, strict=True):
        part = replace(linear.weight.parts[0], rows={"codes": codes, "scale": scale})  # type: ignore[union-attr, index]
        linear.weight = FusedRows(parts=(part,))
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]  # type: ignore[union-attr, operator]
    return stack, torch.stack(biases) if biases else None
