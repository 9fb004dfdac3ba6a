"""Experts for a few tokens: any routing, any size, agreeing with the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.moe.moe import (
    GROUPED_MOE,
    SMALL_MOE,
    MoECase,
    inputs,
    prefers_small,
    refuses,
    refuses_many,
    touched_experts,
)
from tests.kernels.interpreter import needs_interpreter

BASE = MoECase(tokens=1, hidden=48, ffn=24, experts=8, top_k=2, dtype="fp32", device="cpu")
CASES = {
    "one token": BASE,
    "some": replace(BASE, tokens=5),
    "experts that are no power of two": replace(BASE, tokens=8, experts=3, top_k=2),
    "gpt-oss": replace(BASE, tokens=3, score="softmax_topk", bias=True, activation="swiglu_clamped"),
    "gpt-oss, one token": replace(BASE, score="softmax_topk", bias=True, activation="swiglu_clamped", norm=False),
    "deepseek": replace(BASE, tokens=4, experts=12, score="sigmoid", selection_bias=True, groups=4, top_groups=2),
    "v2-lite": replace(BASE, tokens=2, experts=6, top_k=3, normalize=False, norm=False),
    "llama 4": replace(BASE, tokens=2, top_k=1, score="sigmoid", normalize=False, scale_input=True),
    "mxfp4": replace(BASE, tokens=3, hidden=96, ffn=64, packed="mxfp4", group=32),
    "int4": replace(BASE, tokens=2, hidden=96, ffn=64, packed="int4", group=64),
    "int4 with zeros, whole rows": replace(BASE, hidden=96, ffn=64, packed="int4", zeros=True),
    "int8 with zeros": replace(BASE, hidden=64, ffn=96, packed="int8", group=32, zeros=True),
    "int8, whole rows": replace(BASE, hidden=64, ffn=96, packed="int8"),
    "fp8 blocks": replace(BASE, hidden=160, ffn=64, packed="fp8", group=128),
    "nvfp4": replace(BASE, hidden=64, ffn=32, packed="nvfp4", group=16),
    "gpt-oss, mxfp4": replace(
        BASE,
        hidden=160,
        ffn=96,
        score="softmax_topk",
        bias=True,
        activation="swiglu_clamped",
        packed="mxfp4",
        group=32,
        norm=False,
    ),
    "llama 4, one token": replace(BASE, top_k=1, score="sigmoid", normalize=False, scale_input=True),
}


@needs_interpreter
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees(case: MoECase) -> None:
    from armillary.kernels.moe.small_moe_triton import small_moe

    assert refuses_many(case) is None
    arguments = inputs(case, torch.Generator().manual_seed(3))
    found = check(small_moe, SMALL_MOE, expect(SMALL_MOE, arguments, torch.Generator().manual_seed(5)))
    assert found.agreed, found.why_not


@needs_interpreter
def test_long_rows_are_read_in_steps() -> None:
    from armillary.kernels.moe.small_moe_triton import MoETiles, small_moe

    arguments = inputs(replace(BASE, hidden=100, ffn=70), torch.Generator().manual_seed(3))
    packed, bytes_each = (
        inputs(replace(BASE, hidden=128, ffn=64, experts=3, packed=kind, group=group), torch.Generator().manual_seed(3))
        for kind, group in (("mxfp4", 32), ("fp8", 128))
    )
    tiles = MoETiles(up_rows=4, up_depth=64, up_warps=1, down_rows=2, down_depth=32, down_warps=1)
    for given in (arguments, packed, bytes_each):
        expected = expect(SMALL_MOE, given, torch.Generator().manual_seed(5))
        found = check(lambda *each: small_moe(*each, tiles=tiles), SMALL_MOE, expected)
        assert found.agreed, found.why_not


def test_what_it_does_not_do() -> None:
    assert refuses(replace(BASE, packed="mxfp4", group=32)) == "experts in mxfp4 have rows of whole groups of 32"
    assert (
        refuses(replace(BASE, hidden=96, ffn=96, packed="int4", group=48))
        == "experts in int4 have groups of 48 columns"
    )
    assert refuses_many(replace(BASE, tokens=9)) == "it is for up to 8 tokens"
    assert refuses(replace(BASE, activation="gelu")) == "it has no gelu"
    assert refuses(replace(BASE, dtype="fp64"))


def test_touched_experts() -> None:
    assert touched_experts(1, 128, 8) == pytest.approx(8)
    assert touched_experts(10_000, 128, 8) == pytest.approx(128)


def test_small_experts_and_few_tokens_are_not_sorted() -> None:
    _, weights, moe, *_ = inputs(BASE, torch.Generator())
    assert prefers_small(8, weights, moe) and not prefers_small(9, weights, moe)
    _, packed, *_ = inputs(replace(BASE, hidden=64, ffn=32, packed="mxfp4", group=32), torch.Generator())
    assert prefers_small(8, packed, moe) and not prefers_small(9, packed, moe)
    gpt_oss = weights._replace(down_EHF=torch.empty(8, 2880, 2880, dtype=torch.bfloat16, device="meta"))
    assert prefers_small(1, gpt_oss, replace(moe, top_k=1)) and not prefers_small(1, gpt_oss, replace(moe, top_k=4))


@needs_interpreter
def test_a_token_without_numbers_gets_nan_and_no_expert_that_is_not_there() -> None:
    from armillary.kernels.moe.small_moe_triton import small_moe

    case = replace(BASE, tokens=2, experts=6, norm=False)
    x, *rest = inputs(case, torch.Generator().manual_seed(3))
    out = small_moe(x.index_fill(0, torch.tensor([1]), torch.nan), *rest)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_checks_at_the_start_take_few_experts() -> None:
    kimi = replace(BASE, experts=384, top_k=8, tokens=500)
    small = GROUPED_MOE.small(kimi)
    assert small.tokens == 64 and small.top_k <= small.experts < 20 and small.experts & (small.experts - 1)
    grouped = SMALL_MOE.small(replace(BASE, experts=256, top_k=8, groups=8, top_groups=4))
    assert grouped.experts == 16 and grouped.experts % grouped.groups == 0
