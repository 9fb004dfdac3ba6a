"""The 2-simplicial forward kernel over a paged cache."""

import math

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.launch import on, unit_stride
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.simplicial.forward_triton import forward_kernel
from armillary.kernels.simplicial.simplicial_triton import too_wide
from armillary.kernels.simplicial.tiles import constants_of, ordered, simplicial_tiles

# T tokens, N query heads, K KV heads, D head dim

_LOG2E = math.log2(math.e)


def paged_simplicial(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """paged_simplicial of simplicial/paged.py by our own kernel."""
    assert not too_wide(q_TND, options) and cache.stride()[2:] == (cache[0, 0, 0].numel(), cache.shape[4], 1)
    window_1, window_2 = options.pair_windows
    (k1, k2), (v1, v2), (window_1, window_2) = ordered(
        cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2), window_1, window_2
    )
    out, tiles, K = torch.zeros_like(q_TND), simplicial_tiles("forward", q_TND), k2.shape[2]
    sizes, blocks = constants_of(tiles, q_TND, k2, window_1)
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
