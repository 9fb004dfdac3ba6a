"""One token of each sequence in one launch: what the cache write and attention over pages give one after the other."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.paged_attention import PagedBatch, PagedOptions, paged_attention
from armillary.kernels.qkv_cache import QkvOptions, qkv_cache
from tests.kernels.interpreter import needs_interpreter


def check(
    device: str, dtype: torch.dtype, lengths: list[int], *, group: int, heads: int, size: int, norm: str
) -> float:
    from armillary.kernels.token_attention import fits, token_attention

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows, page = len(lengths), 16
    pages = -(-max(lengths) // page)
    tables = 1 + torch.randperm(rows * pages, generator=generator, device=device).view(rows, pages).to(torch.int32)
    cache = normal(rows * pages + 1, 2, heads, page, size)
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
    last = (lengths_B - 1).clamp_min(0).long()
    slots = tables.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    slots = torch.where(lengths_B > 0, slots, -1)
    angles = torch.rand(rows, size // 2, generator=generator, device=device) * 6
    weights = {"q_weight": normal(size), "k_weight": normal(size)} if norm == "rms" else {}
    how, options = QkvOptions(norm=norm, **weights), PagedOptions(scale=size**-0.5)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    batch = PagedBatch(tables_BP=tables, starts=starts, lengths_B=lengths_B, max_query=1)
    qkv, arrived = normal(rows, heads * (group + 2) * size), torch.zeros(rows * heads, dtype=torch.int32, device=device)
    own, theirs = cache.clone(), cache.clone()
    assert fits(cache, options, how, size)
    with torch.no_grad():
        for _ in range(2):  # twice: what counts arrivals must be as it was
            mine = token_attention(qkv, own, slots, angles.cos(), angles.sin(), how, batch, options, arrived)
        q, _ = qkv_cache(qkv, theirs, slots, angles.cos(), angles.sin(), how)
        right = paged_attention(q, theirs, batch, options).flatten(1)
    assert not arrived.any() and (own.float() - theirs.float()).norm() <= 1e-2 * theirs.float().norm()
    return float((mine.float() - right.float()).norm() / right.float().norm())


@needs_interpreter
@pytest.mark.parametrize(("lengths", "group", "heads", "size", "norm"), [
    ([1, 70, 0, 513], 2, 2, 32, "rms"), ([600, 3], 5, 1, 64, "none"), ([64, 65, 66], 1, 3, 32, "rms"),
])  # fmt: skip
def test_it_agrees(lengths: list[int], group: int, heads: int, size: int, norm: str) -> None:
    assert check("cpu", torch.float32, lengths, group=group, heads=heads, size=size, norm=norm) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lengths", [[1], [257], [200, 0, 1500, 33], [40_000], [1000] * 8])
@pytest.mark.parametrize(("group", "heads", "size", "norm"), [(4, 8, 128, "rms"), (8, 4, 64, "none")])
def test_it_agrees_on_a_gpu(lengths: list[int], group: int, heads: int, size: int, norm: str) -> None:
    assert check("cuda", torch.bfloat16, lengths, group=group, heads=heads, size=size, norm=norm) < 1e-2
