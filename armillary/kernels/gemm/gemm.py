"""The GEMMs of a linear layer, by torch or by a cuBLASLt algorithm that was chosen for their shape.

Forward, backward to the input, and the weight's gradient: by itself, or accumulated over micro-batches in fp32.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.requirements import has_triton, lacking
from armillary.kernels.gemm.cublaslt import CublasLtGemm

# M tokens, N outputs of a linear layer, K inputs

# what runs a GEMM; separate: the gradient in the operands' dtype, then a kernel that adds it to the sum; persistent:
# our own for Hopper, with tiles of that name. The values are stored with runs and choices.
TORCH, SEPARATE, LIBRARY, PERSISTENT = "torch", "apart", "lt ", "persistent "
RunGemm = Callable[..., Tensor]  # takes the two operands, the addend, and the output


class GemmShape(NamedTuple):
    """A GEMM: 'forward' x_MK·w_NKᵀ, 'back' dy_MN·w_NK, 'weight' dy_MNᵀ·x_MK, or 'sum', which accumulates 'weight'."""

    kind: str
    M: int
    N: int
    K: int

    @property
    def key(self) -> str:
        """Stored with runs and choices."""
        return f"product {self.kind} {self.M}x{self.N}x{self.K}"


class Gemms:
    """By torch; rows of x and dy are tokens."""

    fused_add = False  # whether adding inside the GEMM costs less than a kernel of its own

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        """x·wᵀ, plus `add` where it is given."""
        y = x @ w_NK.t()
        return y if add is None else add + y

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        return dy @ w_NK

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        return dy_MN.t() @ x_MK

    def sum(self, total_NK: Tensor, dy_MN: Tensor, x_MK: Tensor, *, first: bool) -> None:
        """total ← dyᵀ·x, or, where it is not the first, total + dyᵀ·x."""
        accumulate_(total_NK, dy_MN.t(), x_MK, first=first)


def accumulate_(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """total ← a @ b, or, where it is not the first, total + a @ b: accumulated in total's dtype, inside the GEMM where
    a library can."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        wide: Any = {"out_dtype": total.dtype, "out": total}
        torch.mm(a, b, **wide) if first else torch.addmm(total, a, b, **wide)
    else:
        result = torch.mm(a.to(total.dtype), b.to(total.dtype)) if a.dtype == torch.float16 else torch.mm(a, b)
        total.copy_(result) if first else total.add_(result)


class TunedGemms(Gemms):
    """By the cuBLASLt algorithms, or tiles of ours, in `names`; by torch where it has none, or for another shape."""

    fused_add = True

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self._cache: dict[tuple[GemmShape, torch.dtype], RunGemm | None] = {}

    def forward(self, x: Tensor, w_NK: Tensor, add: Tensor | None = None) -> Tensor:
        run = self._algorithm("forward", x, *w_NK.shape)
        if run is None or not _aligned(x, w_NK, *(() if add is None else (add,))):
            return super().forward(x, w_NK, add)
        return run(x, w_NK, add).view(*x.shape[:-1], len(w_NK))

    def back(self, dy: Tensor, w_NK: Tensor) -> Tensor:
        run = self._algorithm("back", dy, *w_NK.shape)
        if run is None or not _aligned(dy, w_NK):
            return super().back(dy, w_NK)
        return run(dy, w_NK).view(*dy.shape[:-1], w_NK.shape[1])

    def weight(self, dy_MN: Tensor, x_MK: Tensor) -> Tensor:
        run = self._algorithm("weight", dy_MN, dy_MN.shape[1], x_MK.shape[1])
        if run is None or not _aligned(dy_MN, x_MK):
            return super().weight(dy_MN, x_MK)
        return run(dy_MN, x_MK)

    def sum(self, total_NK: Tensor, dy_MN: Tensor, x_MK: Tensor, *, first: bool) -> None:
        name = self.names.get(_shape("sum", dy_MN, *total_NK.shape).key, TORCH)
        if name == SEPARATE and total_NK.is_cuda:
            add_(total_NK, self.weight(dy_MN, x_MK), first=first)
            return
        run = self._algorithm("sum", dy_MN, *total_NK.shape)
        if run is None or total_NK.dtype != torch.float32 or not _aligned(total_NK, dy_MN, x_MK):
            super().sum(total_NK, dy_MN, x_MK, first=first)
            return
        run(dy_MN, x_MK, None if first else total_NK, total_NK)

    def _algorithm(self, kind: str, rows: Tensor, N: int, K: int) -> RunGemm | None:
        shape = _shape(kind, rows, N, K)
        key = shape, rows.dtype
        if key not in self._cache:
            self._cache[key] = _run_of(self.names.get(shape.key, TORCH), shape, rows)
        return self._cache[key]


def _run_of(name: str, shape: GemmShape, rows: Tensor) -> RunGemm | None:
    """None: torch."""
    if name in (TORCH, SEPARATE):
        return None
    if name.startswith(PERSISTENT):
        return persistent(name, shape, rows)
    return with_algorithm(CublasLtGemm(*shape, rows.dtype), name)


def persistent(name: str, shape: GemmShape, rows: Tensor) -> RunGemm | None:
    """Our GEMM with the tiles 'persistent TILES'; None for what it does not do, and for chips that it is not for."""
    if lacking(("triton", "wgmma"), rows.device.type) or shape.kind != "forward" or shape.N % 8 or shape.K % 8:
        return None
    from armillary.kernels.gemm.large_linear_wgmma import TILES, run_tiles

    tiles = name.removeprefix(PERSISTENT)
    if tiles not in TILES or rows.dtype not in (torch.bfloat16, torch.float16):
        return None
    return lambda x, w_NK, add=None: run_tiles(x, w_NK, None, "none", add, tiles)


def with_algorithm(gemm: CublasLtGemm, name: str) -> RunGemm | None:
    """A GEMM by the algorithm 'lt NAME'; None where this release of the library does not have it."""
    algorithm = gemm.algorithm(name.removeprefix(LIBRARY))
    if algorithm is None:
        return None
    return lambda first, second, add=None, out=None: gemm(first, second, algorithm, add, out)


def add_(total: Tensor, part: Tensor, *, first: bool) -> None:
    """total ← part, or total + part; `part` may have another dtype."""
    if first or not has_triton(total.device):
        total.copy_(part) if first else total.add_(part)
        return
    from armillary.kernels.core.reductions_triton import add_ as add_in_one_pass

    add_in_one_pass(total, part)


def _shape(kind: str, rows: Tensor, N: int, K: int) -> GemmShape:
    return GemmShape(kind, rows.numel() // rows.shape[-1], N, K)


def _aligned(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)
