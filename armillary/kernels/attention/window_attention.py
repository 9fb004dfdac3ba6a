"""Launches of the kernels for a sliding window of 128 keys: heads of 64 dims, eight to a KV head, on Hopper.

What they cannot take goes to the kernels for all masks, and so do gradients unless both ways are asked for.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention import attention_triton
from armillary.kernels.attention.attention import PLAIN, AttentionOptions
from armillary.kernels.attention.gradients import LOG2E
from armillary.kernels.attention.window_gradients import (
    HEAD_DIM,
    HEADS,
    WINDOW,
    chunks_per_program,
    described,
    gradients,
)
from armillary.kernels.attention.window_wgmma import window_wgmma
from armillary.kernels.core.launch import ceil_div, dense, num_programs, on
from armillary.machine.accelerator import accelerator_of

# B batch, T tokens, N query heads, K KV heads, D head dim


@dataclass(frozen=True)
class WindowTiles:
    """Launch options of the forward kernel."""

    chunk: int = 64  # tokens whose keys and values lie in shared memory together
    box: int = 64  # rows of one copy
    registers: int = 128


TILES = WindowTiles()


def both_ways(q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
    """`attention`, whose gradients come by kernels of their own too."""
    return attention(q_BTND, k_BTKD, v_BTKD, options, backward=True)


def attention(
    q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions = PLAIN, *, backward: bool = False
) -> Tensor:
    """attention.reference, under a narrow window by a kernel of its own; `backward`: the gradients too."""
    if why_not(q_BTND, k_BTKD, v_BTKD, options) is not None:
        return attention_triton.attention(q_BTND, k_BTKD, v_BTKD, options)
    scale = options.scale_for(q_BTND.shape[-1])
    out: Tensor = _attention(q_BTND, k_BTKD, v_BTKD, options.sinks_N, scale, WINDOW, backward)[0]
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


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window, bool both_ways"


@torch.library.custom_op("armillary::window_attention", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, both_ways: bool
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in base 2 [B, N, T])."""
    assert window == WINDOW
    out, lse = _empty(q, k, v, sinks, scale, window, both_ways)
    launch(q, k, v, sinks, scale, out, lse)
    return out, lse


@_attention.register_fake
def _empty(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int, both_ways: bool
) -> tuple[Tensor, Tensor]:
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
            described(q, rows),
            described(k, [1, tiles.box, 1, D]),
            described(v, [1, tiles.box, 1, D]),
            described(out, rows),
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


@torch.library.custom_op(
    "armillary::window_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    both_ways: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, gradient of the sinks or empty)."""
    assert window == WINDOW and both_ways
    return gradients(grad, out, lse, q, k, v, sinks, scale)


@_attention_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    both_ways: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, ctx.scale, _, ctx.both_ways = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, out, lse)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 7
    if ctx.both_ways:
        grads = _attention_backward(grad, out, lse, q, k, v, sinks, ctx.scale, WINDOW, True)
    else:
        masks = (None, None, sinks, None, ctx.scale, WINDOW, 0.0, True)
        grads = attention_triton._attention_backward(grad, out, lse, q, k, v, *masks)
    return *grads[:3], None if sinks is None else grads[3], None, None, None


_attention.register_autograd(_gradients, setup_context=_setup_context)
