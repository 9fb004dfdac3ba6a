"""Launches of the backward kernels of 2-simplicial attention."""

import torch
from torch import Tensor

from armillary.kernels.attention.tiles import can_copy, described
from armillary.kernels.core.launch import ceil_div
from armillary.kernels.simplicial.backward_triton import first_kernel, query_kernel, second_kernel
from armillary.kernels.simplicial.tiles import constants_of, for_hopper, simplicial_tiles
from armillary.machine.accelerator import accelerator_of

# B batch, T tokens, N query heads, K KV heads, D head dim

_MOST_SHARES_BYTES = 512 << 20  # of gradients of first keys by query, before they are added up
_FIRST_KEYS = 16
Pair = tuple[Tensor, Tensor]
Factors = tuple[float, float, int, int]


def query_gradients(
    q: Tensor,
    keys: Pair,
    values: Pair,
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    dq: Tensor,
    factors: Factors,
    hopper: bool,
) -> Tensor:
    """dQ, and the gradients of first keys and values, fp32 [B, T, K, 2, D]: some tokens at a time, whose shares fit."""
    (k1, k2), (v1, v2), (B, T, N, D), window_1 = keys, values, q.shape, factors[2]
    K = k2.shape[2]
    tiles, tma = simplicial_tiles("query", q), can_copy(k2, v2)
    sizes, blocks = constants_of(tiles, q, k2, window_1)
    sources = [described(x, tiles.keys) if tma else x for x in (k2, v2)]
    sums = q.new_zeros(B, T, K, 2, D, dtype=torch.float32)
    step = min(T, max(1, _MOST_SHARES_BYTES // (4 * B * K * blocks * window_1 * 2 * D)))
    shares = q.new_empty(B * step * K * blocks * window_1 * 2 * D, dtype=torch.float32)
    grad, lse, delta, begins = shared
    kernels = for_hopper("query", q, k2, v2, heads=128) if hopper and K * 128 == N else None
    for begin in range(0, T, step):
        end = min(T, begin + step)
        if kernels is not None:
            kernels.query_gradients(q, keys, values, shared, (dq, shares), (begin, end), factors)
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


def second_gradients(
    q: Tensor,
    keys: Pair,
    values: Pair,
    shared: tuple[Tensor, Tensor, Tensor, Tensor | None],
    ends: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    factors: Factors,
    swapped: int,
    hopper: bool,
) -> None:
    """Into every other head of dk and dv; few programs share their queries out, and their sums are added."""
    (k1, k2), (v1, v2), (B, T, N, _) = keys, values, q.shape
    tiles = simplicial_tiles("second", q)
    sizes, _ = constants_of(tiles, q, k2, factors[2])
    kernels = for_hopper("second", q, k2, v2, heads=64) if hopper else None
    splits = _splits(q, ceil_div(T, tiles.keys) * k2.shape[2] * B)
    own = 1 - swapped
    wanted = [dk[:, :, own::2], dv[:, :, own::2]]
    outputs = wanted if splits == 1 else [x.new_empty(splits, *x.shape, dtype=torch.float32) for x in wanted]
    strides = (0, *outputs[0].stride()[:3]) if splits == 1 else outputs[0].stride()[:4]
    if kernels is not None:
        kernels.second_gradients(q, keys, values, shared, ends, outputs, strides, factors, splits)
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
