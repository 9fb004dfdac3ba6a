"""Launches of the 2-simplicial kernels, as one custom op forward and one backward, and over a paged cache."""

import math
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.attention.tiles import can_copy, described
from armillary.kernels.core.launch import ceil_div, on, power_of_two, unit_stride
from armillary.kernels.core.requirements import note_once
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.simplicial.backward_triton import delta_kernel, first_kernel, query_kernel, second_kernel
from armillary.kernels.simplicial.forward_triton import forward_kernel
from armillary.kernels.simplicial.simplicial import by_blocks, halves, run_begins
from armillary.kernels.simplicial.tiles import group_and_pairs, simplicial_tiles
from armillary.machine.accelerator import accelerator_of

# B batch, T tokens, N query heads, K KV heads, J = 2·K, D head dim

_LOG2E = math.log2(math.e)
_MOST_SHARES_BYTES = 512 << 20  # of gradients of first keys by query, before they are added up
_DELTA_ROWS = 64
_FIRST_KEYS = 16


def simplicial(q_BTND: Tensor, k_BTJD: Tensor, v_BTJD: Tensor, options: AttentionOptions) -> Tensor:
    """simplicial.reference by our own kernels; what they cannot hold goes to plain torch."""
    why = _unsupported(q_BTND, k_BTJD, options)
    if why:
        if not torch.compiler.is_compiling():
            note_once(f"2-simplicial attention is left to plain torch: {why}")
        return by_blocks(q_BTND, k_BTJD, v_BTJD, options)
    scale = options.scale_for(q_BTND.shape[-1])
    return _simplicial(q_BTND, k_BTJD, v_BTJD, options.documents_BT, scale, *options.pair_windows)[0]


def _unsupported(q_BTND: Tensor, k_BTJD: Tensor, options: AttentionOptions) -> str | None:
    """Why our kernels cannot take these."""
    if q_BTND.shape[1] != k_BTJD.shape[1]:
        return "queries of a part of the sequence"
    return _too_wide(q_BTND, options)


def _too_wide(q: Tensor, options: AttentionOptions) -> str | None:
    if q.shape[-1] > 128:
        return f"heads of {q.shape[-1]} dims are too wide for registers"
    if options.scale is not None and options.scale <= 0:
        return "a scale that is not positive"
    return "fp64" if q.dtype == torch.float64 else None


_SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? documents, float scale, int window_1, int window_2"


@torch.library.custom_op("armillary::simplicial", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)")
def _simplicial(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window_1: int, window_2: int
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in base 2 [B, T, N])."""
    out, lse = _empty(q, k, v, documents, scale, window_1, window_2)
    if not out.numel():
        return out, lse
    (k1, k2), (v1, v2), (window_1, window_2) = _ordered(unit_stride(k), unit_stride(v), window_1, window_2)
    q, (B, T, N, _) = unit_stride(q), q.shape
    tiles, tma = simplicial_tiles("forward", q), can_copy(k2, v2)
    sizes, blocks = _sizes(tiles, q, k2, window_1)
    hopper = _for_hopper("forward", q, k2, v2, heads=128) if k2.shape[2] * 128 == N else None
    if hopper is not None:
        begins = None if documents is None else run_begins(documents).int()
        with on(q):
            hopper.forward(q, (k1, k2), (v1, v2), (out, lse), begins, (scale * _LOG2E, window_1, window_2))
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
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, scale: float, window_1: int, window_2: int
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


HOPPER_KERNELS: set[str] = set()
"""kernels of wgmma.py that run instead of Triton's where they can: none is timed yet"""


def _for_hopper(kernel: str, q: Tensor, k2: Tensor, v2: Tensor, *, heads: int) -> Any:
    """The module that launches a kernel written for Hopper, where that may run."""
    if kernel not in HOPPER_KERNELS:
        return None
    from armillary.kernels.simplicial import wgmma

    return None if wgmma.why_not(q, k2, heads) or wgmma.why_not(q, v2, heads) else wgmma


def _ordered(
    k: Tensor, v: Tensor, window_1: int, window_2: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, int]]:
    """Keys and values with the longer window second: tiles are along that one."""
    keys, values = halves(k), halves(v)
    if window_1 <= window_2:
        return keys, values, (window_1, window_2)
    return keys[::-1], values[::-1], (window_2, window_1)


def _sizes(tiles: Any, q: Tensor, k2: Tensor, window_1: int) -> tuple[dict[str, Any], int]:
    """(constants of a kernel, programs per KV head)."""
    group, D = q.shape[-2] // k2.shape[-2], q.shape[-1]
    heads, first_keys = group_and_pairs(tiles, group, window_1)
    constants = {
        "FP32": q.dtype == torch.float32,
        "D": D,
        "BLOCK_D": max(16, power_of_two(D)),
        "GROUP": heads,
        "PAIRS": first_keys,
        "BLOCK_N": tiles.keys,
        "FLAT": tiles.flat,
        "num_warps": tiles.warps,
    }
    return constants, ceil_div(group, heads)


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
    keys, values, windows = _ordered(k, v, window_1, window_2)
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
        first_BTK2D = _query_gradients(q, keys, values, shared, dq, factors)
        _second_gradients(q, keys, values, shared, ends, dk, dv, factors, swapped)
    dk[:, :, swapped::2], dv[:, :, swapped::2] = first_BTK2D.unbind(3)
    return dq, dk, dv


def _run_ends(documents_BT: Tensor) -> Tensor:
    """[B, T]: one past the last token of a token's document."""
    return (documents_BT.shape[1] - run_begins(documents_BT.flip(1)).flip(1)).int()


Pair = tuple[Tensor, Tensor]
Factors = tuple[float, float, int, int]


def _query_gradients(
    q: Tensor,
    keys: Pair,
    values: Pair,
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    dq: Tensor,
    factors: Factors,
) -> Tensor:
    """dQ, and the gradients of first keys and values, fp32 [B, T, K, 2, D]: some tokens at a time, whose shares fit."""
    (k1, k2), (v1, v2), (B, T, N, D), window_1 = keys, values, q.shape, factors[2]
    K = k2.shape[2]
    tiles, tma = simplicial_tiles("query", q), can_copy(k2, v2)
    sizes, blocks = _sizes(tiles, q, k2, window_1)
    sources = [described(x, tiles.keys) if tma else x for x in (k2, v2)]
    sums = q.new_zeros(B, T, K, 2, D, dtype=torch.float32)
    step = min(T, max(1, _MOST_SHARES_BYTES // (4 * B * K * blocks * window_1 * 2 * D)))
    shares = q.new_empty(B * step * K * blocks * window_1 * 2 * D, dtype=torch.float32)
    grad, lse, delta, begins = shared
    hopper = _for_hopper("query", q, k2, v2, heads=128) if K * 128 == N else None
    for begin in range(0, T, step):
        end = min(T, begin + step)
        if hopper is not None:
            hopper.query_gradients(q, keys, values, shared, (dq, shares), (begin, end), factors)
        else:
            query_kernel[(end - begin, K * blocks, B)](
                q,
                k1,
                v1,
                *sources,
                grad,
                lse,
                delta,
                begins,
                dq,
                shares,
                *q.stride()[:3],
                *k2.stride()[:3],
                *v2.stride()[:3],
                begin,
                T,
                N,
                N // K,
                *factors,
                DOCS=begins is not None,
                STAGES=tiles.stages,
                TMA=tma,
                **sizes,
            )
        num_keys = end - max(0, begin - window_1 + 1)
        first_kernel[(ceil_div(num_keys, _FIRST_KEYS), 2 * K, B)](
            shares,
            begins,
            sums,
            begin,
            end,
            T,
            K,
            blocks,
            window_1,
            DOCS=begins is not None,
            D=D,
            BLOCK_D=sizes["BLOCK_D"],
            BLOCK=_FIRST_KEYS,
            num_warps=4,
        )
    return sums


def _second_gradients(
    q: Tensor,
    keys: Pair,
    values: Pair,
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ends: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    factors: Factors,
    swapped: int,
) -> None:
    """Into every other head of dk and dv; few programs share their queries out, and their sums are added."""
    (k1, k2), (v1, v2), (B, T, N, _) = keys, values, q.shape
    tiles = simplicial_tiles("second", q)
    sizes, _ = _sizes(tiles, q, k2, factors[2])
    hopper = _for_hopper("second", q, k2, v2, heads=64)
    splits = _splits(q, ceil_div(T, tiles.keys) * k2.shape[2] * B)
    own = 1 - swapped
    wanted = [dk[:, :, own::2], dv[:, :, own::2]]
    outputs = wanted if splits == 1 else [x.new_empty(splits, *x.shape, dtype=torch.float32) for x in wanted]
    strides = (0, *outputs[0].stride()[:3]) if splits == 1 else outputs[0].stride()[:4]
    if hopper is not None:
        hopper.second_gradients(q, keys, values, shared, ends, outputs, strides, factors, splits)
    else:
        second_kernel[(ceil_div(T, tiles.keys), k2.shape[2] * splits, B)](
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
            **sizes,
        )
    if splits > 1:
        for target, parts in zip(wanted, outputs, strict=True):
            target.copy_(parts.sum(0))


_MOST_SPLITS = 8


def _splits(q: Tensor, programs: int) -> int:
    """Ranges of queries, so that every multiprocessor has two programs."""
    chip = accelerator_of(q.device)
    if chip is None:
        return 2  # in the interpreter, so that sums of ranges are tested
    return max(1, min(_MOST_SPLITS, 2 * chip.multiprocessors // max(1, programs)))


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
        return (None,) * 7
    return *_simplicial_backward(grad, out, lse, q, k, v, documents, *ctx.options), None, None, None, None


_simplicial.register_autograd(_gradients, setup_context=_setup_context)


# --- over a paged cache


def paged_simplicial(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """paged_simplicial of simplicial/paged.py by our own kernel."""
    assert not _too_wide(q_TND, options) and cache.stride()[2:] == (cache[0, 0, 0].numel(), cache.shape[4], 1)
    window_1, window_2 = options.pair_windows
    (k1, k2), (v1, v2), (window_1, window_2) = _ordered(
        cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2), window_1, window_2
    )
    out, tiles, K = torch.zeros_like(q_TND), simplicial_tiles("forward", q_TND), k2.shape[2]
    sizes, blocks = _sizes(tiles, q_TND, k2, window_1)
    D, (N, page) = q_TND.shape[-1], (q_TND.shape[1], cache.shape[3])
    heads_apart = 2 * page * D  # of one KV head's first keys and the next's
    q_TND, num_rows = unit_stride(q_TND), len(batch.lengths_B)
    with on(q_TND):
        forward_kernel[(batch.max_query, K * blocks, num_rows)](
            q_TND,
            k1,
            v1,
            k2,
            v2,
            out,
            None,
            None,
            batch.tables_BP,
            batch.starts,
            batch.lengths_B,
            0,
            *q_TND.stride()[:2],
            cache.stride(0),
            D,
            heads_apart,
            cache.stride(0),
            D,
            heads_apart,
            batch.tables_BP.shape[1],
            0,
            N,
            N // K,
            options.scale_for(D) * _LOG2E,
            window_1,
            window_2,
            DOCS=False,
            PAGED=True,
            PAGE=page,
            STAGES=1,
            TMA=False,
            **sizes,
        )
    return out
