"""Launches of the 2-simplicial kernels for Hopper: heads of 128 dims in 16 bits."""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from armillary.kernels.core.launch import ceil_div
from armillary.kernels.simplicial.forward_wgmma import forward_wgmma
from armillary.kernels.simplicial.query_wgmma import query_wgmma
from armillary.kernels.simplicial.second_wgmma import second_wgmma
from armillary.machine.accelerator import accelerator_of

# B batch, T tokens, N query heads, K KV heads, D head dim

D, ROWS, KEYS = 128, 64, 64


@dataclass(frozen=True)
class ForwardTiles:
    """Launch options of the forward kernel."""

    keys: int = 128
    stages: int = 2
    ping_pong: int = 0  # see forward_wgmma


@dataclass(frozen=True)
class QueryTiles:
    """Launch options of the kernel of queries."""

    keys: int = 64
    key_stages: int = 3
    value_stages: int = 2


@dataclass(frozen=True)
class SecondTiles:
    """Launch options of the kernel of second keys."""

    stages: int = 2
    registers: int = 224


FORWARD_TILES, QUERY_TILES, SECOND_TILES = ForwardTiles(), QueryTiles(), SecondTiles()


def why_not(q_BTND: Tensor, k_BTKD: Tensor, rows: int) -> str | None:
    """Why these kernels cannot take these; `rows`: heads of a program."""
    chip = accelerator_of(q_BTND.device)
    if chip is None or not chip.wgmma:
        return "wgmma is Hopper's"
    if q_BTND.dtype not in (torch.bfloat16, torch.float16) or q_BTND.shape[-1] != D:
        return f"they are for heads of {D} dims in 16 bits"
    if q_BTND.shape[2] // k_BTKD.shape[2] % rows:
        return f"they take {rows} heads of a KV head at a time"
    aligned = all(stride % 8 == 0 for stride in (*q_BTND.stride()[:-1], *k_BTKD.stride()[:-1]))
    return None if aligned and k_BTKD.stride(0) == k_BTKD.shape[1] * k_BTKD.stride(1) else "their rows are not aligned"


def forward(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    begins: Tensor | None,
    factors: tuple[float, int, int],
) -> None:
    """Into (output, log-sum-exp in base 2); a KV head has 128 query heads. `factors`: scale in base 2 and windows."""
    (k1, k2), (v1, v2), (B, T, N, _), tiles = keys, values, q.shape, FORWARD_TILES
    forward_wgmma[(T, k2.shape[2], B)](
        q,
        k1,
        v1,
        _rows(k2, tiles.keys),
        _rows(v2, tiles.keys),
        *outputs,
        begins,
        *q.stride()[:3],
        *k2.stride()[:3],
        *v2.stride()[:3],
        T,
        N,
        *factors,
        DOCS=begins is not None,
        ROWS=ROWS,
        D=D,
        BLOCK=tiles.keys,
        STAGES=tiles.stages,
        PING_PONG=tiles.ping_pong,
        REGISTERS=240,
        num_warps=4,
        maxnreg=168,
    )


def query_gradients(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    outputs: tuple[Tensor, Tensor],
    tokens: tuple[int, int],
    factors: tuple[float, float, int, int],
) -> None:
    """Like the launch of `backward_triton.query_kernel`; a KV head has 128 query heads, and two shares."""
    (k1, k2), (v1, v2), (B, T, N, _), tiles = keys, values, q.shape, QUERY_TILES
    query_wgmma[(tokens[1] - tokens[0], k2.shape[2], B)](
        q,
        k1,
        v1,
        _rows(k2, tiles.keys),
        _rows(v2, tiles.keys),
        *shared,
        *outputs,
        *q.stride()[:3],
        *k2.stride()[:3],
        *v2.stride()[:3],
        tokens[0],
        T,
        N,
        *factors,
        DOCS=shared[3] is not None,
        ROWS=ROWS,
        D=D,
        BLOCK=tiles.keys,
        KEY_STAGES=tiles.key_stages,
        VALUE_STAGES=tiles.value_stages,
        REGISTERS=240,
        num_warps=4,
        maxnreg=168,
    )


def second_gradients(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ends: Tensor | None,
    outputs: tuple[Tensor, Tensor],
    strides: tuple[int, ...],
    factors: tuple[float, float, int, int],
    splits: int,
) -> None:
    """Like the launch of `backward_triton.second_kernel`."""
    (k1, k2), (v1, v2), (B, T, N, _), tiles = keys, values, q.shape, SECOND_TILES
    second_wgmma[(ceil_div(T, 2 * KEYS), k2.shape[2] * splits, B)](
        q,
        k1,
        v1,
        k2,
        v2,
        *shared,
        ends,
        *outputs,
        *q.stride()[:3],
        *k2.stride()[:3],
        *v2.stride()[:3],
        *strides,
        T,
        N,
        N // k2.shape[2],
        *factors,
        splits,
        DOCS=ends is not None,
        D=D,
        ROWS=ROWS,
        KEYS=KEYS,
        STAGES=tiles.stages,
        REGISTERS=tiles.registers,
        num_warps=4,
        maxnreg=168,
    )


def _rows(x_BTKD: Tensor, length: int) -> TensorDescriptor:
    """A descriptor of tiles of `length` tokens of one head; rows go on from one sequence to the next."""
    B, T, K, D = x_BTKD.shape
    kind = gl.bfloat16 if x_BTKD.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([length, D], kind)
    columns = (K - 1) * x_BTKD.stride(2) + D
    return TensorDescriptor(x_BTKD, [B * T, columns], [x_BTKD.stride(1), 1], [length, D], layout)
