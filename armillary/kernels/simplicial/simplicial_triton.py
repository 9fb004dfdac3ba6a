"""Launches of the 2-simplicial kernels, as one custom op forward and one backward."""

import math
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.attention.tiles import can_copy, described
from armillary.kernels.core.launch import ceil_div, on, power_of_two, unit_stride
from armillary.kernels.core.requirements import note_once
from armillary.kernels.simplicial.backward_triton import delta_kernel
from armillary.kernels.simplicial.forward_triton import forward_kernel
from armillary.kernels.simplicial.gradients_triton import query_gradients, second_gradients
from armillary.kernels.simplicial.simplicial import by_blocks, run_begins
from armillary.kernels.simplicial.tiles import constants_of, for_hopper, ordered, simplicial_tiles

# B batch, T tokens, N query heads, K KV heads, J = 2·K, D head dim

_LOG2E = math.log2(math.e)
_DELTA_ROWS = 64


def on_hopper(q_BTND: Tensor, k_BTJD: Tensor, v_BTJD: Tensor, options: AttentionOptions) -> Tensor:
    """simplicial.reference by the kernels for Hopper; shapes that they do not take go to Triton's."""
    return simplicial(q_BTND, k_BTJD, v_BTJD, options, hopper=True)


def simplicial(
    q_BTND: Tensor, k_BTJD: Tensor, v_BTJD: Tensor, options: AttentionOptions, hopper: bool = False
) -> Tensor:
    """simplicial.reference by our own kernels; what they cannot hold goes to plain torch."""
    why = _unsupported(q_BTND, k_BTJD, options)
    if why:
        if not torch.compiler.is_compiling():
            note_once(f"2-simplicial attention is left to plain torch: {why}")
        return by_blocks(q_BTND, k_BTJD, v_BTJD, options)
    scale = options.scale_for(q_BTND.shape[-1])
    return _simplicial(q_BTND, k_BTJD, v_BTJD, options.documents_BT, scale, *options.pair_windows, hopper)[0]


def _unsupported(q_BTND: Tensor, k_BTJD: Tensor, options: AttentionOptions) -> str | None:
    """Why our kernels cannot take these."""
    if q_BTND.shape[1] != k_BTJD.shape[1]:
        return "queries of a part of the sequence"
    return too_wide(q_BTND, options)


def too_wide(q: Tensor, options: AttentionOptions) -> str | None:
    if q.shape[-1] > 128:
        return f"heads of {q.shape[-1]} dims are too wide for registers"
    if options.scale is not None and options.scale <= 0:
        return "a scale that is not positive"
    return "fp64" if q.dtype == torch.float64 else None


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int window_1, int window_2, bool hopper"


@torch.library.custom_op("armillary::simplicial", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _simplicial(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window_1: int, window_2: int, hopper: bool
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in base 2 [B, T, N])."""
    out, lse = _empty(q, k, v, documents, scale, window_1, window_2, hopper)
    if not out.numel():
        return out, lse
    (k1, k2), (v1, v2), (window_1, window_2) = ordered(unit_stride(k), unit_stride(v), window_1, window_2)
    q, (B, T, N, _) = unit_stride(q), q.shape
    tiles, tma = simplicial_tiles("forward", q), can_copy(k2, v2)
    sizes, blocks = constants_of(tiles, q, k2, window_1)
    kernels = for_hopper("forward", q, k2, v2, heads=128) if hopper and k2.shape[2] * 128 == N else None
    if kernels is not None:
        begins = None if documents is None else run_begins(documents).int()
        with on(q):
            kernels.forward(q, (k1, k2), (v1, v2), (out, lse), begins, (scale * _LOG2E, window_1, window_2))
        return out, lse
    with on(q):
        forward_kernel[(T, k2.shape[2] * blocks, B)](
            q,
            k1,
            v1,
            *(described(x, tiles.keys) if tma else x for x in (k2, v2)),
            out,
            lse,
            None if documents is None else run_begins(documents).int(),
            None,
            None,
            None,
            *q.stride()[:3],
            *k2.stride()[:3],
            *v2.stride()[:3],
            0,
            T,
            N,
            N // k2.shape[2],
            scale * _LOG2E,
            window_1,
            window_2,
            DOCS=documents is not None,
            PAGED=False,
            PAGE=1,
            STAGES=tiles.stages,
            TMA=tma,
            **sizes,
        )
    return out, lse


@_simplicial.register_fake
def _empty(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window_1: int, window_2: int, hopper: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "armillary::simplicial_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
)
def _simplicial_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float,
    window_1: int,
    window_2: int,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV)."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if not out.numel():
        return dq, dk, dv
    q, k, v, grad = unit_stride(q), unit_stride(k), unit_stride(v), grad.contiguous()
    delta = torch.empty_like(lse)
    begins = None if documents is None else run_begins(documents).int()
    ends = None if documents is None else _run_ends(documents)
    swapped = int(window_1 > window_2)
    keys, values, windows = ordered(k, v, window_1, window_2)
    shared = (grad, lse, delta, begins)
    factors = (scale, scale * _LOG2E, *windows)
    with on(q):
        rows = lse.numel()
        delta_kernel[(ceil_div(rows, _DELTA_ROWS),)](
            out,
            grad,
            delta,
            rows,
            D=q.shape[-1],
            BLOCK_D=max(16, power_of_two(q.shape[-1])),
            BLOCK=_DELTA_ROWS,
            num_warps=4,
        )
        first_BTK2D = query_gradients(q, keys, values, shared, dq, factors, hopper)
        second_gradients(q, keys, values, shared, ends, dk, dv, factors, swapped, hopper)
    dk[:, :, swapped::2], dv[:, :, swapped::2] = first_BTK2D.unbind(3)
    return dq, dk, dv


def _run_ends(documents_BT: Tensor) -> Tensor:
    """[B, T]: one past the last token of a token's document."""
    return (documents_BT.shape[1] - run_begins(documents_BT.flip(1)).flip(1)).int()


@_simplicial_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    scale: float,
    window_1: int,
    window_2: int,
    hopper: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, documents, out, lse)


def _gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, documents, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * 8
    return *_simplicial_backward(grad, out, lse, q, k, v, documents, *ctx.options), *(None,) * 5


_simplicial.register_autograd(_gradients, setup_context=_setup_context)
