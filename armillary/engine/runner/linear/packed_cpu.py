"""Packed int8 and int4 layers on a CPU through torch's kernels, for machines without a compiler.

The engine puts each weight into the order of the kernels and frees the model's copy. Weights that would grow by more
than 5 % (int4 in small groups, whose scales the kernels hold twice), or that no kernel takes, run as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.engine.runner.forward import Forward
from armillary.engine.runner.latent_layer import Joined
from armillary.engine.runner.layer import replace_linear_fns
from armillary.engine.runner.linear.linear_fn import LinearFn
from armillary.kernels.quantized.integer_weights_cpu import (
    DTYPES,
    Int4Weight,
    Int8Weight,
    IntegerWeight,
    agrees,
    int4_group,
    takes_int8,
)
from armillary.kernels.quantized.weight_only import nibbles
from armillary.model.quantized.formats import Int8Rows, IntGroups
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.quantized.packed_rows import PackedRows

_GROWTH = 1.05


@dataclass(frozen=True, kw_only=True)
class IntegerPart:
    """A packed matrix of a linear layer."""

    weight: IntegerWeight
    order_K: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x if self.order_K is None else x.index_select(-1, self.order_K))


class IntegerLinear:
    """x @ weightᵀ + bias for x [M, K]."""

    def __init__(self, parts: tuple[IntegerPart, ...], order_N: Tensor | None, bias: Tensor | None) -> None:
        self.parts, self._order_N, self._bias = parts, order_N, bias

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [part(x) for part in self.parts]
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        y = y if self._order_N is None else y.index_select(-1, self._order_N)
        return y if self._bias is None else y + self._bias

    @property
    def nbytes(self) -> int:
        return sum(part.weight.nbytes for part in self.parts)


def run_integers(forward: Forward, *, let_go: bool) -> None:
    """Packed layers that kernels take become `IntegerLinear`; `let_go` frees the model's own copy. Without it nothing
    is replaced: the weights would be held twice."""
    if not let_go:
        return
    dtype = next(forward.model.parameters()).dtype
    for layer in forward.layers:
        replace_linear_fns(layer, lambda linear: _replaced(linear, dtype))


def _replaced(linear: LinearFn, dtype: torch.dtype) -> LinearFn:
    if isinstance(linear, Joined):
        return linear.replaced(lambda part: _replaced(part, dtype))
    if not isinstance(linear, PackedLinear) or dtype not in DTYPES:
        return linear
    converted = [integer_part(part, dtype) for part in linear.weight.parts]
    parts = tuple(part for part in converted if part is not None)
    if not parts or len(parts) != len(converted):
        return linear
    replaced = IntegerLinear(parts, linear.weight.order_N, linear.bias)
    linear.free()
    return replaced


def integer_part(part: PackedRows, dtype: torch.dtype) -> IntegerPart | None:
    """The matrix in the order of the kernels; None where none takes it or it would take more memory."""
    weight = _int8(part, dtype) if _is_int8(part) else _int4(part, dtype)
    if weight is None or weight.nbytes > _GROWTH * part.nbytes:
        return None
    return IntegerPart(weight=weight, order_K=part.order_K)


def _is_int8(part: PackedRows) -> bool:
    """Codes of a byte with a scale per row."""
    format, scale = part.format, part.rows.get("scale")
    rows = isinstance(format, IntGroups) and format.bits == 8 and not format.zeros
    return isinstance(format, Int8Rows) or (rows and scale is not None and scale.shape[1] == 1)


def _int8(part: PackedRows, dtype: torch.dtype) -> IntegerWeight | None:
    if not takes_int8(part.num_rows, part.columns, dtype):
        return None
    codes = part.rows["codes"]
    if isinstance(part.format, Int8Rows):
        return Int8Weight(codes_NK=codes.view(torch.int8), scale_N=part.rows["maximum"].flatten() / 127)
    return Int8Weight(codes_NK=(codes ^ 128).view(torch.int8), scale_N=part.rows["scale"].flatten().float())


def _int4(part: PackedRows, dtype: torch.dtype) -> IntegerWeight | None:
    format = part.format
    if not isinstance(format, IntGroups) or format.bits != 4 or format.words:
        return None
    scale, zero = part.rows["scale"], part.rows.get("zero")
    width = part.columns if scale.shape[1] == 1 else format.group
    group = int4_group(width, part.num_rows, part.columns)
    if group is None or _packed_bytes(part, group) > _GROWTH * part.nbytes:
        return None
    if not agrees(4, part.columns, group, dtype):
        return None
    times = width // group
    spread = [None if each is None else each.float().repeat_interleave(times, dim=1) for each in (scale, zero)]
    assert spread[0] is not None
    return Int4Weight.of(nibbles(part.rows["codes"]), spread[0], spread[1], group)


def _packed_bytes(part: PackedRows, group: int) -> int:
    """Of the codes, and of a scale and an offset in bf16 per group."""
    return part.num_rows * part.columns // 2 + part.num_rows * (part.columns // group) * 4
