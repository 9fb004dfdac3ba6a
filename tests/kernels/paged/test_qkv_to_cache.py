"""Split, QK norm, rotation and cache write in one: the kernel against plain torch, and that against the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.paged.paged_attention import by_heads
from armillary.kernels.paged.qkv_to_cache import QKV_CACHE, QkvCase, QkvOptions, qkv_cache, unpadded
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.pages import error, wide

PAGES, PAGE = 5, 4


def fast():  # type: ignore[no-untyped-def]
    return QKV_CACHE.version("triton").load()  # type: ignore[union-attr]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of every kind; the last tokens' slots are -1 now and then."""
    tokens, heads, group = draw(st.integers(0, 7)), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 4, 5]))
    size = draw(st.sampled_from([16, 64, 80]))
    rotated = draw(st.sampled_from([0, size // 4, size // 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    qkv = normal(tokens, heads * (group + 2) * size + 8)[:, :-8]  # rows need not be adjacent
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:tokens]
    slots[draw(st.integers(0, 7)) :] = -1
    angles = normal(tokens, rotated)
    turns = (angles.cos(), angles.sin()) if rotated else (None, None)
    weights = [normal(size) if draw(st.booleans()) else None for _ in range(2)]
    options = QkvOptions(
        clip=draw(st.sampled_from([None, 1.5])),
        norm=draw(st.sampled_from(["none", "rms", "layer"])),
        q_weight=weights[0],
        k_weight=weights[1],
        eps=1e-5,
        plus_one=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        scales_2K=draw(st.sampled_from([None, torch.full((2, heads), 0.5)])),
        q_scale_T=normal(tokens).abs() if draw(st.booleans()) else None,
    )
    return qkv, normal(PAGES, 2, heads, PAGE, size), slots, *turns, options


@needs_interpreter
@settings(max_examples=8, deadline=None)
@given(call=calls())
def test_the_kernel_agrees(call: tuple[Any, ...]) -> None:
    right_q, right_cache = qkv_cache(*wide(call))
    before = call[1].clone()
    q, cache = fast()(*call)
    assert cache is call[1]
    assert error(q, right_q) < 1e-5 and error(cache, right_cache) < 1e-5
    assert error(cache - before, right_cache - before) < 1e-5  # what was not asked for was not written


@settings(max_examples=30, deadline=None)
@given(call=calls(), together=st.booleans())
def test_fewer_calls_give_the_same(call: tuple[Any, ...], together: bool) -> None:
    right_q, right_cache = qkv_cache(call[0], call[1].clone(), *call[2:])
    given_cache = by_heads(call[1].shape, call[1].dtype, call[1].device).copy_(call[1]) if together else call[1]
    q, cache = unpadded(call[0], given_cache, *call[2:])
    assert cache is given_cache
    assert error(q, right_q) < 1e-6 and error(cache, right_cache) < 1e-6


@needs_interpreter
def test_nan_stays_in_its_head_and_token() -> None:
    qkv = torch.randn(2, 2 * 3 * 16)
    qkv[1, 5] = torch.nan  # token 1, KV head 0, its query
    q, cache = fast()(qkv, torch.zeros(2, 2, 2, 4, 16), torch.tensor([0, 1]), None, None, QkvOptions(norm="rms"))
    assert q[1, 0].isnan().all()
    assert not q[0].isnan().any() and not q[1, 1].isnan().any() and not cache.isnan().any()


@needs_interpreter
def test_nan_is_written_to_a_cache_in_fp8() -> None:
    qkv = torch.randn(2, 2 * 3 * 16)
    qkv[1, 16 + 5] = torch.nan  # token 1, KV head 0, its key
    cache = torch.zeros(2, 2, 2, 4, 16, dtype=torch.float8_e4m3fn)
    _, cache = fast()(qkv, cache, torch.tensor([0, 1]), None, None, QkvOptions(scales_2K=torch.full((2, 2), 1e-3)))
    assert int(cache.float().isnan().sum()) == 1 and cache[0, 0, 0, 1, 5].float().isnan()
    assert cache[0, 0, 0, 0].float().abs().max() == 448  # what is too large is cut off


@torch.no_grad()
def test_it_is_what_the_model_does() -> None:
    from armillary.model.layers.attention import Attention
    from armillary.model.layers.attention_forms import plain
    from armillary.model.layers.rope import RotaryTable
    from armillary.spec.model import LayerKind, ModelConfig

    config = ModelConfig(
        hidden=32, layers=(LayerKind(),), heads=4, kv_heads=2, head_dim=16, ffn=64, vocab=32, context=64, qk_norm="head"
    )
    layer = Attention(config, LayerKind())
    torch.nn.init.normal_(layer.q_norm.weight)
    torch.nn.init.normal_(layer.k_norm.weight)
    x, positions = torch.randn(1, 6, 32), torch.arange(6)[None]
    turns = RotaryTable(config)(positions)
    seen: dict[str, torch.Tensor] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: Any) -> torch.Tensor:
        seen.update(q=q, k=k, v=v)
        return plain(layer, q, k, v, how)

    layer(x, turns, attend, 0)
    cos, sin = (part[0, :, 0] for part in turns[False])
    cache = torch.zeros(2, 2, 2, 4, 16)
    options = QkvOptions(norm="rms", q_weight=layer.q_norm.weight, k_weight=layer.k_norm.weight, eps=config.norm_eps)
    q, _ = qkv_cache(layer.qkv(x)[0], cache, torch.arange(6), cos, sin, options)
    assert error(q, seen["q"][0]) < 1e-6
    for index, name in enumerate(("k", "v")):
        assert error(cache[:, index].transpose(1, 2).flatten(0, 1)[:6], seen[name][0]) < 1e-6


def test_a_norm_over_all_heads_is_left_to_torch() -> None:
    triton = QKV_CACHE.version("triton")
    assert triton is not None and "all heads" in str(triton.refuses(QkvCase(tokens=1, all_heads=True)))
    options = QkvOptions(norm="rms", q_weight=torch.ones(2 * 2 * 16), k_weight=torch.ones(2 * 16), eps=0.0)
    qkv, cache = torch.randn(3, 2 * 4 * 16), torch.zeros(1, 2, 2, 4, 16)
    q, _ = qkv_cache(qkv, cache, torch.arange(3), None, None, options)
    assert torch.allclose(q.flatten(1).square().mean(-1), torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 3000])
def test_agreement_on_a_gpu(tokens: int, dtype: str, interleaved: bool) -> None:
    from armillary.kernels.core.agreement import check, expect

    case = QkvCase(tokens=tokens, dtype=dtype, interleaved=interleaved, rotary=64)
    generator = torch.Generator("cuda").manual_seed(0)
    expected = expect(QKV_CACHE, QKV_CACHE.inputs(case, generator), generator)
    found = check(fast(), QKV_CACHE, expected)
    assert found.agreed, found.why_not
