"""One token through a whole model in one launch: the logits and the cache that op after op gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.kernels import whole_step as under_test
from armillary.kernels.paged_attention import PagedBatch, PagedOptions, paged_attention
from armillary.kernels.qkv_cache import QkvOptions, qkv_cache
from armillary.kernels.small_linear import reference as linear
from armillary.kernels.whole_step import StepLayer, StepModel, StepPlace, Tuning, WholeStep, refuses
from tests.kernels.interpreter import needs_interpreter

PAGE, PAGES, VOCAB, ROW = 4, 40, 37, 1
PLACE = StepPlace(row=0, position=1, angle=2, slot=3, length=4)


def drawn(
    *, hidden: int, heads: int, kv_heads: int, dim: int, ffn: int, qk_norm: bool, dtype: torch.dtype = torch.float32,
    layers: int = 2, device: str = "cpu",
) -> tuple[StepModel, Tensor]:  # fmt: skip
    """A model, and a cache that is full of others' keys."""
    generator = torch.Generator().manual_seed(hidden + ffn)

    def normal(*shape: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * factor).to(device, dtype)

    def layer() -> StepLayer:
        inner, wide = kv_heads * (heads // kv_heads + 2) * dim, heads * dim
        near_one = [1 + 0.1 * normal(size) for size in (hidden, hidden, dim, dim)]
        return StepLayer(
            qkv=normal(inner, hidden, factor=hidden**-0.5), out=normal(hidden, wide, factor=wide**-0.5),
            up=normal(2 * ffn, hidden, factor=hidden**-0.5), down=normal(hidden, ffn, factor=ffn**-0.5),
            attention_norm=near_one[0], mlp_norm=near_one[1], q_norm=near_one[2] if qk_norm else None,
            k_norm=near_one[3] if qk_norm else None,
        )  # fmt: skip

    angles = (torch.rand(PAGE * PAGES, dim // 2, generator=generator) * 6).to(device)
    model = StepModel(
        layers=[layer() for _ in range(layers)], embedding=normal(VOCAB, hidden), norm=1 + 0.1 * normal(hidden),
        output=normal(VOCAB, hidden, factor=hidden**-0.5), cos=angles.cos(), sin=angles.sin(), heads=heads,
        scale=dim**-0.5, eps=1e-5, qk_eps=1e-6,
    )  # fmt: skip
    return model, normal(layers, PAGES, 2, kv_heads, PAGE, dim)


def by_ops(model: StepModel, blocks: Tensor, table: Tensor, length: int, token: int) -> Tensor:
    """Logits [1, V], and keys and values into the cache, by the ops' references."""
    device, at = blocks.device, length - 1
    slot = torch.tensor([int(table[at // PAGE]) * PAGE + at % PAGE], device=device)
    batch = PagedBatch(tables_BP=table[None], starts=torch.tensor([0, 1], dtype=torch.int32, device=device),
                       lengths_B=torch.tensor([length], dtype=torch.int32, device=device), max_query=1)  # fmt: skip
    x = model.embedding[token][None]
    for layer, cache in zip(model.layers, blocks, strict=True):
        qkv = linear(x, layer.qkv, layer.attention_norm, None, model.eps)
        how = QkvOptions(norm="none" if layer.q_norm is None else "rms", q_weight=layer.q_norm, k_weight=layer.k_norm,
                         eps=model.qk_eps)  # fmt: skip
        q, _ = qkv_cache(qkv, cache, slot, model.cos[at][None], model.sin[at][None], how)
        x = linear(paged_attention(q, cache, batch, PagedOptions(scale=model.scale)).flatten(1), layer.out, None, x)
        inner = linear(x, layer.up, layer.mlp_norm, None, model.eps, True)
        x = linear(inner, layer.down, None, x)
    return linear(x, model.output, model.norm, None, model.eps)


def assert_agrees(model: StepModel, blocks: Tensor, tuning: Tuning, lengths: list[int], tolerance: float) -> None:
    device, generator = blocks.device, torch.Generator().manual_seed(3)
    tables = torch.stack([torch.randperm(PAGES, generator=generator) for _ in range(2)]).int().to(device)
    tokens = torch.randint(0, VOCAB, (2, PAGE * PAGES), generator=generator).int().to(device)
    mine = blocks.clone()
    step = WholeStep(model, mine, tables, tokens, PLACE, tuning)
    for length in lengths:
        at = length - 1
        slot = int(tables[ROW, at // PAGE]) * PAGE + at % PAGE
        others = mine.clone()
        expected = by_ops(model, others, tables[ROW], length, int(tokens[ROW, at]))
        packed = torch.tensor([ROW, at, at, slot, length], dtype=torch.int32, device=device)
        step.logits.fill_(float("nan"))
        found = step(packed)
        assert float((found - expected).norm() / expected.norm()) < tolerance, length
        assert float((mine - others).abs().max()) < 8 * tolerance, length


SHAPES: list[dict[str, Any]] = [
    {"hidden": 48, "heads": 4, "kv_heads": 2, "dim": 32, "ffn": 80, "qk_norm": True},
    {"hidden": 64, "heads": 6, "kv_heads": 2, "dim": 32, "ffn": 40, "qk_norm": False},
]  # fmt: skip


@needs_interpreter
def test_logits_and_cache_are_those_of_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "num_programs", lambda x, per: 2)
    shape = {"hidden": 16, "heads": 3, "kv_heads": 1, "dim": 32, "ffn": 24, "qk_norm": True}
    assert_agrees(*drawn(**shape), Tuning(keys=16, few=1), [17, 40], 2e-6)  # everybody adds up, and one for all


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_with_more_heads_than_programs_and_fewer(shape: dict[str, Any], monkeypatch: Any) -> None:
    for programs in (2, 7):
        monkeypatch.setattr(under_test, "num_programs", lambda x, per, programs=programs: programs)
        assert_agrees(*drawn(**shape), Tuning(keys=16, few=2), [1, 16, 65, 130], 2e-6)


@needs_interpreter
@pytest.mark.slow
def test_padding_writes_nothing() -> None:
    model, blocks = drawn(**SHAPES[0])
    step = WholeStep(model, blocks.clone(), torch.zeros(2, PAGES, dtype=torch.int32), torch.zeros(2, 8).int(), PLACE)
    found = step(torch.tensor([1, 0, 0, -1, 0], dtype=torch.int32))
    assert torch.equal(step.blocks, blocks) and bool(found.isfinite().all())


def test_what_it_cannot_do_is_said() -> None:
    model, blocks = drawn(**SHAPES[0])
    assert refuses(model, blocks) is None
    assert "dtype" in str(refuses(model, blocks.half()))
    odd, odd_blocks = drawn(hidden=48, heads=4, kv_heads=2, dim=24, ffn=80, qk_norm=False)
    assert "dims" in str(refuses(odd, odd_blocks))
    other = drawn(**SHAPES[0] | {"ffn": 96})[0]
    assert "differ" in str(refuses(replace(model, layers=[*model.layers, other.layers[0]]), blocks))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, {"hidden": 512, "heads": 8, "kv_heads": 4, "dim": 128, "ffn": 1408,
                                             "qk_norm": True, "layers": 9}])  # fmt: skip
def test_programs_that_wait_for_each_other_agree(shape: dict[str, Any], dtype: torch.dtype) -> None:
    model, blocks = drawn(**shape, dtype=dtype, device="cuda")
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for tuning in (Tuning(), Tuning(keys=16, few=2, ahead=0, warps=4)):
        assert_agrees(model, blocks, tuning, [1, 16, 17, 64, 65, 130, 160], tolerance)
