"""C++ kernels between the GEMMs of a layer: the torch definitions, for every option they take."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.native import token_kernels
from armillary.kernels.norm.norm import add_norm, norm
from armillary.kernels.paged.paged_attention import PagedBatch, by_heads
from armillary.kernels.paged.qkv_to_cache import QkvOptions, attend_tokens, can_attend, qkv_cache
from armillary.kernels.pointwise.activation import activate

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.mark.parametrize(("rows", "columns"), [(1, 768), (5, 33), (70, 512), (0, 64), (1, 3)])
@pytest.mark.parametrize("plus_one", [False, True])
def test_norms(rows: int, columns: int, plus_one: bool) -> None:
    x, residual, weight = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns)
    for weighted in (weight, None):
        arguments = weighted, None, 1e-5, "rms", plus_one
        assert relative_error(token_kernels.norm(x, *arguments), norm(x, *arguments)) < 1e-6
        ours, wanted = token_kernels.add_norm(x, residual, *arguments), add_norm(x, residual, *arguments)
        assert relative_error(ours[0], wanted[0]) < 1e-6
        assert torch.equal(ours[1], wanted[1])


def test_what_the_kernels_have_not_goes_through_torch() -> None:
    x, weight, bias = torch.randn(4, 48), torch.randn(48), torch.randn(48)
    assert torch.equal(token_kernels.norm(x, weight, bias, 1e-5, "layer"), norm(x, weight, bias, 1e-5, "layer"))
    half = x.bfloat16()
    assert torch.equal(token_kernels.norm(half, None, None, 1e-5), norm(half, None, None, 1e-5))
    assert torch.equal(token_kernels.activate(x, "gelu", True), activate(x, "gelu", True))


@pytest.mark.parametrize("shape", [(1, 4096), (7, 70), (64, 2048), (0, 8)])
def test_gated_silu(shape: tuple[int, int]) -> None:
    x = torch.randn(*shape) * 20
    ours, wanted = token_kernels.activate(x, "silu", True), activate(x, "silu", True)
    assert ours.shape == wanted.shape
    assert relative_error(ours, wanted) < 1e-6


def test_gated_silu_of_extreme_gates() -> None:
    x = torch.tensor([[1e30, 2.0, -1e4, 2.0, 0.0, 3.0, -88.0, 1.0] * 4])
    assert torch.allclose(token_kernels.activate(x, "silu", True), activate(x, "silu", True), atol=1e-30)


LENGTHS = (1, 9, 40)


def tokens(
    heads: int = 2, group: int = 2, dim: int = 32, rotated: int = 16, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Sequences whose pages are not in order; the second token's key is not written."""
    pages, size = 14, 4
    cache = by_heads((pages, 2, heads, size, dim), dtype, torch.device("cpu"))
    cache.copy_(torch.randn(cache.shape))
    order, tables = torch.randperm(pages), torch.zeros(3, 10, dtype=torch.int32)
    tables[0, :1], tables[1, :3], tables[2] = order[:1], order[1:4], order[4:]
    places = [(tables[i, (length - 1) // size], (length - 1) % size) for i, length in enumerate(LENGTHS)]
    slots = torch.tensor([int(page) * size + place for page, place in places])
    slots[1] = -1
    angles = torch.randn(3, rotated)
    batch = PagedBatch(
        tables_BP=tables, starts=torch.arange(4).int(), lengths_B=torch.tensor(LENGTHS).int(), max_query=1
    )
    qkv = torch.randn(3, heads * (group + 2) * dim)
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    return [qkv, cache, slots, cos, sin, QkvOptions(), batch, AttentionOptions()]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one query head": {"group": 1, "dim": 64, "rotated": 32},
    "no positions": {"rotated": 0},
    "bf16 cache": {"dtype": torch.bfloat16},
    "neighbours are rotated": {"heads_options": {"interleaved": True}},
    "norms": {"norms": True},
    "norms of 1 + w": {"norms": True, "heads_options": {"plus_one": True}},
    "window": {"options": {"window": 6}},
    "sinks and a scale": {"options": {"scale": 0.3, "sinks_N": torch.tensor([0.5, -1.0, 2.0, 0.0])}},
}


@pytest.mark.parametrize("name", CASES)
def test_attention_of_new_tokens(name: str) -> None:
    torch.manual_seed(0)
    case = dict(CASES[name])
    extra, norms, options = case.pop("heads_options", {}), case.pop("norms", False), case.pop("options", {})
    given = tokens(**case)
    if norms:
        dim = case.get("dim", 32)
        extra |= {"norm": "rms", "q_weight": torch.randn(dim), "k_weight": torch.randn(dim)}
    given[5], given[7] = replace(given[5], **extra), replace(given[7], **options)
    assert token_kernels._takes(given[0], given[1], given[3], given[5])
    if given[1].dtype == torch.float32:
        assert can_attend(given[0], given[1], given[3], given[5], given[6], given[7])
    caches = given[1].clone(), given[1].clone()
    ours, wanted = (
        run(given[0], cache, *given[2:])
        for run, cache in zip((token_kernels.attend_tokens, attend_tokens), caches, strict=True)
    )
    assert relative_error(ours, wanted) < (1e-5 if given[1].dtype == torch.float32 else 1e-2)
    assert relative_error(*caches) < 1e-6, "keys and values are in the cache, and nothing else has changed"


@pytest.mark.parametrize("rotated", [16, 8, 0])
def test_projections_of_many_tokens(rotated: int) -> None:
    given = tokens(rotated=rotated)
    caches = given[1].clone(), given[1].clone()
    runs = token_kernels.qkv_cache, qkv_cache
    ours, wanted = (run(given[0], cache, *given[2:6])[0] for run, cache in zip(runs, caches, strict=True))
    assert ours.shape == wanted.shape
    assert relative_error(ours, wanted) < 1e-6
    assert relative_error(*caches) < 1e-6


def test_options_of_chunks_go_through_torch() -> None:
    given = tokens()
    given[2] = given[2].clamp_min(0)
    given[7] = AttentionOptions(chunk=8)
    ours = token_kernels.attend_tokens(given[0], given[1].clone(), *given[2:])
    assert relative_error(ours, attend_tokens(*given)) < 1e-5


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    token_kernels.agree.cache_clear()
    assert token_kernels.agree()
    token_kernels.agree.cache_clear()
    monkeypatch.setattr(token_kernels, "activate", lambda x, *_: torch.zeros(len(x), x.shape[1] // 2))
    assert not token_kernels.agree()
    token_kernels.agree.cache_clear()
