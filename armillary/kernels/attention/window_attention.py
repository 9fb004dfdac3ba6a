"""Launches of the kernels for a sliding window of 128 keys: heads of 64 dims, eight to a KV head, on Hopper.

What they cannot take goes to the kernels for all masks, which also compute the gradients.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from armillary.kernels.attention import attention_triton
from armillary.kernels.attention.attention import PLAIN, AttentionOptions
from armillary.kernels.attention.gradients import LOG2E
from armillary.kernels.attention.window_wgmma import window_wgmma
from armillary.kernels.core.launch import ceil_div, dense, num_programs, on
from armillary.machine.accelerator import accelerator_of

# B batch, T tokens, N query heads, K KV heads, D head dim

WINDOW, HEAD_DIM, HEADS = 128, 64, 8


@dataclass(frozen=True)
class WindowTiles:
    """Launch options of the forward kernel."""

    chunk: int = 64  # tokens whose keys and values lie in shared memory together
    box: int = 64  # rows of one copy
    registers: int = 128


TILES = WindowTiles()


def attention(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """attention.reference, under a narrow window by kernels of its own."""
    if why_not(q_BTND, k_BTKD, v_BTKD, options) is not None:
        return attention_triton.attention(q_BTND, k_BTKD, v_BTKD, options)
    scale = options.scale_for(q_BTND.shape[-1])
    out: Tensor = _attention(q_BTND, k_BTKD, v_BTKD, options.sinks_N, scale, WINDOW)[0]
    return out


def why_not(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Why these kernels cannot take these."""
    chip = accelerator_of(q.device)
    if chip is None or not chip.wgmma:
        return "wgmma is Hopper's"
    return refused(q, k, v, options)


def refused(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Why they cannot, whatever the chip."""
    if options.window != WINDOW or not options.causal:
        return f"they are for causal windows of {WINDOW} keys"
    if options.documents_BT is not None or options.blocks_XY is not None or options.chunk:
        return "they have no documents, block masks or chunks"
    if options.softcap or options.slopes_N is not None or options.scale_for(q.shape[-1]) <= 0:
        return "they have no caps, slopes or negative scales"
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] != HEAD_DIM or v.shape[-1] != HEAD_DIM:
        return f"they are for heads of {HEAD_DIM} dims in 16 bits"
    if q.shape[2] // k.shape[2] % HEADS or q.shape[1] != k.shape[1] or not q.numel():
        return f"they take {HEADS} heads of a KV head at a time, over whole sequences"
    aligned = all(x.data_ptr() % 16 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    aligned = aligned and all(stride % 8 == 0 for x in (q, k, v) for stride in x.stride()[:-1])
    return None if aligned and q.numel() < 1 << 31 else "their rows are not aligned"


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window"


@torch.library.custom_op("armillary::window_attention", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in base 2 [B, N, T])."""
    assert window == WINDOW
    out, lse = _empty(q, k, v, sinks, scale, window)
    launch(q, k, v, sinks, scale, out, lse)
    return out, lse


@_attention.register_fake
def _empty(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, N, T, dtype=torch.float32)


def launch(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, out: Tensor, lse: Tensor) -> None:
    """The forward kernel."""
    (B, T, N, D), K, tiles = q.shape, k.shape[2], TILES
    chunks, heads = ceil_div(T, tiles.chunk), N // HEADS
    run = chunks_per_program(chunks, heads * B, num_programs(q, 1))
    rows = [1, HEADS, HEADS, D]
    with on(q):
        window_wgmma[(ceil_div(chunks, run), heads, B)](
            _described(q, rows),
            _described(k, [1, tiles.box, 1, D]),
            _described(v, [1, tiles.box, 1, D]),
            _described(out, rows),
            lse,
            dense(sinks),
            T,
            N,
            run,
            heads // K,
            scale * LOG2E,
            WINDOW=WINDOW,
            CHUNK=tiles.chunk,
            BOX=tiles.box,
            SINKS=sinks is not None,
            REGISTERS=tiles.registers,
            num_warps=4,
            maxnreg=tiles.registers,
        )


def chunks_per_program(chunks: int, sequences: int, places: int) -> int:
    """Chunks in a row of one program, of which `places` run at a time, that take the least time in all; a program's
    start counts as a chunk."""

    def rounds(run: int) -> int:
        return ceil_div(ceil_div(chunks, run) * sequences, places) * (run + 1)

    return min(range(1, chunks + 1), key=lambda run: (rounds(run), -run))


def _described(x: Tensor, tile: list[int]) -> TensorDescriptor:
    kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(x, tile, gl.NVMMASharedLayout.get_default_for(tile, kind))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, ctx.scale, _ = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, out, lse)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 6
    masks = (None, None, sinks, None, ctx.scale, WINDOW, 0.0, True)
    dq, dk, dv, dsinks = attention_triton._attention_backward(grad, out, lse, q, k, v, *masks)
    return dq, dk, dv, None if sinks is None else dsinks, None, None


_attention.register_autograd(_gradients, setup_context=_setup_context)
