"""Kernels that read a packed weight: which of its formats they take, and the order that 4-bit codes have for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.choose_version import choose
from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.quantized.weight_only import (
    MAX_TOKENS,
    WEIGHT_ONLY,
    PackedFormat,
    WeightFormat,
    WeightOnlyCase,
    nibbles,
    reference,
    refuses,
    to_words,
)
from armillary.model.quantized.formats import Fp4, Fp8, Int8Rows, IntGroups
from armillary.model.quantized.packed_rows import PackedRows

_REORDERED = 1 << 24  # codes at a time
_FEW, _MANY = 8, MAX_TOKENS + 1  # tokens that stand for other batches in the choice

Linear = Callable[..., Tensor]  # `armillary.kernels.quantized.weight_only.reference`, or a faster one


@dataclass(frozen=True, kw_only=True)
class PackedKernel:
    """x @ weightᵀ by kernels that agreed with plain torch on this device."""

    part: PackedRows  # in the order of the kernels
    dtype: torch.dtype
    format: PackedFormat
    group: int
    single: Linear  # for one token
    few: Linear  # for up to MAX_TOKENS
    many: Linear
    fused: Linear | None  # for one token, with what is around the product

    @classmethod
    def of(cls, part: PackedRows, dtype: torch.dtype) -> "PackedKernel | None":
        """None where no kernel takes the weight, or none agrees: then plain torch runs it."""
        case = _case(part, dtype)
        if case is None or refuses(case) is not None:
            return None
        single, few, many = (_chosen(replace(case, tokens=tokens)) for tokens in (1, _FEW, _MANY))
        if single is few is many is reference:
            return None
        fused = _chosen(replace(case, tokens=1, fused=True))
        return cls(
            part=for_kernels(part),
            dtype=dtype,
            format=case.kind,
            group=case.group,
            single=single,
            few=few,
            many=many,
            fused=None if fused is reference else fused,
        )

    def takes(self, x: Tensor) -> bool:
        return x.dtype == self.dtype and x.numel() > 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.part.order_K is not None:
            x = x.index_select(-1, self.part.order_K)
        tokens = x.numel() // x.shape[-1]
        run = self.single if tokens == 1 else self.few if tokens <= MAX_TOKENS else self.many
        return run(x, *self._packed())

    @property
    def can_fuse(self) -> bool:
        return self.fused is not None and self.part.order_K is None

    def run_fused(self, x: Tensor, *around: Any) -> Tensor:
        """One token; `around` are norm, residual, epsilon, gate and bias."""
        assert self.fused is not None
        return self.fused(x, *self._packed(), *around)

    def _packed(self) -> tuple[Any, ...]:
        rows = self.part.rows
        zero = rows.get("divisor") if self.format == "nvfp4" else rows.get("zero")
        return rows["codes"], rows["scale"], zero, self.format, self.group


def kernel_format(part: PackedRows) -> WeightFormat | None:
    """None for a format that kernels do not know."""
    match part.format:
        case IntGroups(bits=4, zeros=zeros, group=group):
            format = WeightFormat("int4", group, zeros)
        case IntGroups(bits=8, zeros=zeros, group=group):
            format = WeightFormat("int8", group, zeros)
        case Int8Rows():
            return WeightFormat("int8", 0)
        case Fp8(group=group):
            format = WeightFormat("fp8", group)
        case Fp4(group=group, powers=powers):
            format = WeightFormat("mxfp4" if powers else "nvfp4", group)
        case _:
            return None
    return format._replace(group=0) if part.rows["scale"].shape[1] == 1 else format


def _case(part: PackedRows, dtype: torch.dtype) -> WeightOnlyCase | None:
    """The kernels' case for one token, or None for a format that they do not know."""
    format = kernel_format(part)
    if format is None or dtype not in DTYPES.values():
        return None
    return WeightOnlyCase(
        tokens=1,
        outputs=part.num_rows,
        inputs=part.columns,
        kind=format.kind,
        group=format.of_row(part.columns),
        zeros=format.zeros,
        dtype=next(name for name, known in DTYPES.items() if known == dtype),
        device=next(iter(part.rows.values())).device.type,
    )


@cache
def _chosen(case: WeightOnlyCase) -> Linear:
    return choose(WEIGHT_ONLY, case, deterministic=True).run


def for_kernels(part: PackedRows) -> PackedRows:
    """In the order of the kernels, in the same memory; what lies in it already stays as it is."""
    part = as_groups(part)
    if not isinstance(part.format, IntGroups | Fp4) or part.format.words or _has_bytes(part.format):
        return part
    codes = part.rows["codes"]
    words = _by_rows(lambda some: to_words(nibbles(some)), codes, part.columns)
    return replace(part, format=replace(part.format, words=True), rows=part.rows | {"codes": words})


def _has_bytes(format: IntGroups | Fp4) -> bool:
    return isinstance(format, IntGroups) and format.bits == 8


def as_groups(part: PackedRows) -> PackedRows:
    """bitsandbytes' int8 as codes of a byte with a scale per row; others as they are."""
    if not isinstance(part.format, Int8Rows):
        return part
    codes = _by_rows(lambda some: some ^ 128, part.rows["codes"], part.columns)
    rows = {"codes": codes, "scale": part.rows["maximum"].view(-1, 1) / 127}
    return replace(part, format=IntGroups(bits=8, group=part.columns, zeros=False), rows=rows)


def _by_rows(change: Callable[[Tensor], Tensor], tensor: Tensor, columns: int) -> Tensor:
    """Some rows at a time."""
    step = max(1, _REORDERED // columns)
    return torch.cat([change(tensor[row : row + step]) for row in range(0, len(tensor), step)])
