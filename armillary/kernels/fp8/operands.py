"""Operands of fp8 GEMMs for training, quantised once for all GEMMs of a matrix: as it is, and transposed.

An fp8 GEMM sums along the last dim of both operands, so a matrix that is multiplied forward and backward is needed in
both layouts. Scales: one per tensor ('tensor'); one per row of each layout ('row'); or a power of two per row of the
original layout, and the largest of them for the transposed layout ('token': rows are tokens), which takes the fewest
passes.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.kernels.core.launch import as_rows, ceil_div, dense, on, power_of_two
from armillary.kernels.fp8.linear import TINY

# M rows, K columns

_ALIGN = 16  # the GEMMs need the summed dim in multiples of it: tokens, for a gradient
_ELEMENTS, _ELEMENTS_PER_WARP = 8192, 1024  # elements per program where rows are shorter, and per warp
_TRANSPOSE = (128, 128, 8)  # rows, columns and warps of an fp8 tile that is transposed
# rows and columns of a tile in the search for each column's amax, rows per program, and warps
_AMAX = (16, 256, 128, 8)
# rows, columns and warps of a tile that is cast by columns: as large as registers allow
_CAST = {"plain": (128, 64, 4), "norm": (128, 64, 4), "activation": (64, 64, 4), "backward": (64, 64, 4)}


class ScaledTensor(NamedTuple):
    """An operand: `values` · `scale`."""

    values: Tensor  # fp8, rows along the summed dim
    scale: Tensor  # [rows, 1], or a scalar []


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A matrix [M, K] quantised for GEMMs that sum over either dim."""

    rows: ScaledTensor | None  # [M, K], to sum over K
    transposed: ScaledTensor | None  # [K, M'], to sum over M; M' is M padded with zeros to a multiple of 16
    known: Tensor | None  # statistics of the matrix, with which `make_operand` recomputes it in fewer passes


@dataclass(frozen=True, kw_only=True)
class Source:
    """The tensor and the operation that an operand is computed from."""

    x: Tensor  # [M, ·]
    kind: str = "plain"  # 'plain': x; 'norm' of x; 'activation' of x; 'backward' of an activation at x
    dy: Tensor | None = None  # for 'backward': gradient of the activation's output
    activation: str = "none"
    gated: bool = False  # gate and up alternate in x
    weight: Tensor | None = None  # of a norm
    bias: Tensor | None = None  # of a norm
    plus_one: bool = False  # a norm multiplies by 1 + weight
    eps: float = 0.0  # of a norm
    rms: bool = True  # an RMS norm, not a layer norm
    mean: Tensor | None = None  # of each row, for a layer norm: filled in when the operand is computed
    rstd: Tensor | None = None  # 1 / standard deviation of each row, for a norm: filled in likewise

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K) of the operand."""
        rows, columns = self.x.shape
        return rows, columns // 2 if self.kind == "activation" and self.gated else columns

    def arguments(self) -> tuple[list[Any], list[int], dict[str, Any]]:
        """(tensors, strides of x and dy, flags) in the order of the kernels' parameters."""
        x = as_rows(self.x)
        dy = x if self.dy is None else as_rows(self.dy)
        tensors = [
            x,
            dy,
            dense(self.weight),
            dense(self.bias),
            x if self.mean is None else self.mean,
            x if self.rstd is None else self.rstd,
        ]
        flags = {
            "KIND": self.kind,
            "ACT": self.activation,
            "GATED": self.gated,
            "RMS": self.rms,
            "WEIGHT": self.weight is not None,
            "PLUS_ONE": self.plus_one,
            "BIAS": self.bias is not None,
        }
        return tensors, [x.stride(0), dy.stride(0)], flags


def norm_source(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool, plus_one: bool) -> Source:
    """norm(x), with empty tensors for its statistics."""
    x = as_rows(x)
    mean = x.new_empty(0 if rms else len(x), dtype=torch.float32)
    rstd = x.new_empty(len(x), dtype=torch.float32)
    return Source(kind="norm", x=x, weight=weight, bias=bias, eps=eps, plus_one=plus_one, mean=mean, rstd=rstd, rms=rms)


def make_operand(
    source: Source,
    dtype: torch.dtype,
    scaling: str,
    *,
    rows: bool = True,
    transposed: bool = True,
    known: Tensor | None = None,
) -> Operand:
    """Both layouts, or one; `known` where the operand was computed before."""
    if scaling == "row":
        by_rows = _rows(source, dtype, "row", _scalar(source)) if rows else None
        known = _columns_amax(source) if transposed and known is None else known
        columns = _by_columns(source, dtype, known) if transposed and known is not None else None
        return Operand(rows=by_rows, transposed=columns, known=known)
    top = _scalar(source)
    if scaling == "tensor":
        top = _amax(source) if known is None else known
    by_rows = _rows(source, dtype, scaling, top)
    return Operand(
        rows=by_rows if rows else None, transposed=_transpose(by_rows, top) if transposed else None, known=top
    )


def _scalar(source: Source) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=source.x.device)


# --- by rows


def _amax(source: Source) -> Tensor:
    """max |·| of the matrix."""
    top = _scalar(source)
    _launch_rows(source, "amax", top, top, top, 1.0)
    return top


def _rows(source: Source, dtype: torch.dtype, mode: str, top: Tensor) -> ScaledTensor:
    (M, K), device = source.shape, source.x.device
    q = torch.empty(M, K, dtype=dtype, device=device)
    scale = torch.empty(() if mode == "tensor" else (M, 1), dtype=torch.float32, device=device)
    _launch_rows(source, mode, q, scale, top, torch.finfo(dtype).max)
    if not q.numel():
        scale.fill_(TINY / torch.finfo(dtype).max)
    return ScaledTensor(q, scale)


def _launch_rows(source: Source, mode: str, q: Tensor, scale: Tensor, top: Tensor, most: float) -> None:
    from armillary.kernels.fp8.fused_cast_triton import rows_kernel

    M, K = source.shape
    if not M or not K:
        return
    tensors, strides, flags = source.arguments()
    block = power_of_two(K)
    rows_at_once = max(1, _ELEMENTS // block)
    with on(source.x):
        rows_kernel[(ceil_div(M, rows_at_once),)](
            *tensors,
            q,
            scale,
            top,
            M,
            K,
            *strides,
            source.eps,
            **flags,
            MODE=mode,
            LARGEST=most,
            ROWS=rows_at_once,
            BLOCK=block,
            num_warps=max(4, min(32, rows_at_once * block // _ELEMENTS_PER_WARP)),
        )


def _transpose(rows: ScaledTensor, top: Tensor) -> ScaledTensor:
    """The rows transposed: with their one scale, or with the largest of their scales, `top`."""
    from armillary.kernels.fp8.fused_cast_triton import transpose_kernel

    (M, K), dtype, is_scalar = rows.values.shape, rows.values.dtype, rows.scale.dim() == 0
    padded = ceil_div(M, _ALIGN) * _ALIGN
    transposed = torch.empty(K, padded, dtype=dtype, device=rows.values.device)
    block_m, block_k, warps = _TRANSPOSE
    if transposed.numel():
        with on(transposed):
            transpose_kernel[(ceil_div(padded, block_m) * ceil_div(K, block_k),)](
                rows.values,
                rows.scale,
                top,
                transposed,
                M,
                K,
                padded,
                ONE_SCALE=is_scalar,
                LARGEST=torch.finfo(dtype).max,
                BLOCK_M=block_m,
                BLOCK_K=block_k,
                num_warps=warps,
            )
    return ScaledTensor(transposed, rows.scale if is_scalar else top)


# --- by columns


def _columns_amax(source: Source) -> Tensor:
    """max |·| of each column."""
    from armillary.kernels.fp8.fused_cast_triton import columns_amax_kernel

    M, K = source.shape
    amax = torch.zeros(K, dtype=torch.float32, device=source.x.device)
    tensors, strides, flags = source.arguments()
    block_m, block_k, rows, warps = _AMAX
    if M and K:
        with on(amax):
            columns_amax_kernel[(ceil_div(K, block_k), ceil_div(M, rows))](
                *tensors, amax, M, K, *strides, **flags, ROWS=rows, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=warps
            )
    return amax


def _by_columns(source: Source, dtype: torch.dtype, amax: Tensor) -> ScaledTensor:
    from armillary.kernels.fp8.fused_cast_triton import cast_columns_kernel

    (M, K), most = source.shape, torch.finfo(dtype).max
    padded = ceil_div(M, _ALIGN) * _ALIGN
    transposed, scale = torch.empty(K, padded, dtype=dtype, device=amax.device), torch.empty_like(amax)
    tensors, strides, flags = source.arguments()
    block_m, block_k, warps = _CAST[source.kind]
    if transposed.numel():
        with on(amax):
            cast_columns_kernel[(ceil_div(padded, block_m) * ceil_div(K, block_k),)](
                *tensors,
                amax,
                transposed,
                scale,
                M,
                K,
                padded,
                *strides,
                **flags,
                LARGEST=most,
                BLOCK_M=block_m,
                BLOCK_K=block_k,
                num_warps=warps,
            )
    else:
        scale.fill_(TINY / most)
    return ScaledTensor(transposed, scale[:, None])
