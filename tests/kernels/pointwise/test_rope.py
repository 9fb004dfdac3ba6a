"""Rotary positions on packed QKV: the kernel agrees with the reference, and the reference with the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.pointwise.rope import ROPE, RopeCase, rope, rotate
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter


@st.composite
def cases(draw: st.DrawFn) -> RopeCase:
    kv_heads, half = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    return RopeCase(
        tokens=draw(st.integers(0, 4)),
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=2 * half + draw(st.sampled_from([0, 2, 7])),
        rotary_dim=2 * half,
        interleaved=draw(st.booleans()),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        device="cpu",
    )


@needs_interpreter
@given(cases())
@settings(max_examples=8, deadline=None)
def test_agrees(case: RopeCase) -> None:
    assert_agrees(ROPE, case)


@needs_interpreter
@pytest.mark.parametrize(
    ("dim", "rotated"), [(24, 0), (24, 6), (96, 24), (80, 20), (80, 80), (96, 96), (40, 4), (100, 12)]
)
def test_heads_that_are_no_power_of_two(dim: int, rotated: int) -> None:
    """Heads in two pieces; heads with few rotated dims are processed end to end."""
    assert_agrees(
        ROPE, RopeCase(tokens=2, heads=4, kv_heads=2, head_dim=dim, rotary_dim=rotated, dtype="bf16", device="cpu")
    )


def test_the_reference_is_what_the_model_does() -> None:
    batch, tokens, kv_heads, group, dim, half = 2, 3, 2, 3, 10, 4
    qkv = torch.randn(batch, tokens, kv_heads * (group + 2) * dim)
    angles = torch.randn(batch, tokens, 1, half)
    for interleaved in (False, True):
        q, k, v = rope(qkv, angles.cos(), angles.sin(), group, dim, interleaved)
        grouped = qkv.view(batch, tokens, kv_heads, group + 2, dim)
        queries = grouped[..., :group, :].flatten(2, 3)
        torch.testing.assert_close(q, rotate(queries, angles.cos(), angles.sin(), interleaved=interleaved))
        keys = rotate(grouped[..., group, :], angles.cos(), angles.sin(), interleaved=interleaved)
        torch.testing.assert_close(k, keys)
        assert torch.equal(v, grouped[..., group + 1, :]) and v.is_contiguous()


@needs_interpreter
def test_positions_that_a_batch_shares_and_projections_that_lie_apart() -> None:
    qkv = torch.randn(2, 5, 3 * 8 + 4)[..., :24]
    angles = torch.randn(1, 5, 1, 4)
    case = RopeCase(tokens=5, heads=1, kv_heads=1, device="cpu")
    assert_agrees(ROPE, case, inputs=(qkv, angles.cos(), angles.sin(), 1, 8, False))


@needs_interpreter
def test_infinite_values_pass_untouched() -> None:
    qkv = torch.full((1, 1, 24), float("inf"))
    _, _, v = loaded(ROPE)(qkv, torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 1, 8, False)
    assert torch.isinf(v).all()
