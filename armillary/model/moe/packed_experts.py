"""Experts whose weights stay packed: each is dequantised when tokens come to it, or kernels read all of a layer."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.kernels.moe.packed_stack import PackedStack
from armillary.kernels.quantized.weight_only import WeightFormat
from armillary.model.layers.mlp import activate
from armillary.model.moe.experts import Experts
from armillary.model.quantized.formats import Fp4, Fp8, Int8Rows, IntGroups
from armillary.model.quantized.kernel_order import as_groups, kernel_format
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.quantized.packed_rows import FusedRows, PackedRows


class PackedExperts(nn.Module):
    """The experts of a layer: `single` for `plain_dispatch`, stacks for the kernels of `kernels.moe`."""

    up_E2FH: PackedStack
    down_EHF: PackedStack
    up_bias_E2F: Tensor | None
    down_bias_EH: Tensor | None

    def __init__(self, experts: Experts, up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        super().__init__()
        self.moe, self.activation = experts.moe, experts.activation
        self.up, self.down = nn.ModuleList(up), nn.ModuleList(down)

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of both stacks; None where not all experts are in one that kernels take."""
        of_each = {_format_of(linear.weight) for linear in self.linears}
        formats = [format for format in of_each if format is not None]
        if len(formats) < len(of_each):
            return None
        group = max(format.group for format in formats)  # rows no longer than a group have one scale
        common = WeightFormat(formats[0].kind, group, any(format.zeros for format in formats))
        alike = all(format.kind == common.kind for format in formats)
        return common if alike and all(_has_groups(linear.weight, group) for linear in self.linears) else None

    def stack(self) -> None:
        """Put codes and scales of all experts beside each other; each expert's become views of them."""
        format = self.weight_format
        assert format is not None
        self.up_E2FH, self.up_bias_E2F = _stacked(self.up, format)
        self.down_EHF, self.down_bias_EH = _stacked(self.down, format)

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
    return packed if all(each.weight_format is not None for each in packed) else []


def weight_formats(stackable: Sequence[PackedExperts]) -> tuple[WeightFormat, ...]:
    """Of their stacks, each once."""
    return tuple(dict.fromkeys(format for each in stackable if (format := each.weight_format) is not None))


def _format_of(weight: FusedRows) -> WeightFormat | None:
    """None for what is not stacked; codes in words are in the order of other kernels."""
    match weight:
        case FusedRows(parts=(part,), order_N=None) if part.order_K is None:
            if isinstance(part.format, Int8Rows | Fp8):
                return kernel_format(part)
            if isinstance(part.format, IntGroups | Fp4) and not part.format.words:
                return kernel_format(part)
    return None


def _has_groups(weight: FusedRows, group: int) -> bool:
    """Whether rows have a scale for each `group` columns; 0: one."""
    (part,) = weight.parts
    num_scales = part.rows["maximum" if isinstance(part.format, Int8Rows) else "scale"].shape[1]
    return num_scales == -(-part.columns // (group or part.columns))


def _stacked(linears: nn.ModuleList, format: WeightFormat) -> tuple[PackedStack, Tensor | None]:
    """(weights, biases) of one projection."""
    parts = [_part(linear, format) for linear in linears]  # type: ignore[arg-type]
    rows = {name: torch.stack([part.rows[name] for part in parts]) for name in parts[0].rows}
    for expert, (linear, part) in enumerate(zip(linears, parts, strict=True)):
        own = {name: tensor[expert] for name, tensor in rows.items()}
        linear.weight = FusedRows(parts=(replace(part, rows=own),))
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]  # type: ignore[union-attr, operator]
    zero = rows.get("divisor" if format.kind == "nvfp4" else "zero")
    return PackedStack(rows["codes"], rows["scale"], zero, format), torch.stack(biases) if biases else None


def _part(linear: PackedLinear, format: WeightFormat) -> PackedRows:
    """An expert's weight; where some of a layer have zeros, all do."""
    part = as_groups(linear.weight.parts[0])
    if not format.zeros or "zero" in part.rows:
        return part
    assert isinstance(part.format, IntGroups)
    middle = torch.full_like(part.rows["scale"], 1 << (part.format.bits - 1), dtype=torch.uint8)
    return replace(part, format=replace(part.format, zeros=True), rows=part.rows | {"zero": middle})
