"""The products of a linear layer, by torch or by an algorithm of cuBLASLt that was chosen for their shape.

Forward, back to the input, and the weight's gradient: by itself, or summed over micro-batches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.requirements import has_triton
from armillary.kernels.gemm.cublaslt import CublasLtGemm

# M tokens, N outputs of a linear layer, K inputs

TORCH, APART, LIBRARY = "torch", "apart", "lt "
"""what multiplies; `apart`: the gradient in the product's format, then a pass that adds it to the sum"""
Ready = Callable[..., Tensor]
"""takes the two operands, what is added, and where the result goes"""


class GemmShape(NamedTuple):
    """A product: 'forward' x_MK·w_NKᵀ, 'back' dy_MN·w_NK, 'weight' dy_MNᵀ·x_MK, or 'sum' of the last."""

    kind: str
    M: int
    N: int
    K: int

    @property
    def key(self) -> str:
        return f"product {self.kind} {self.M}x{self.N}x{self.K}"


class Gemms:
    """By torch; rows of x and dy are tokens."""

    adds = False
    """whether adding on the way costs less than a pass of its own"""

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        """x·wᵀ, plus `add` where it is given."""
        made = x @ w_NK.t()
        return made if add is None else add + made

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        return dy @ w_NK

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        return dy_MN.t() @ x_MK

    def sum(self, total_NK: Tensor, dy_MN: Tensor, x_MK: Tensor, *, first: bool) -> None:
        """total ← dyᵀ·x, or, where it is not the first, total + dyᵀ·x: summed in total's format by the product itself
        where a library can."""
        a, b = dy_MN.t(), x_MK
        if total_NK.dtype == a.dtype:
            torch.mm(a, b, out=total_NK) if first else total_NK.addmm_(a, b)
        elif a.is_cuda:
            wide: Any = {"out_dtype": total_NK.dtype, "out": total_NK}
            torch.mm(a, b, **wide) if first else torch.addmm(total_NK, a, b, **wide)
        else:
            total_NK.copy_(a @ b) if first else total_NK.add_(a @ b)


class TunedGemms(Gemms):
    """By the algorithms of cuBLASLt that `names` gives; by torch where it gives none, or another shape comes."""

    adds = True

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._made: dict[tuple[GemmShape, torch.dtype], Ready | None] = {}

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        found = self._found("forward", x, *w_NK.shape)
        if found is None or not _whole(x, w_NK, *(() if add is None else (add,))):
            return super().forward(x, w_NK, add)
        return found(x, w_NK, add).view(*x.shape[:-1], len(w_NK))

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        found = self._found("back", dy, *w_NK.shape)
        if found is None or not _whole(dy, w_NK):
            return super().back(dy, w_NK)
        return found(dy, w_NK).view(*dy.shape[:-1], w_NK.shape[1])

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        found = self._found("weight", dy_MN, dy_MN.shape[1], x_MK.shape[1])
        if found is None or not _whole(dy_MN, x_MK):
            return super().weight(dy_MN, x_MK)
        return found(dy_MN, x_MK)

    def sum(self, total_NK: Tensor, dy_MN: Tensor, x_MK: Tensor, *, first: bool) -> None:
        name = self.names.get(_shape("sum", dy_MN, *total_NK.shape).key, TORCH)
        if name == APART and total_NK.is_cuda:
            add_(total_NK, self.weight(dy_MN, x_MK), first=first)
            return
        found = self._found("sum", dy_MN, *total_NK.shape)
        if found is None or total_NK.dtype != torch.float32 or not _whole(total_NK, dy_MN, x_MK):
            super().sum(total_NK, dy_MN, x_MK, first=first)
            return
        found(dy_MN, x_MK, None if first else total_NK, total_NK)

    def _found(self, kind: str, rows: Tensor, N: int, K: int) -> Ready | None:
        shape = _shape(kind, rows, N, K)
        at = shape, rows.dtype
        if at not in self._made:
            self._made[at] = self._make(shape, rows.dtype)
        return self._made[at]

    def _make(self, shape: GemmShape, dtype: torch.dtype) -> Ready | None:
        name = self.names.get(shape.key, TORCH)
        if name in (TORCH, APART):
            return None
        return ready(CublasLtGemm(*shape, dtype), name)  # None: another release of the library


def ready(product: CublasLtGemm, name: str) -> Ready | None:
    """A product by the algorithm that 'lt NAME' stands for."""
    algorithm = product.algorithm(name.removeprefix(LIBRARY))
    if algorithm is None:
        return None
    return lambda first, second, add=None, out=None: product(first, second, algorithm, add, out)


def add_(total: Tensor, part: Tensor, *, first: bool) -> None:
    """total ← part, or total + part; of another format."""
    if first or not has_triton(total.device):
        total.copy_(part) if first else total.add_(part)
        return
    from armillary.kernels.core.reductions_triton import add_ as add_in_one_pass

    add_in_one_pass(total, part)


def _shape(kind: str, rows: Tensor, N: int, K: int) -> GemmShape:
    return GemmShape(kind, rows.numel() // rows.shape[-1], N, K)


def _whole(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)
