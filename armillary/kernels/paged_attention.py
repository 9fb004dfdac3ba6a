"""Attention over a paged KV cache, for decoding, chunks of prompts, and both in one batch.

The cache of a layer is one tensor [pages, 2, KV heads, page size, head dim] (keys, then values). A page is one
contiguous block, so a manager copies or moves `cache[page]`; the keys of a head in a page are contiguous too. Only the
page dim may be strided (pages of several layers may lie together).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.dtype import DTYPES, widen
from armillary.kernels.op import Case, Ceiling, Late, Op, Version, Work

# T packed tokens, B sequences, P pages of the longest, N query heads, K KV heads, D head dim, S keys


def paged_attention(
    q_TND: Tensor,
    cache: Tensor,
    tables_BP: Tensor,
    starts: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_query: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    slopes_N: Tensor | None = None,
    scales_2K: Tensor | None = None,
) -> Tensor:
    """out [T, N, D]. Sequence b owns queries starts[b] … starts[b+1] (starts has B+1 entries) and the first
    lengths[b] keys of its pages tables[b]; its queries are the last tokens of it, each sees the keys up to its own.

    `max_query` is at least the most queries of a sequence; a CUDA graph is captured for one value of it. Sequences
    without queries are skipped; queries of sequences of length 0, and tokens behind the last sequence, give zeros.
    `scales_2K` multiplies keys and values of a quantised cache.
    """
    out = torch.zeros_like(q_TND)
    bounds, lengths = starts.tolist(), lengths_B.tolist()
    for b, length in enumerate(lengths):
        queries = slice(bounds[b], bounds[b + 1])
        if bounds[b] == bounds[b + 1] or not length:
            continue
        k_SKD, v_SKD = gather(cache, tables_BP[b], length, scales_2K, q_TND.dtype)
        out[queries] = _explicit(q_TND[queries], k_SKD, v_SKD, scale, window, softcap, sinks_N, slopes_N)
    return out


def gather(
    cache: Tensor, table_P: Tensor, length: int, scales_2K: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [S, K, D] of one sequence, out of its pages."""
    num_pages = -(-length // cache.shape[3])
    both = cache[table_P[:num_pages].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length].to(dtype)
    if scales_2K is not None:
        both = both * scales_2K.to(dtype)[:, None, :, None]
    return both[0], both[1]


def _explicit(
    q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float, window: int | None, softcap: float | None,
    sinks_N: Tensor | None, slopes_N: Tensor | None,
) -> Tensor:  # fmt: skip
    group = q_TND.shape[1] // k_SKD.shape[1]
    k_SND, v_SND = k_SKD.repeat_interleave(group, dim=1), v_SKD.repeat_interleave(group, dim=1)
    scores = torch.einsum("tnd,snd->nts", widen(q_TND), widen(k_SND)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance_TS = _distance(q_TND.shape[0], k_SKD.shape[0], q_TND.device)
    if slopes_N is not None:
        scores = scores - widen(slopes_N)[:, None, None] * distance_TS
    hidden = distance_TS < 0 if window is None else (distance_TS < 0) | (distance_TS >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks_N is not None:
        sink = sinks_N.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k_SKD.shape[0]]
    return torch.einsum("nts,snd->tnd", weights, widen(v_SND)).to(q_TND.dtype)


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    """Position of the query less that of the key [T, S]."""
    position_T = torch.arange(keys - queries, keys, device=device)
    return position_T[:, None] - torch.arange(keys, device=device)[None]


def by_sdpa(
    q_TND: Tensor,
    cache: Tensor,
    tables_BP: Tensor,
    starts: Tensor,
    lengths_B: Tensor,
    scale: float,
    max_query: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    slopes_N: Tensor | None = None,
    scales_2K: Tensor | None = None,
) -> Tensor:
    """A sequence at a time through torch's attention: the quicker one on a CPU."""
    if softcap is not None or sinks_N is not None or slopes_N is not None:
        return paged_attention(q_TND, cache, tables_BP, starts, lengths_B, scale, max_query, window, softcap, sinks_N,
                               slopes_N, scales_2K)  # fmt: skip
    out = torch.zeros_like(q_TND)
    bounds, lengths = starts.tolist(), lengths_B.tolist()
    for b, length in enumerate(lengths):
        queries = slice(bounds[b], bounds[b + 1])
        if bounds[b] == bounds[b + 1] or not length:
            continue
        k_SKD, v_SKD = gather(cache, tables_BP[b], length, scales_2K, q_TND.dtype)
        out[queries] = _sdpa(q_TND[queries], k_SKD, v_SKD, scale, window)
    return out


def _sdpa(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float, window: int | None) -> Tensor:
    mask = None
    if window is not None or q_TND.shape[0] > 1:
        distance_TS = _distance(q_TND.shape[0], k_SKD.shape[0], q_TND.device)
        mask = distance_TS >= 0 if window is None else (distance_TS >= 0) & (distance_TS < window)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_SKD, v_SKD))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@dataclass(frozen=True, kw_only=True)
class PagedCase(Case):
    """A batch of sequences over a cache."""

    batch: int
    """sequences"""
    context: int
    """tokens of the longest, those of this call included"""
    queries: int = 1
    """new tokens of each"""
    heads: int = 32
    """query heads"""
    kv_heads: int = 8
    """KV heads"""
    head_dim: int = 128
    """dims of a head"""
    page: int = 16
    """tokens of a page"""
    ragged: bool = False
    """lengths between an eighth of the context and all of it"""
    window: int = 0
    """sliding window; 0 for none"""
    softcap: float = 0.0
    """soft cap of scores; 0 for none"""
    sinks: bool = False
    """attention sinks"""
    slopes: bool = False
    """ALiBi"""

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        least = max(self.queries, self.context // 8)
        return [self.context - (self.context - least) * (i * 7919 % self.batch) // self.batch
                for i in range(self.batch)]  # fmt: skip


def _inputs(case: PagedCase, generator: torch.Generator) -> tuple[Any, ...]:
    device = generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype])

    per_row = -(-case.context // case.page)
    order = torch.randperm(case.batch * per_row, generator=generator, device=device, dtype=torch.int32)
    cache = torch.empty(case.batch * per_row, 2, case.kv_heads, case.page, case.head_dim, dtype=DTYPES[case.dtype],
                        device=device)  # fmt: skip
    for chunk in cache.split(max(1, (1 << 28) // cache[0].numel())):  # in pieces: randn is drawn in fp32
        chunk.copy_(normal(*chunk.shape))
    return (
        normal(case.batch * case.queries, case.heads, case.head_dim),
        cache,
        order.view(case.batch, per_row),
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries,
        torch.tensor(case.lengths(), dtype=torch.int32, device=device),
        case.head_dim**-0.5,
        case.queries,
        case.window or None,
        case.softcap or None,
        normal(case.heads).float() if case.sinks else None,
        2.0 ** -torch.arange(1, case.heads + 1, device=device) if case.slopes else None,
    )


def _work(case: PagedCase) -> Work:
    """Keys and values read once a sequence; flops of the visible pairs."""
    size = DTYPES[case.dtype].itemsize
    pairs = keys = 0
    for length in case.lengths():
        reach = min(length, case.window + case.queries - 1) if case.window else length
        keys += reach
        pairs += case.queries * reach - case.queries * (case.queries - 1) // 2
    moved = size * case.head_dim * (2 * case.kv_heads * keys + 2 * case.batch * case.queries * case.heads)
    ceiling: Ceiling = "read" if case.queries * case.heads // case.kv_heads <= 64 else "gemm"
    return Work(flops=4.0 * case.heads * case.head_dim * pairs, bytes=float(moved), ceiling=ceiling)


def _small(case: PagedCase) -> PagedCase:
    """Fewer and shorter sequences that the kernels are compiled for in the same way."""
    if case.batch > 32:
        context = min(case.context, max(768, case.queries + 256))
        return replace(case, batch=37, context=context, queries=min(case.queries, context))
    context = min(case.context, max(2048, case.queries + 256))
    return replace(case, batch=min(case.batch, 5), context=context, queries=min(case.queries, context))


def refuses(case: PagedCase) -> str | None:
    """What the Triton version cannot do."""
    if case.head_dim > 256:
        return f"head dim {case.head_dim} is beyond 256"
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"no kernel for {case.dtype}"


PAGED_ATTENTION = Op(
    name="paged_attention",
    reference=paged_attention,
    versions=(
        Version(name="triton", run=Late("armillary.kernels.paged_attention_triton", "paged_attention"),
                refuses=refuses, needs=("triton",)),
        Version(name="triton flat", run=Late("armillary.kernels.paged_attention_triton", "paged_attention_flat"),
                refuses=refuses, needs=("triton",)),
        Version(name="sdpa", run=by_sdpa),
    ),
    inputs=_inputs,
    work=_work,
    small=_small,
    cases={
        "decode 256 × 1k": PagedCase(batch=256, context=1024),
        "decode 256 × 1k, 2 KV heads": PagedCase(batch=256, context=1024, heads=16, kv_heads=2),
        "decode 256 × 128 to 1k": PagedCase(batch=256, context=1024, heads=16, ragged=True),
        "decode 256 × 4k ragged": PagedCase(batch=256, context=4096, ragged=True),
        "decode 256 × 8k, group 8": PagedCase(batch=256, context=8192, heads=64),
        "decode 1 × 32k": PagedCase(batch=1, context=32768),
        "chunk of 2k at 16k": PagedCase(batch=1, context=16384, queries=2048),
    },
)  # fmt: skip
"""for `choose()` and the bench"""
