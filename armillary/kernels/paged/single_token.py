"""The one new token of each of a few sequences, from the fused projection through attention: decoding of a single
stream.

The reference is `qkv_cache`, then `paged_attention`; single_token_triton.py does both in two short launches.
"""

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.launch import power_of_two
from armillary.kernels.paged.paged_attention import PagedBatch, paged_attention
from armillary.kernels.paged.qkv_to_cache import QkvOptions, qkv_cache

# most sequences, and most tokens of a block table: for longer contexts the split kernel reads faster
MOST_SEQUENCES, MAX_TOKENS = 4, 65536


def attend_tokens(
    qkv: Tensor,
    cache: Tensor,
    slots_T: Tensor,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    heads: QkvOptions,
    batch: PagedBatch,
    options: AttentionOptions,
) -> Tensor:
    """[T, N·D]: attention of token t, the newest of sequence t, after its key and value are written to the cache."""
    q_TND, cache = qkv_cache(qkv, cache, slots_T, cos_TR, sin_TR, heads)
    return paged_attention(q_TND, cache, batch, options).flatten(1)


def can_attend(
    qkv: Tensor, cache: Tensor, cos_TR: Tensor | None, heads: QkvOptions, batch: PagedBatch, options: AttentionOptions
) -> bool:
    """Whether the kernel can take these: few sequences, whole heads rotated, no mask but the causal one."""
    size = cache.shape[4]
    few = batch.max_query == 1 and 0 < len(qkv) == len(batch.tables_BP) <= MOST_SEQUENCES
    few = few and batch.tables_BP.shape[1] * cache.shape[3] <= MAX_TOKENS
    rotates = cos_TR is not None and 2 * cos_TR.shape[-1] == size and not heads.interleaved
    sizes = {None if weight is None else weight.numel() for weight in (heads.q_weight, heads.k_weight)}
    normed = heads.norm == "none" or (heads.norm == "rms" and sizes == {size})
    unscaled = heads.clip is None and heads.scales_2K is None and options.scales_2K is None
    numbers = cache.dtype == qkv.dtype != torch.float64 and power_of_two(size) == size and 32 <= size <= 256
    plain = options.is_plain and not options.window and options.scale_for(size) > 0
    return few and rotates and normed and numbers and unscaled and plain
