"""A batch over a cache of latents, made by hand: what no sequence owns is NaN, so that reading it shows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.kernels.paged.paged_attention import PagedBatch


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a batch; `queries` and `lengths` have an entry a sequence."""

    queries: list[int]
    lengths: list[int]
    heads: int = 4
    rank: int = 32
    rope_dim: int = 16
    nope_dim: int = 16
    v_dim: int = 16
    page: int = 16
    padding: int = 0
    """tokens behind the last sequence"""

    @property
    def num_tokens(self) -> int:
        return sum(self.queries) + self.padding


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arguments of the latent kernels."""

    q_TNC: Tensor
    q_TNP: Tensor
    q_TNR: Tensor
    cache: Tensor
    up_NUC: Tensor
    batch: PagedBatch
    rows: list[Tensor]
    """[S, C + R] of each sequence, as it lies in the cache"""
    scale: float = 0.2

    def decode(self) -> tuple[Tensor, Tensor, Tensor, PagedBatch, float]:
        return self.q_TNC, self.q_TNR, self.cache, self.batch, self.scale

    def prefill(self) -> tuple[Tensor, Tensor, Tensor, Tensor, PagedBatch, float]:
        return self.q_TNP, self.q_TNR, self.cache, self.up_NUC, self.batch, self.scale


def batch(shape: Shape, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    num_rows, width = len(shape.queries), shape.rank + shape.rope_dim
    per_row = max([-(-length // shape.page) for length in shape.lengths], default=0) + 1
    num_pages = num_rows * per_row + 2
    tables = torch.randperm(num_pages, generator=generator)[: num_rows * per_row].view(num_rows, per_row).int()
    rows = [normal(length, width) for length in shape.lengths]
    flat = torch.full((num_pages * shape.page, width), torch.nan, dtype=dtype, device=device)
    for table, own in zip(tables, rows, strict=True):
        key = torch.arange(len(own))
        flat[table[key // shape.page].long() * shape.page + key % shape.page] = own
    q = normal(shape.num_tokens, shape.heads, shape.nope_dim + shape.rope_dim)  # parts of one projection
    return Inputs(
        q_TNC=normal(shape.heads, shape.num_tokens, shape.rank).transpose(0, 1),  # as a batched GEMM leaves them
        q_TNP=q[..., : shape.nope_dim],
        q_TNR=q[..., shape.nope_dim :],
        cache=flat.view(num_pages, shape.page, width),
        up_NUC=normal(shape.heads, shape.nope_dim + shape.v_dim, shape.rank) * shape.rank**-0.5,
        batch=PagedBatch(
            tables_BP=tables.to(device),
            starts=torch.tensor([0, *shape.queries]).cumsum(0).int().to(device),
            lengths_B=torch.tensor(shape.lengths, dtype=torch.int32, device=device),
            max_query=max([*shape.queries, 1]),
        ),
        rows=rows,
    )


def expected(shape: Shape, given: Inputs) -> Tensor:
    """[T, N, V], query by query, as the paper writes it: every head's keys and values from the latent."""
    out = given.q_TNP.new_zeros(shape.num_tokens, shape.heads, shape.v_dim)
    up_k, up_v = given.up_NUC[:, : shape.nope_dim], given.up_NUC[:, shape.nope_dim :]
    token = 0
    for count, length, rows in zip(shape.queries, shape.lengths, given.rows, strict=True):
        for query in range(count):
            seen = rows[: max(0, length - count + query + 1)]
            for head in range(shape.heads if len(seen) else 0):
                key = torch.cat((seen[:, : shape.rank] @ up_k[head].T, seen[:, shape.rank :]), 1)
                q = torch.cat((given.q_TNP[token, head], given.q_TNR[token, head]))
                weight = (key @ q * given.scale).softmax(0)
                out[token, head] = weight @ (seen[:, : shape.rank] @ up_v[head].T)
            token += 1
    return out
