"""A batch over a paged cache, made by hand: what no sequence owns is NaN, so that reading it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.paged.paged_attention import PagedBatch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a batch; `queries` and `lengths` have an entry a sequence."""

    queries: list[int]
    lengths: list[int]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page: int = 16
    padding: int = 0
    """tokens behind the last sequence"""


def batch(
    shape: Shape, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, **options: Any
) -> tuple[Tensor, Tensor, PagedBatch, AttentionOptions]:
    """Arguments of `paged_attention`, with these options."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(shape.queries)
    per_row = max([-(-length // shape.page) for length in shape.lengths], default=0) + 1
    num_pages = rows * per_row + 2
    cache = torch.randn(num_pages, 2, shape.kv_heads, shape.page, shape.head_dim, generator=generator)
    tables = torch.randperm(num_pages, generator=generator)[: rows * per_row].view(rows, per_row).int()
    cache.permute(0, 3, 1, 2, 4)[~_owned(tables, shape, num_pages)] = torch.nan
    starts = torch.tensor([0, *shape.queries]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + shape.padding, shape.kv_heads * shape.group, shape.head_dim, generator=generator)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32)
    q, cache = q.to(device, dtype), cache.to(device, dtype)
    places = PagedBatch(
        tables_BP=tables.to(device),
        starts=starts.to(device),
        lengths_B=lengths.to(device),
        max_query=max([*shape.queries, 1]),
    )
    return q, cache, places, AttentionOptions(**({"scale": shape.head_dim**-0.5} | options))


def _owned(tables: Tensor, shape: Shape, num_pages: int) -> Tensor:
    owned = torch.zeros(num_pages, shape.page, dtype=torch.bool)
    for row, length in enumerate(shape.lengths):
        for token in range(length):
            owned[tables[row, token // shape.page], token % shape.page] = True
    return owned


def wide(inputs: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def error(mine: Tensor, right: Tensor) -> float:
    """Relative to the norm of what is right."""
    return float((mine.to(right.dtype) - right).norm() / right.norm().clamp_min(1e-12)) if right.numel() else 0.0
