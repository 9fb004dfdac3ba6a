"""Grouped GEMMs in Triton: custom operators, their launches, and the tiles that fit a GPU's shared memory.

By TMA the weights are one tall matrix. From compute capability 8.0 on, and for rows that are no multiple of 16 bytes,
the same kernels load by plain pointers. Launches depend on shapes only, so that CUDA graphs can hold them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from armillary.kernels.core.launch import ceil_div, first_fitting, on, power_of_two
from armillary.kernels.gemm.grouped_kernels_triton import grouped_gemm_kernel, row_sums_kernel
from armillary.machine.accelerator import accelerator_of

# P rows (copies of tokens), E experts, K inputs, N outputs
_GROUP = 8
_MANY = 2048  # rows per expert from which a partly empty last tile hardly matters


class GroupedTile(NamedTuple):
    """Tile sizes and launch options of a grouped GEMM."""

    rows: int
    columns: int
    step: int  # summed elements per step of the loop
    warps: int
    stages: int  # steps whose operands are in shared memory

    def shared_bytes(self, itemsize: int) -> int:
        """Of both operands, all stages; the result is written through the same memory."""
        return self.stages * (self.rows + self.columns) * self.step * itemsize


_INTERPRETED = GroupedTile(32, 32, 32, warps=4, stages=1)
# best first, as timed on an H200 (benchmarks/experts_h200.md); the others are for less shared memory and were not timed
_WIDE = (
    GroupedTile(128, 256, 64, 8, 4),
    GroupedTile(128, 256, 64, 8, 3),
    GroupedTile(128, 128, 64, 8, 3),
    GroupedTile(128, 128, 32, 8, 3),
)
_TALL = (GroupedTile(256, 128, 64, 8, 3), *_WIDE[2:])  # for forward GEMMs with many rows per expert
_FP32 = (GroupedTile(64, 64, 32, 8, 3),)  # twice the shared memory, and no tensor cores to feed
# largest number of rows per expert -> tiles: the time is that of reading the weights. By pointers only, so that TMA's
# tiles stay as they were timed.
_FEW = {
    16: (GroupedTile(16, 128, 64, 4, 4), GroupedTile(16, 128, 64, 4, 3)),
    64: (GroupedTile(64, 128, 64, 4, 3), GroupedTile(64, 128, 32, 4, 3)),
}


def grouped_linear(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """`armillary.kernels.gemm.grouped.grouped_linear`; whether all rows have an expert makes no difference here."""
    result: Tensor = _grouped_linear(x_PK, weight_ENK, ends_E, True)
    return result


def grouped_linear_pointers(x_PK: Tensor, weight_ENK: Tensor, ends_E: Tensor, full: bool = True) -> Tensor:
    """`grouped_linear` without TMA: rows of any length, on GPUs of compute capability 8.0 and more."""
    result: Tensor = _grouped_linear(x_PK, weight_ENK, ends_E, False)
    return result


@torch.library.custom_op(
    "armillary::grouped_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends, bool tma) -> Tensor"
)
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, tma: bool) -> Tensor:
    return _grouped_gemm(x, weight, ends, transposed=True, tma=tma)


@_grouped_linear.register_fake
def _empty(x: Tensor, weight: Tensor, ends: Tensor, tma: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op(
    "armillary::grouped_linear_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor weight, Tensor ends, bool dx, bool dweight, bool tma) -> (Tensor, Tensor)",
)
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool, tma: bool
) -> tuple[Tensor, Tensor]:
    """A gradient that is not needed is returned empty."""
    dy = dy.contiguous()
    back = _grouped_gemm(dy, weight, ends, transposed=False, tma=tma) if dx else x.new_empty(0)
    return back, _row_sums(dy, x, ends, len(weight), tma=tma) if dweight else weight.new_empty(0)


@_backward.register_fake
def _empty_backward(
    dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor, dx: bool, dweight: bool, tma: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if dx else 0), weight.new_empty(weight.shape if dweight else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.tma = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x_wanted, weight_wanted, *_ = ctx.needs_input_grad
    dx, dweight = _backward(dy, *ctx.saved_tensors, x_wanted, weight_wanted, ctx.tma)
    return dx if x_wanted else None, dweight if weight_wanted else None, None, None


_grouped_linear.register_autograd(_gradients, setup_context=_keep)


# --- launches


def _grouped_gemm(a: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool, tma: bool) -> Tensor:
    """a @ weight[e]ᵀ ([E, columns, R]) or a @ weight[e] ([E, R, columns]) for the rows of each e."""
    a, weight = a.contiguous(), weight.contiguous()
    (P, R), experts = a.shape, len(weight)
    columns = weight.shape[1] if transposed else weight.shape[2]
    out = a.new_empty(P, columns)
    if not out.numel():
        return out
    tile = _tile(a, P // experts, forward=transposed, tma=tma)
    a_src: Any = a
    weight_src: Any = weight
    if tma:
        shape = [tile.columns, tile.step] if transposed else [tile.step, tile.columns]
        a_src = TensorDescriptor.from_tensor(a, [tile.rows, tile.step])
        weight_src = TensorDescriptor.from_tensor(weight.flatten(0, 1), shape)
    down = ceil_div(P, tile.rows) + experts  # every group but the first may begin one more tile
    with on(a):
        grouped_gemm_kernel[(down * ceil_div(columns, tile.columns),)](
            a_src,
            weight_src,
            out,
            ends,
            down,
            P,
            columns,
            R,
            E=experts,
            SLOTS=power_of_two(experts + 1),
            TRANSPOSED=transposed,
            **_options(tile, a, tma),
        )
    return out


def _row_sums(dy: Tensor, x: Tensor, ends: Tensor, experts: int, *, tma: bool) -> Tensor:
    """dy[rows of e]ᵀ @ x[rows of e]: [E, N, K]."""
    x = x.contiguous()
    (P, N), K = dy.shape, x.shape[1]
    if not P:
        return dy.new_zeros(experts, N, K)
    out = dy.new_empty(experts, N, K)
    tile = _tile(dy, _MANY, forward=False, tma=tma)
    grid = (experts * ceil_div(N, tile.rows) * ceil_div(K, tile.columns),)
    dy_src: Any = dy
    x_src: Any = x
    if tma:
        dy_src = TensorDescriptor.from_tensor(dy, [tile.step, tile.rows])
        x_src = TensorDescriptor.from_tensor(x, [tile.step, tile.columns])
    with on(dy):
        row_sums_kernel[grid](dy_src, x_src, out, ends, N, K, **_options(tile, dy, tma))
    return out


def _tile(a: Tensor, rows: int, *, forward: bool, tma: bool) -> GroupedTile:
    """The tile for `rows` per expert that fits the GPU's shared memory."""
    if accelerator_of(a.device) is None:
        return _INTERPRETED
    few = None if tma else next((tiles for most, tiles in _FEW.items() if rows <= most), None)
    tiles = _FP32 if a.dtype == torch.float32 else few or (_TALL if forward and rows >= _MANY else _WIDE)
    return first_fitting(a.device, tiles, lambda tile: tile.shared_bytes(a.element_size()))


def _options(tile: GroupedTile, a: Tensor, tma: bool) -> dict[str, Any]:
    """Compile-time options of both kernels; fp32 inputs are multiplied as fp32, not as tf32."""
    return {
        "EXACT": "ieee" if a.dtype == torch.float32 else "tf32",
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "GROUP": _GROUP,
        "TMA": tma,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
