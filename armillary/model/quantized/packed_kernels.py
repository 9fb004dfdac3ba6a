"""Kernels that read a packed weight, chosen for its shape and compared with plain torch."""

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
    WeightOnlyCase,
    reference,
    refuses,
)
from armillary.model.quantized.formats import lookup_table
from armillary.model.quantized.fp8_tensor_cores import fp8_matmul
from armillary.model.quantized.kernel_order import KernelOrder, for_kernels, kernel_format
from armillary.model.quantized.packed_rows import PackedRows

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
    fp8: Callable[[Tensor], Tensor] | None = None  # in place of `many`, with inputs rounded to fp8
    fused: Linear | None = None  # for one token, with what is around the product

    @classmethod
    def of(cls, part: PackedRows, dtype: torch.dtype) -> "PackedKernel | None":
        """None where no kernel takes the weight, or none agrees: then plain torch runs it."""
        case = _case(part, dtype)
        if case is None or refuses(case) is not None:
            return None
        single, few, many = (_chosen(replace(case, tokens=tokens)) for tokens in (1, _FEW, _MANY))
        if single is few is many is reference:
            return None
        ordered = for_kernels(part)
        if ordered is None:
            return None
        fused = _chosen(replace(case, tokens=1, fused=True))
        return cls(
            part=ordered,
            dtype=dtype,
            format=case.kind,
            group=case.group,
            single=single,
            few=few,
            many=many,
            fp8=fp8_matmul(ordered, case.dtype),
            fused=None if fused is reference else fused,
        )

    def takes(self, x: Tensor) -> bool:
        return x.dtype == self.dtype and x.numel() > 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.part.order_K is not None:
            x = x.index_select(-1, self.part.order_K)
        tokens = x.numel() // x.shape[-1]
        if self.fp8 is not None and tokens > MAX_TOKENS:
            return self.fp8(x)
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
        rows, format = self.part.rows, self.part.format
        zero = rows.get("divisor") if self.format == "nvfp4" else rows.get("zero")
        if isinstance(format, KernelOrder) and format.table:
            zero = lookup_table(format.table, rows["codes"].device)
        return rows["codes"], rows["scale"], zero, self.format, self.group


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
