"""Attention of absorbed queries over a paged cache of latents (multi-head latent attention, DeepSeek-V2, arXiv
2405.04434, section 2.1).

The cache of a layer is one tensor [pages, page size, C + R]: of each token the normed latent, and behind it the key
part with rotary positions that all heads share. A query that was multiplied by its head's key up-projection scores the
latent itself, so every head sees one key, the whole row, and one value, its first C columns. The weighted sum of
latents goes through the head's value up-projection afterwards (`latent_attention`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions, reference
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, Ceiling, Op, OpWork, in_triton
from armillary.kernels.paged.paged_attention import PagedBatch, pages_of

# T packed tokens, B sequences, N heads, C rank of the latent, R dims with rotary positions, S keys


def latent_decode(q_TNC: Tensor, q_TNR: Tensor, cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """[T, N, C]: sums of latents, weighted by softmax(scale · (q_C · latent + q_R · key)); each query sees the rows of
    its sequence up to its own. Tokens after the last sequence, and of sequences of length 0, give zeros."""
    out = torch.zeros_like(q_TNC, memory_format=torch.contiguous_format)
    options, rank = AttentionOptions(scale=scale), q_TNC.shape[-1]
    for b, (begin, end, length) in enumerate(replace(batch).spans):
        if begin < end and length:
            rows_SE = widen(latent_rows(cache, batch.tables_BP[b], length))
            q_TNE = widen(torch.cat((q_TNC[begin:end], q_TNR[begin:end]), dim=-1))
            k_S1E = rows_SE[:, None]
            out[begin:end] = reference(q_TNE[None], k_S1E[None], k_S1E[None, ..., :rank], options)[0].to(out.dtype)
    return out


def latent_rows(cache: Tensor, table_P: Tensor, length: int) -> Tensor:
    """[S, C + R]: the rows of a sequence, from its pages."""
    pages = pages_of(table_P, length, cache.shape[1])
    gathered = cache[pages] if isinstance(pages, slice) else cache.index_select(0, pages)
    return gathered.flatten(0, 1)[:length]


@dataclass(frozen=True, kw_only=True)
class LatentCase(Case):
    """A batch of sequences over a cache of latents."""

    batch: int  # sequences
    context: int  # tokens of the longest sequence, those of this call included
    queries: int = 1  # new tokens per sequence
    heads: int = 16
    rank: int = 512
    rope_dim: int = 64
    page: int = 64
    ragged: bool = False  # lengths between an eighth of the context and all of it

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        least = max(self.queries, self.context // 8)
        return [
            self.context - (self.context - least) * (i * 7919 % self.batch) // self.batch for i in range(self.batch)
        ]

    def visible_keys(self) -> int:
        """Keys that queries see, all queries together."""
        return self.queries * sum(self.lengths()) - self.batch * (self.queries * (self.queries - 1) // 2)


def random_cache(case: LatentCase, generator: torch.Generator) -> Tensor:
    pages = case.batch * -(-case.context // case.page)
    shape = (pages, case.page, case.rank + case.rope_dim)
    cache = torch.empty(shape, dtype=case.torch_dtype, device=generator.device)
    for chunk in cache.split(max(1, (1 << 28) // max(1, cache[:1].numel()))):  # in pieces: randn draws in fp32
        chunk.copy_(case.normal(generator, *chunk.shape))
    return cache


def random_batch(case: LatentCase, generator: torch.Generator) -> PagedBatch:
    """Every sequence has pages of its own, in random order."""
    device, per_row = generator.device, -(-case.context // case.page)
    order = torch.randperm(case.batch * per_row, generator=generator, device=device, dtype=torch.int32)
    return PagedBatch(
        tables_BP=order.view(case.batch, per_row),
        starts=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries,
        lengths_B=torch.tensor(case.lengths(), dtype=torch.int32, device=device),
        max_query=case.queries,
    )


def _inputs(case: LatentCase, generator: torch.Generator) -> tuple[Any, ...]:
    normal = partial(case.normal, generator, case.batch * case.queries, case.heads)
    scale = (case.rank + case.rope_dim) ** -0.5
    return normal(case.rank), normal(case.rope_dim), random_cache(case, generator), random_batch(case, generator), scale


_BALANCE = 180  # FLOPs per byte from which it is bound by arithmetic: bf16 GEMM over read bandwidth of an H200


def _work(case: LatentCase) -> OpWork:
    """Rows are read once per sequence; FLOPs of the visible pairs."""
    size, width = case.torch_dtype.itemsize, case.rank + case.rope_dim
    queries = case.batch * case.queries * case.heads * (width + case.rank)
    moved = size * (sum(case.lengths()) * width + queries)
    flops = 2.0 * case.heads * (width + case.rank) * case.visible_keys()
    ceiling: Ceiling = "read" if flops <= _BALANCE * moved else "gemm"
    return OpWork(flops=flops, bytes=float(moved), ceiling=ceiling)


def small_batch(case: LatentCase) -> LatentCase:
    """Fewer and shorter sequences for which the kernels compile in the same way."""
    batch, least = (37, 768) if case.batch > 32 else (min(case.batch, 5), 2048)
    context = min(case.context, max(least, case.queries + 256))
    return replace(case, batch=batch, context=context, queries=min(case.queries, context))


def refuses(case: LatentCase) -> str | None:
    if case.rank > 512 or case.rope_dim > 128:
        return f"a row of {case.rank} + {case.rope_dim} is beyond 512 + 128"
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"no kernel for {case.dtype}"


LATENT_DECODE = Op(
    name="latent_decode",
    reference=latent_decode,
    versions=(in_triton("latent.latent_decode_triton", "latent_decode", refuses=refuses),),
    inputs=_inputs,
    work=_work,
    small=small_batch,
    cases={
        "16 heads, 64 × 8k": LatentCase(batch=64, context=8192),
        "128 heads, 64 × 8k": LatentCase(batch=64, context=8192, heads=128),
        "16 heads, 64 × 1k to 8k": LatentCase(batch=64, context=8192, ragged=True),
        "16 heads, 1 × 32k": LatentCase(batch=1, context=32768),
        "128 heads, 64 × 4k, 2 queries": LatentCase(batch=64, context=4096, heads=128, queries=2),
    },
)
