"""Experts of a layer whose weights are packed, stacked. Codes lie in the order of their columns, as they are published:
a byte each, or two columns in a byte with the first in the low nibble."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.quantized.weight_only import (
    EIGHT_BITS,
    PackedFormat,
    WeightFormat,
    WeightOnlyCase,
    dequantised,
    random_weight,
    weight_bytes,
)

# E experts, N outputs, K inputs, G groups of inputs with one scale each

CHUNK = 32
"""columns whose sum kernels multiply by one scale"""


class PackedStack(NamedTuple):
    """Weights [E, N, K]."""

    codes_ENB: Tensor  # uint8
    scale_ENG: Tensor
    zero_ENG: Tensor | None  # of int4 and int8, none: the middle; of nvfp4 the divisors [E, N, 1] of the scales
    format: WeightFormat

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, width = self.codes_ENB.shape
        return experts, rows, width if self.format.kind in EIGHT_BITS else 2 * width

    @property
    def group(self) -> int:
        return self.format.of_row(self.shape[2])

    @property
    def itemsize(self) -> float:
        """Bytes of a weight."""
        experts, rows, columns = self.shape
        tensors = (self.codes_ENB, self.scale_ENG, self.zero_ENG)
        return sum(each.nbytes for each in tensors if each is not None) / (experts * rows * columns)

    def contiguous(self) -> "PackedStack":
        zero_ENG = None if self.zero_ENG is None else self.zero_ENG.contiguous()
        return PackedStack(self.codes_ENB.contiguous(), self.scale_ENG.contiguous(), zero_ENG, self.format)

    def select(self, experts_M: Tensor, dtype: torch.dtype) -> Tensor:
        """[M, N, K] of some experts."""
        _, rows, columns = self.shape
        codes, scale = self.codes_ENB[experts_M].flatten(0, 1), self.scale_ENG[experts_M].flatten(0, 1)
        zero = None if self.zero_ENG is None else self.zero_ENG[experts_M].flatten(0, 1)
        if dtype == torch.float64 and scale.is_floating_point():
            scale = scale.double()
        weight = dequantised(codes, scale, zero, self.format.kind, self.group, words=False)
        return weight.to(dtype).view(-1, rows, columns)


def select_experts(weight: Tensor | PackedStack, experts_M: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, N, K]"""
    return weight.select(experts_M, dtype) if isinstance(weight, PackedStack) else weight[experts_M]


def unstackable(format: WeightFormat, columns: int) -> str | None:
    """Why kernels do not take stacks of rows of so many columns, or None."""
    group = format.of_row(columns)
    if columns % CHUNK:
        return f"experts in {format.kind} have rows of whole groups of {CHUNK}"
    if group % CHUNK and (format.kind, group) != ("nvfp4", CHUNK // 2):
        return f"experts in {format.kind} have groups of {group} columns"
    return None


def random_stack(format: WeightFormat, shape: tuple[int, int, int], generator: torch.Generator) -> PackedStack:
    experts, rows, columns = shape
    case = _as_weight(format, experts * rows, columns, generator.device.type)
    codes, scale, zero = random_weight(case, generator)
    if format.kind not in EIGHT_BITS:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    codes, scale = (each.view(experts, rows, -1) for each in (codes, scale))
    return PackedStack(codes, scale, None if zero is None else zero.view(experts, rows, -1), format)


def rows_bytes(format: WeightFormat, rows: int, columns: int) -> int:
    """Codes, scales and zeros of so many rows."""
    return weight_bytes(_as_weight(format, rows, columns))


def _as_weight(format: WeightFormat, rows: int, columns: int, device: str = "cpu") -> WeightOnlyCase:
    kind, group, zeros = format.kind, format.of_row(columns), format.zeros
    return WeightOnlyCase(tokens=1, outputs=rows, inputs=columns, kind=kind, group=group, zeros=zeros, device=device)


def reference(stack: PackedStack, template: Tensor) -> Tensor:
    """[E, N, K] in the dtype of `template`: for many tokens, whose GEMMs take far longer than that."""
    return stack.select(torch.arange(stack.shape[0], device=template.device), template.dtype)


@dataclass(frozen=True, kw_only=True)
class StackCase(Case):
    """One projection of all experts of a layer."""

    experts: int
    rows: int
    columns: int
    kind: PackedFormat
    group: int = 0
    zeros: bool = False

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.kind, self.group, self.zeros)


def inputs(case: StackCase, generator: torch.Generator) -> tuple[object, ...]:
    stack = random_stack(case.format, (case.experts, case.rows, case.columns), generator)
    return stack, torch.zeros(1, dtype=case.torch_dtype, device=generator.device)


def work(case: StackCase) -> OpWork:
    numbers = case.experts * case.rows * case.columns
    read = rows_bytes(case.format, case.experts * case.rows, case.columns)
    return OpWork(flops=2.0 * numbers, bytes=float(read + case.torch_dtype.itemsize * numbers))


def refuses(case: StackCase) -> str | None:
    return unstackable(case.format, case.columns)


_QWEN = StackCase(experts=128, rows=1536, columns=2048, kind="int4", group=128)
DEQUANTISE_STACK = Op(
    name="dequantise_stack",
    reference=reference,
    versions=(in_triton("moe.packed_stack_triton", "dequantised", refuses=refuses),),
    inputs=inputs,
    work=work,
    small=lambda case: replace(case, experts=min(case.experts, 2), rows=min(case.rows, 64)),
    cases={
        "qwen3-30b-a3b, int4": _QWEN,
        "qwen3-30b-a3b, fp8 blocks": replace(_QWEN, kind="fp8"),
        "gpt-oss-20b, mxfp4": StackCase(experts=32, rows=5760, columns=2880, kind="mxfp4", group=32),
    },
)
