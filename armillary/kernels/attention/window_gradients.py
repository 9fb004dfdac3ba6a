"""Launches of the backward kernels for a sliding window of 128 keys: rows, dQ, dK and dV."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from armillary.kernels.attention.gradients import LOG2E
from armillary.kernels.attention.window_key_wgmma import window_key_wgmma
from armillary.kernels.attention.window_query_wgmma import window_query_wgmma
from armillary.kernels.attention.window_rows_triton import window_rows_kernel
from armillary.kernels.core.launch import ceil_div, num_programs, on

# B batch, T tokens, N query heads, K KV heads, D head dim

WINDOW, HEAD_DIM, HEADS = 128, 64, 8
_KEY_CHUNK, _KEY_ROWS = 128, 64  # keys of a program of the key kernel at a time, and of one of its partitions


@dataclass(frozen=True)
class GradientTiles:
    """Launch options of the two kernels."""

    chunk: int = 64  # tokens of the query kernel whose keys and values are in shared memory at a time
    box: int = 64  # rows of one copy
    registers: int = 128  # of a thread of the query kernel
    stages: int = 8  # groups of 8 tokens under way in the key kernel
    key_registers: tuple[int, int] = (168, 240)  # of its threads at launch, and of those that multiply


TILES = GradientTiles()


def gradients(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, gradient of the sinks or empty)."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not (grad.stride(-1) == 1 and grad.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in grad.stride()[:-1])):
        grad = grad.contiguous()
    with on(q):
        rows, dsinks = row_facts(grad, out, lse, sinks)
        _query_gradients(q, k, v, grad, dq, rows, scale)
        _key_gradients(q, k, v, grad, dk, dv, rows, scale)
    return dq, dk, dv, dsinks


def row_facts(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """([B, N / 8, groups of 8 tokens in whole chunks, 2, 64]: log-sum-exp and row sum of output · gradient; gradient of
    the sinks)."""
    B, T, N, D = out.shape
    groups = ceil_div(T, TILES.chunk) * (TILES.chunk // HEADS)
    rows = torch.empty(B, N // HEADS, groups, 2, HEADS * HEADS, dtype=torch.float32, device=out.device)
    share = torch.empty(B, groups, N if sinks is not None else 0, dtype=torch.float32, device=out.device)
    window_rows_kernel[(groups, N // HEADS, B)](
        out,
        grad,
        lse,
        None if sinks is None else sinks.contiguous(),
        rows,
        share,
        *grad.stride()[:3],
        T,
        N,
        groups,
        SINKS=sinks is not None,
        D=D,
        num_warps=4,
    )
    return rows, share.sum((0, 1)).to(out.dtype if sinks is None else sinks.dtype)


def _query_gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dq: Tensor, rows: Tensor, scale: float) -> None:
    (B, _, N, D), tiles, groups = q.shape, TILES, rows.shape[2]
    chunks = groups // (tiles.chunk // HEADS)
    run = chunks_per_program(chunks, N // HEADS * B, num_programs(q, 1))
    tile, box = [1, HEADS, HEADS, D], [1, tiles.box, 1, D]
    window_query_wgmma[(ceil_div(chunks, run), N // HEADS, B)](
        described(q, tile),
        described(k, box),
        described(v, box),
        described(grad, tile),
        described(dq, tile),
        rows,
        groups,
        run,
        N // HEADS // k.shape[2],
        scale,
        scale * LOG2E,
        WINDOW=WINDOW,
        CHUNK=tiles.chunk,
        BOX=tiles.box,
        REGISTERS=tiles.registers,
        num_warps=4,
        maxnreg=tiles.registers,
    )


def _key_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dk: Tensor, dv: Tensor, rows: Tensor, scale: float
) -> None:
    (B, T, N, D), K, tiles = q.shape, k.shape[2], TILES
    chunks = ceil_div(T, _KEY_CHUNK)
    run = chunks_per_program(chunks, K * B, num_programs(q, 1))
    tile, box = [1, HEADS, HEADS, D], [1, _KEY_ROWS, 1, D]
    at_launch, multiplying = tiles.key_registers
    window_key_wgmma[(ceil_div(chunks, run), K, B)](
        described(q, tile),
        described(k, box),
        described(v, box),
        described(grad, tile),
        described(dk, box),
        described(dv, box),
        rows,
        T,
        rows.shape[2],
        run,
        N // HEADS // K,
        scale,
        scale * LOG2E,
        WINDOW=WINDOW,
        STAGES=tiles.stages,
        REGISTERS=multiplying,
        num_warps=4,
        maxnreg=at_launch,
    )


def chunks_per_program(chunks: int, sequences: int, places: int) -> int:
    """Chunks in a row of one program, of which `places` run at a time, that take the least time in all; a program's
    start counts as a chunk."""

    def rounds(run: int) -> int:
        return ceil_div(ceil_div(chunks, run) * sequences, places) * (run + 1)

    return min(range(1, chunks + 1), key=lambda run: (rounds(run), -run))


def described(x: Tensor, tile: list[int]) -> TensorDescriptor:
    """A descriptor of tiles of this shape."""
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, tile, gl.NVMMASharedLayout.get_default_for(tile, kind))
