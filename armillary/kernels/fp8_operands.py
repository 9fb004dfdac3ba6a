"""Operands of fp8 products for training, made once for all products of a matrix: as it stands, and transposed.

A product sums along the last dim of both operands, so a matrix that is multiplied forward and backward is needed both
ways; each way has one scale, or one for each of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.fp8_linear import TINY
from armillary.kernels.launch import as_rows, ceil_div, dense, num_programs, on, power_of_two

# M rows, K columns

ALIGN = 16
"""the products want the summed dim in multiples of it: tokens, where a gradient is made"""
_WIDEST = 16384
"""columns of a row that a norm's statistics are made of at once"""
_LOOK = (32, 256, 128)
"""rows and columns of a tile when largest values are looked for, and rows that a program goes over"""
_TILES = {"plain": (128, 64, 4), "norm": (128, 64, 4), "activation": (128, 64, 8), "backward": (128, 64, 4)}
"""rows, columns and warps of a tile that is cast: as much as registers hold of what it is made of"""


class Scaled(NamedTuple):
    """An operand: `values` · `scale` are the numbers."""

    values: Tensor
    """fp8, rows along the summed dim"""
    scale: Tensor
    """[rows, 1], or one number []"""


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A matrix [M, K] for products on either side."""

    rows: Scaled | None
    """[M, K], to sum over K"""
    turned: Scaled | None
    """[K, M'], to sum over M; M' is M in whole sixteens, with zeros"""
    amax: tuple[Tensor, Tensor]
    """the largest values that made its scales, of rows and of columns: with these it is made again in one pass"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an operand is made of."""

    x: Tensor
    """[M, ·]"""
    kind: str = "plain"
    """'plain': x; 'norm' of x; 'activation' of x; 'backward' of an activation at x"""
    dy: Tensor | None = None
    """of a backward pass: gradient of what the activation gave"""
    activation: str = "none"
    """by name"""
    gated: bool = False
    """gate and up alternate in x"""
    weight: Tensor | None = None
    """of a norm"""
    bias: Tensor | None = None
    """of a norm"""
    plus_one: bool = False
    """a norm multiplies by 1 + weight"""
    mean: Tensor | None = None
    """of each row, for a layer norm that is known already"""
    rstd: Tensor | None = None
    """1 / deviation of each row, for a norm that is known already"""
    rms: bool = True
    """an RMS norm, not a layer norm"""
    eps: float = 0.0
    """of a norm"""

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of what is made."""
        rows, columns = self.x.shape
        return rows, columns // 2 if self.kind == "activation" and self.gated else columns

    def tensors(self) -> tuple[Tensor | None, ...]:
        """x, dy, weight, bias, mean, rstd as kernels take them."""
        x = as_rows(self.x)
        return (x, x if self.dy is None else as_rows(self.dy), dense(self.weight), dense(self.bias),
                x if self.mean is None else self.mean, x if self.rstd is None else self.rstd)  # fmt: skip

    def flags(self) -> dict[str, Any]:
        return {
            "KIND": self.kind, "ACT": self.activation, "GATED": self.gated, "RMS": self.rms,
            "WEIGHT": self.weight is not None, "PLUS_ONE": self.plus_one, "BIAS": self.bias is not None,
        }  # fmt: skip


def make_operand(
    source: Source, dtype: torch.dtype, scaling: str, *, rows: bool = True, turned: bool = True,
    amax: tuple[Tensor, Tensor] | None = None,
) -> Operand:  # fmt: skip
    """Both ways, or one; `amax` where it is known from before."""
    amax = largest(source, scaling) if amax is None else amax
    M, K = source.shape
    padded = ceil_div(M, ALIGN) * ALIGN
    x, by_row = source.x, scaling == "row"
    q = torch.empty(M if rows else 0, K, dtype=dtype, device=x.device)
    q_turned = torch.empty(K if turned else 0, padded, dtype=dtype, device=x.device)
    most = torch.finfo(dtype).max
    scales = [torch.empty_like(each) for each in amax] if by_row else [torch.empty_like(amax[1])] * 2
    if not M or not K:
        for scale in scales:
            scale.fill_(TINY / most)
    else:
        _cast(source, amax, q, q_turned, scales, most, by_row=by_row)
    row_scale, column_scale = (scale[:, None] if by_row else scale for scale in scales)
    return Operand(rows=Scaled(q, row_scale) if rows else None,
                   turned=Scaled(q_turned, column_scale) if turned else None, amax=amax)  # fmt: skip


def _cast(
    source: Source, amax: tuple[Tensor, Tensor], q: Tensor, q_turned: Tensor, scales: list[Tensor], most: float, *,
    by_row: bool,
) -> None:  # fmt: skip
    from armillary.kernels.fp8_operands_triton import cast_kernel

    (M, K), tensors, padded = source.shape, source.tensors(), q_turned.shape[1]
    block_m, block_k, warps = _TILES[source.kind]
    x, dy = tensors[:2]
    assert x is not None and dy is not None
    with on(x):
        cast_kernel[(ceil_div(padded, block_m) * ceil_div(K, block_k),)](
            *tensors, *amax, q, q_turned, *scales, M, K, padded, x.stride(0), dy.stride(0), **source.flags(),
            BY_ROW=by_row, ROWS=bool(q.numel()), TURNED=bool(q_turned.numel()), LARGEST=most, BLOCK_M=block_m,
            BLOCK_K=block_k, num_warps=warps,
        )  # fmt: skip


def largest(source: Source, scaling: str) -> tuple[Tensor, Tensor]:
    """max |·| of each row and of each column, or of all (one number, twice)."""
    M, K = source.shape
    row_amax, column_amax = _room(source, scaling)
    if M and K:
        from armillary.kernels.fp8_operands_triton import amax_kernel

        tensors, (block_m, block_k, rows) = source.tensors(), _LOOK
        x, dy = tensors[:2]
        assert x is not None and dy is not None
        with on(x):
            amax_kernel[(ceil_div(K, block_k), ceil_div(M, rows))](
                *tensors, row_amax, column_amax, M, K, x.stride(0), dy.stride(0), **source.flags(),
                BY_ROW=scaling == "row", ROWS=rows, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=8,
            )  # fmt: skip
    return row_amax, column_amax


def _room(source: Source, scaling: str) -> tuple[Tensor, Tensor]:
    """Zeros for the largest values: in one piece, so that they are one launch."""
    M, K = source.shape
    if scaling == "row":
        both = torch.zeros(M + K, dtype=torch.float32, device=source.x.device)
        return both[:M], both[M:]
    one = torch.zeros((), dtype=torch.float32, device=source.x.device)
    return one, one


class Normed(NamedTuple):
    """A norm's output as an operand, and what its backward pass needs."""

    source: Source
    operand: Operand


def make_normed(source: Source, dtype: torch.dtype, scaling: str, *, turned: bool = True) -> Operand:
    """A `norm_source` as an operand; its statistics, which are filled in, and largest values take one pass over x."""
    x, mean, rstd, (M, K) = source.x, source.mean, source.rstd, source.shape
    amax = _room(source, scaling)
    if x.numel():
        from armillary.kernels.fp8_operands_triton import stats_kernel

        flags = {key: value for key, value in source.flags().items() if key not in ("KIND", "ACT", "GATED")}
        block = power_of_two(K)
        held = max(1, 2048 // block)
        with on(x):
            stats_kernel[(min(num_programs(x, 8), ceil_div(M, held)),)](
                x, *source.tensors()[2:4], mean, rstd, *amax, M, K, x.stride(0), source.eps, **flags,
                BY_ROW=scaling == "row", HELD=held, BLOCK=block, num_warps=max(4, min(16, block // 1024)),
            )  # fmt: skip
    return make_operand(source, dtype, scaling, turned=turned, amax=amax)


def norm_source(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, plus_one: bool
) -> Source:
    """norm(x), with room for its statistics."""
    x = as_rows(x)
    mean = x.new_empty(0 if rms else len(x), dtype=torch.float32)
    rstd = x.new_empty(len(x), dtype=torch.float32)
    return Source(
        kind="norm", x=x, weight=weight, bias=bias, eps=eps, plus_one=plus_one, mean=mean, rstd=rstd, rms=rms
    )  # fmt: skip


def takes_norm(columns: int) -> bool:
    """Whether `make_normed` holds rows that wide."""
    return columns <= _WIDEST
