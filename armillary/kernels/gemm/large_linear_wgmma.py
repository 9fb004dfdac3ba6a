"""Launches of the persistent GEMM for Hopper."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from armillary.kernels.core.launch import as_rows, ceil_div, is_bare, num_programs, on
from armillary.kernels.gemm.large_linear import reference
from armillary.kernels.gemm.persistent_gemm import linear_kernel
from armillary.kernels.gemm.stream_gemm import stream_kernel
from armillary.kernels.gemm.stream_schedule import grid_of, schedule, table
from armillary.machine.accelerator import accelerator_of

# M rows, N columns of the weight's transpose, K inputs


@dataclass(frozen=True)
class LinearTiles:
    """Tile sizes and launch options."""

    rows: int = 128  # of an output tile
    columns: int = 256
    inner: int = 64  # inputs per step
    stages: int = 4
    consumers: int = 2  # multiplying partitions
    split: int = 2  # parts in which an output tile leaves
    group: int = 8  # row tiles that are visited together
    stream: bool = False  # whether the last round of tiles is divided among all programs (stream_schedule.py)

    @property
    def registers(self) -> tuple[int, int]:
        """(of a thread at launch, of one in a multiplying partition): 64K are shared out among all warps."""
        return (168, 168) if self.consumers == 3 else (168, 240)


TILES: dict[str, LinearTiles] = {
    "128 rows": LinearTiles(),
    "128 rows, groups of 16": LinearTiles(group=16),
    "192 rows": LinearTiles(rows=192, consumers=3, stages=3, group=16),
    "192 rows, stream-K": LinearTiles(rows=192, consumers=3, stages=3, group=16, stream=True),
}
"""what is tried for a shape. 192 rows read a fifth less per multiplication, which counts where rows of the operands are
not aligned to 128 bytes, so that each takes two requests to L2"""
PLAIN, WITH_RESIDUAL = TILES["128 rows"], LinearTiles(stages=3, split=1)


def large_linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """The reference's result in one kernel; what it cannot take goes to the reference."""
    if why_not(x, weight_NK, residual) is not None:
        return reference(x, weight_NK, bias_N, activation, residual)
    return (run_tiles if is_bare(x) else _op)(x, weight_NK, bias_N, activation, residual, "")


def why_not(x: Tensor, weight_NK: Tensor, residual: Tensor | None = None) -> str | None:
    """Why the kernel cannot take these."""
    chip, operands = accelerator_of(x.device), [x, weight_NK, *([] if residual is None else [residual])]
    if chip is None or not chip.wgmma:
        return "wgmma is Hopper's"
    if x.dtype not in (torch.bfloat16, torch.float16) or any(each.dtype != x.dtype for each in operands):
        return "it is for 16-bit dtypes"
    if not x.numel():
        return "nothing to multiply"
    aligned = all(each.shape[-1] % 8 == 0 and each.data_ptr() % 16 == 0 for each in operands)
    return None if aligned and len(weight_NK) % 8 == 0 and weight_NK.is_contiguous() else "rows are not aligned"


def run_tiles(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    activation: str,
    residual: Tensor | None,
    name: str,
) -> Tensor:
    """With the tiles of that name, "" for the usual ones; with a residual there is one choice only."""
    usual = PLAIN if residual is None else WITH_RESIDUAL
    return launch(x, weight_NK, bias_N, activation, residual, TILES.get(name, usual) if residual is None else usual)


_op = torch.library.custom_op("armillary::large_linear", run_tiles, mutates_args=())


@_op.register_fake
def _(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str, residual: Tensor | None, name: str
) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight_NK))


def launch(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    activation: str,
    residual: Tensor | None,
    tiles: LinearTiles,
) -> Tensor:
    """act(x @ weightᵀ + bias) + residual, in 16 bits; rows of all operands are multiples of 16 bytes."""
    x_MK = as_rows(x)
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    out = x.new_empty(*x.shape[:-1], N)
    if tiles.stream and residual is None:
        _launch_stream(x_MK, weight_NK, bias_N, activation, as_rows(out), tiles)
        return out
    added = out if residual is None else residual
    rows, (at_launch, multiplying) = tiles.rows // tiles.consumers, tiles.registers
    out_tile = [rows, tiles.columns // tiles.split]
    programs = min(num_programs(x, 1), ceil_div(M, tiles.rows) * ceil_div(N, tiles.columns))
    with on(x):
        linear_kernel[(programs,)](
            _described(x_MK, [rows, tiles.inner]),
            _described(weight_NK, [tiles.columns, tiles.inner]),
            _described(as_rows(out), out_tile),
            _described(as_rows(added), out_tile),
            bias_N,
            M,
            N,
            K,
            GROUP=tiles.group,
            CONSUMERS=tiles.consumers,
            STAGES=tiles.stages,
            SPLIT=tiles.split,
            BIAS=bias_N is not None,
            RESIDUAL=residual is not None,
            ACTIVATION=activation,
            REGISTERS=multiplying,
            num_warps=8 if tiles.consumers == 1 else 4,
            maxnreg=at_launch,
        )
    return out


def _launch_stream(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, activation: str, out_MN: Tensor, tiles: LinearTiles
) -> None:
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    rows, (at_launch, multiplying) = tiles.rows // tiles.consumers, tiles.registers
    assert tiles.consumers == 3 and tiles.split == 2
    segments, slots = _segments(M, N, K, tiles, num_programs(x_MK, 1), x_MK.device)
    sums = torch.empty(slots, tiles.rows, tiles.columns, dtype=torch.float32, device=x_MK.device)
    with on(x_MK):
        stream_kernel[(len(segments),)](
            _described(x_MK, [rows, tiles.inner]),
            _described(weight_NK, [tiles.columns, tiles.inner]),
            _described(out_MN, [rows, tiles.columns // tiles.split]),
            bias_N,
            segments,
            sums,
            _flags(x_MK, tiles.consumers * len(segments)),
            M,
            N,
            segments.shape[1],
            STAGES=tiles.stages,
            SPLIT=tiles.split,
            BIAS=bias_N is not None,
            ACTIVATION=activation,
            REGISTERS=multiplying,
            num_warps=4,
            maxnreg=at_launch,
        )


@lru_cache(maxsize=1024)
def _segments(M: int, N: int, K: int, tiles: LinearTiles, programs: int, device: torch.device) -> tuple[Tensor, int]:
    """The table of segments and the number of slots for sums."""
    grid = grid_of(M, N, K, (tiles.rows, tiles.columns, tiles.inner), tiles.consumers, tiles.group)
    rows, slots = table(schedule(grid, programs))
    return torch.tensor(rows, dtype=torch.int32, device=device), slots


_FLAGS: dict[tuple[torch.device, int], Tensor] = {}


def _flags(x: Tensor, count: int) -> Tensor:
    """Zeros that every launch leaves as zeros: of this stream, or of this launch where a graph is captured."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=x.device)
    key = x.device, torch.cuda.current_stream(x.device).cuda_stream
    if key not in _FLAGS or len(_FLAGS[key]) < count:
        _FLAGS[key] = torch.zeros(count, dtype=torch.int32, device=x.device)
    return _FLAGS[key]


def _described(x: Tensor, tile: list[int]) -> TensorDescriptor:
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, tile, gl.NVMMASharedLayout.get_default_for(tile, kind))
