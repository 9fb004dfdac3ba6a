"""2-simplicial attention over a paged KV cache whose layers hold two keys and two values per token and KV head.

The cache is that of `paged_attention` with twice the heads: [pages, 2, 2·K, page size, D], the two keys of a KV head
next to each other, and its two values.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.op import Case, Op, OpWork, in_triton
from armillary.kernels.paged.paged_attention import PagedBatch, attend_by_sequence
from armillary.kernels.simplicial.simplicial import LOGITS_STD, by_blocks
from armillary.spec.arithmetic.attention_ops import AttentionShape, simplicial_attention

# T packed tokens, N query heads, S keys, J = 2·K heads of the cache, D head dim


def write_pairs(k_TJD: Tensor, v_TJD: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Keys and values of each token into its slot (page number · page size + place); those of negative slots go to
    page 0, which no sequence has."""
    page, place = (slots_T.clamp_min(0) // cache.shape[3]).long(), slots_T.clamp_min(0).long() % cache.shape[3]
    for index, x_TJD in enumerate((k_TJD, v_TJD)):
        cache[:, index].transpose(1, 2)[page, place] = x_TJD.to(cache.dtype)


def paged_simplicial(q_TND: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
    """out [T, N, D]: each query sees the pairs of its sequence in its two windows. Tokens after the last sequence give
    zeros."""
    return attend_by_sequence(q_TND, cache, replace(batch), options, _attend)


def _attend(q_TND: Tensor, k_SJD: Tensor, v_SJD: Tensor, options: AttentionOptions) -> Tensor:
    """Only the keys of the windows are read: pages before them may hold another sequence by now."""
    unseen = max(0, len(k_SJD) - len(q_TND) - max(options.pair_windows) + 1)
    return by_blocks(q_TND[None], k_SJD[None, unseen:], v_SJD[None, unseen:], options)[0]


# --- the op


@dataclass(frozen=True, kw_only=True)
class PagedSimplicialCase(Case):
    """A batch of sequences over a cache."""

    batch: int  # sequences
    context: int  # tokens of a sequence, those of this call included
    queries: int = 1  # new tokens per sequence
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window_1: int = 32
    window_2: int = 512
    page: int = 16


def _inputs(case: PagedSimplicialCase, generator: torch.Generator) -> tuple[Any, ...]:
    device, normal = generator.device, partial(case.normal, generator)
    per_row = -(-case.context // case.page)
    order = torch.randperm(case.batch * per_row, generator=generator, device=device, dtype=torch.int32)
    batch = PagedBatch(
        tables_BP=order.view(case.batch, per_row),
        starts=torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.queries,
        lengths_B=torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        max_query=case.queries,
    )
    cache = normal(case.batch * per_row, 2, 2 * case.kv_heads, case.page, case.head_dim)
    options = AttentionOptions(pair_windows=(case.window_1, case.window_2))
    return normal(case.batch * case.queries, case.heads, case.head_dim) * LOGITS_STD, cache, batch, options


def _work(case: PagedSimplicialCase) -> OpWork:
    shape = AttentionShape(heads=case.heads, kv_heads=case.kv_heads, qk_dim=case.head_dim, v_dim=case.head_dim)
    spans = [(case.queries, case.context)] * case.batch
    sizes: dict[str, Any] = {"window_1": case.window_1, "window_2": case.window_2, "dtype": case.dtype}
    return OpWork.of(simplicial_attention("simplicial", shape, spans, **sizes), ceiling="gemm")


def _not_own(case: PagedSimplicialCase) -> str | None:
    if case.head_dim > 128:
        return "heads are too wide for its registers"
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"no kernel for {case.dtype}"


PAGED_SIMPLICIAL = Op(
    name="paged_simplicial",
    reference=paged_simplicial,
    versions=(in_triton("simplicial.paged_simplicial_triton", "paged_simplicial", refuses=_not_own),),
    inputs=_inputs,
    work=_work,
    small=lambda case: replace(case, batch=min(case.batch, 3), context=min(case.context, 640)),
    cases={
        "decode 64 × 4k": PagedSimplicialCase(batch=64, context=4096),
        "chunk of 2k at 8k": PagedSimplicialCase(batch=1, context=8192, queries=2048),
    },
)
