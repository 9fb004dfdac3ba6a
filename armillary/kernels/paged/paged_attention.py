"""Attention over a paged KV cache, for decode, chunks of prefill, and both in one batch.

The cache of a layer is one tensor [pages, 2, KV heads, page size, head dim] (keys, then values). A page is one
contiguous block, so a cache manager copies or moves `cache[page]`; the keys of a head in a page are contiguous too.
Only the page dim may be strided (pages of several layers may be adjacent).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions, distances, reference, seen_keys
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Ceiling, Op, OpWork, Version, in_triton
from armillary.kernels.paged.cache_codes import CACHE_DTYPES

# T packed tokens, B sequences, P pages of the longest, N query heads, K KV heads, D head dim, S keys

_LINE = 64  # bytes of a cache line


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedBatch:
    """The sequences of a step. Everything is on the device, so that one CUDA graph serves any lengths and tables."""

    tables_BP: Tensor  # block tables: pages of each sequence, int32
    starts: Tensor  # sequence b owns queries starts[b] … starts[b + 1], int32 [B + 1]; an empty range is skipped
    lengths_B: Tensor  # keys per sequence, int32; its queries are its last tokens. 0: its queries give zeros
    max_query: int  # upper bound of the queries per sequence; a CUDA graph is captured for one value of it

    @cached_property
    def spans(self) -> list[tuple[int, int, int]]:
        """First query, one past the last query, and keys of each sequence, on the CPU: waits for the device."""
        bounds = self.starts.tolist()
        return list(zip(bounds, bounds[1:], self.lengths_B.tolist(), strict=False))

    @cached_property
    def pages(self) -> dict[int, slice | Tensor]:
        """Pages of sequences that were looked up: the same for all layers of a step."""
        return {}


def by_heads(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cache [..., pages, 2, KV heads, page size, head dim] of zeros for CPUs: in memory all pages of a head are
    adjacent, so that consecutive pages are one list of keys."""
    *outer, pages, two, heads, size, dim = shape
    flat = untouched_zeros((prod(shape),), dtype).to(device)
    return flat.view(*outer, two, heads, pages, size, dim).movedim(-3, len(outer))


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory and no time until they are written (calloc), aligned to a cache line."""
    num_bytes = prod(shape) * dtype.itemsize
    flat = torch.from_numpy(np.zeros(num_bytes + _LINE, dtype=np.uint8))
    begin = -flat.data_ptr() % _LINE
    return flat[begin : begin + num_bytes].view(dtype).view(*shape)


def paged_attention(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """out [T, N, D]: each query sees the keys of its sequence up to its own. Tokens after the last sequence give
    zeros."""
    # a new batch: rows may have changed in place since they were last read
    return attend_by_sequence(q_TND, cache, replace(batch), options, _explicit)


def by_sdpa(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """One sequence at a time through torch's attention: the faster version on a CPU."""
    return attend_by_sequence(q_TND, cache, batch, options, _sdpa if options.is_plain else _explicit)


def attend_by_sequence(
    q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, attend: Callable[..., Tensor]
) -> Tensor:
    """`attend(q, k, v, options)` for one sequence after the other, with all its keys."""
    out = None
    for b, (begin, end, length) in enumerate(batch.spans):
        if begin >= end or not length:
            continue
        if b not in batch.pages:
            batch.pages[b] = pages_of(batch.tables_BP[b], length, cache.shape[3])
        k_SKD, v_SKD = gather(cache, batch.pages[b], length, options.scales_2K, q_TND.dtype)
        result = attend(q_TND[begin:end], k_SKD, v_SKD, options)
        if end - begin == len(q_TND):
            return result
        out = torch.zeros_like(q_TND) if out is None else out
        out[begin:end] = result
    return torch.zeros_like(q_TND) if out is None else out


def pages_of(table_P: Tensor, length: int, size: int) -> slice | Tensor:
    """The pages of a sequence: a slice where they are consecutive."""
    pages_P = table_P[: -(-length // size)].long()
    first, last, count = int(pages_P[0]), int(pages_P[-1]), len(pages_P)
    is_consecutive = last - first == count - 1 and bool((pages_P.diff() == 1).all())
    return slice(first, last + 1) if is_consecutive else pages_P


def gather(
    cache: Tensor, pages: slice | Tensor, length: int, scales_2K: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values [S, K, D] of a sequence, from its pages. Nothing is copied where pages are consecutive and all
    pages of a head are adjacent (`by_heads`)."""
    heads_first = cache.permute(1, 2, 0, 3, 4)
    gathered = heads_first[:, :, pages] if isinstance(pages, slice) else heads_first.index_select(2, pages)
    both = gathered.flatten(2, 3)[:, :, :length].to(dtype)
    if scales_2K is not None:
        both = both * scales_2K.to(dtype)[:, :, None, None]
    k_KSD, v_KSD = both
    return k_KSD.transpose(0, 1), v_KSD.transpose(0, 1)


def _explicit(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, options: AttentionOptions) -> Tensor:
    q_1TND, k_1SKD, v_1SKD = (widen(x)[None] for x in (q_TND, k_SKD, v_SKD))
    return reference(q_1TND, k_1SKD, v_1SKD, options)[0].to(q_TND.dtype)


def _sdpa(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, options: AttentionOptions) -> Tensor:
    queries, window = q_TND.shape[0], options.window
    if (unseen := _unseen_keys(queries, k_SKD.shape[0], options)) > 0:
        k_SKD, v_SKD = k_SKD[unseen:], v_SKD[unseen:]
    keys = k_SKD.shape[0]
    limited = 0 < window < keys or 0 < options.chunk < keys
    is_causal, mask = queries == keys and not limited, None
    if not is_causal and (queries > 1 or limited):
        mask = seen_keys(distances(queries, keys, q_TND.device), options)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TND, k_SKD, v_SKD))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal and queries > 1, scale=options.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _unseen_keys(queries: int, keys: int, options: AttentionOptions) -> int:
    """The first keys, which no query sees any more; full chunks, so that the others begin with one."""
    first_query = keys - queries
    if options.chunk:
        return first_query - first_query % options.chunk
    return first_query - options.window + 1 if options.window else 0


_MOST_ONE_BY_ONE = 8


@dataclass(frozen=True, kw_only=True)
class PagedCase(Case):
    """A batch of sequences over a cache."""

    batch: int  # sequences
    context: int  # tokens of the longest sequence, those of this call included
    queries: int = 1  # new tokens per sequence
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    ragged: bool = False  # lengths between an eighth of the context and all of it
    window: int = 0  # sliding window; 0: none
    chunk: int = 0  # of chunked attention; 0: none
    softcap: float = 0.0  # soft cap of scores; 0: none
    sinks: bool = False
    slopes: bool = False
    cache: str = ""  # 'fp8' (E4M3), 'int8': keys and values in 8 bits with per-head scales; '' as the queries

    @property
    def cache_dtype(self) -> torch.dtype:
        return CACHE_DTYPES.get(self.cache, self.torch_dtype)

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        least = max(self.queries, self.context // 8)
        return [
            self.context - (self.context - least) * (i * 7919 % self.batch) // self.batch for i in range(self.batch)
        ]


def _inputs(case: PagedCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, normal = generator.device, partial(case.normal, generator)
    per_row = -(-case.context // case.page)
    order = torch.randperm(case.batch * per_row, generator=generator, device=device, dtype=torch.int32)
    shape = (case.batch * per_row, 2, case.kv_heads, case.page, case.head_dim)
    cache = torch.empty(shape, dtype=case.cache_dtype, device=device)
    for chunk in cache.split(max(1, (1 << 28) // cache[0].numel())):  # in pieces: randn draws in fp32
        chunk.copy_(normal(*chunk.shape))
    batch = PagedBatch(
        tables_BP=order.view(case.batch, per_row),
        starts=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries,
        lengths_B=torch.tensor(case.lengths(), dtype=torch.int32, device=device),
        max_query=case.queries,
    )
    options = AttentionOptions(
        scale=case.head_dim**-0.5,
        window=case.window,
        chunk=case.chunk,
        softcap=case.softcap,
        sinks_N=normal(case.heads).float() if case.sinks else None,
        slopes_N=2.0 ** -torch.arange(1, case.heads + 1, device=device) if case.slopes else None,
        scales_2K=normal(2, case.kv_heads).float().abs() + 0.5 if case.cache else None,
    )
    return normal(case.batch * case.queries, case.heads, case.head_dim), cache, batch, options


def _seen(case: PagedCase, length: int) -> int:
    """Keys of a sequence that any of its queries sees."""
    first = length - case.queries
    if case.chunk:
        return length - (first - first % case.chunk)
    return min(length, case.window + case.queries - 1) if case.window else length


def _work(case: PagedCase) -> OpWork:
    """Keys and values are read once per sequence; FLOPs of the visible pairs."""
    size, kv_size = case.torch_dtype.itemsize, case.cache_dtype.itemsize
    keys = sum(_seen(case, length) for length in case.lengths())
    scores = case.queries * keys - case.batch * (case.queries * (case.queries - 1) // 2)
    moved = 2 * case.head_dim * (kv_size * case.kv_heads * keys + size * case.batch * case.queries * case.heads)
    ceiling: Ceiling = "read" if case.queries * case.heads // case.kv_heads <= 64 else "gemm"
    return OpWork(flops=4.0 * case.heads * case.head_dim * scores, bytes=float(moved), ceiling=ceiling)


def _small(case: PagedCase) -> PagedCase:
    """Fewer and shorter sequences for which the kernels compile in the same way."""
    batch, least = (37, 768) if case.batch > 32 else (min(case.batch, 5), 2048)
    context = min(case.context, max(least, case.queries + 256))
    return replace(case, batch=batch, context=context, queries=min(case.queries, context))


def refuses(case: PagedCase) -> str | None:
    if case.head_dim > 256:
        return f"head dim {case.head_dim} is beyond 256"
    if case.cache == "int8":
        return "no kernel for a cache in int8"
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"no kernel for {case.dtype}"


def _not_one_by_one(case: PagedCase) -> str | None:
    """A library initialises itself anew for every length: seconds for a ragged batch on a GPU."""
    return "it takes one sequence at a time" if case.batch > _MOST_ONE_BY_ONE and case.device != "cpu" else None


PAGED_ATTENTION = Op(
    name="paged_attention",
    reference=paged_attention,
    versions=(
        in_triton("paged.paged_attention_triton", "paged_attention", refuses=refuses),
        Version(name="sdpa", run=by_sdpa, refuses=_not_one_by_one),
    ),
    inputs=_inputs,
    work=_work,
    small=_small,
    cases={
        "decode 256 × 1k": PagedCase(batch=256, context=1024),
        "decode 256 × 1k, 2 KV heads": PagedCase(batch=256, context=1024, heads=16, kv_heads=2),
        "decode 256 × 128 to 1k": PagedCase(batch=256, context=1024, heads=16, ragged=True),
        "decode 256 × 2k, group 2, pages of 64": PagedCase(batch=256, context=2048, heads=16, page=64),
        "decode 256 × 1k, fp8 cache": PagedCase(batch=256, context=1024, cache="fp8"),
        "decode 256 × 4k ragged": PagedCase(batch=256, context=4096, ragged=True),
        "decode 256 × 8k, group 8": PagedCase(batch=256, context=8192, heads=64),
        "decode 1 × 32k": PagedCase(batch=1, context=32768),
        "gpt-oss, decode 256 × 1k": PagedCase(batch=256, context=1024, heads=64, head_dim=64, window=128, sinks=True),
        "llama 4, decode 64 × 12k": PagedCase(batch=64, context=12288, heads=40, chunk=8192),
        "chunk of 2k at 16k": PagedCase(batch=1, context=16384, queries=2048),
    },
)
