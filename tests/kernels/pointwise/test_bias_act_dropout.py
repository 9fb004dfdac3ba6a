"""Bias, activation and dropout: the kernel and the plain twin draw the same mask, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.core.philox import keep_scale, kept, philox, random_words
from armillary.kernels.pointwise.bias_act_dropout import BIAS_ACT_DROPOUT, DropoutCase, bias_act_dropout
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter

cases = st.builds(
    DropoutCase,
    rows=st.sampled_from([0, 4, 5, 6]),  # of a single number, "twice the error of plain torch" is luck
    columns=st.one_of(st.integers(8, 300), st.integers(1, 40).map(lambda n: 8 * n)),
    activation=st.sampled_from(["gelu", "gelu_tanh", "silu", "relu", "none"]),
    p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    bias=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    device=st.just("cpu"),
)


@needs_interpreter
@given(cases)
@settings(max_examples=7, deadline=None)
def test_agrees(case: DropoutCase) -> None:
    assert_agrees(BIAS_ACT_DROPOUT, case)


@needs_interpreter
@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 5), st.integers(1, 70))
@settings(max_examples=8, deadline=None)
def test_the_same_elements_stay(seed: int, rows: int, columns: int) -> None:
    x, key = torch.ones(rows, columns), torch.tensor([seed])
    y = loaded(BIAS_ACT_DROPOUT)(x, None, key, "none", 0.4)
    assert torch.equal(y, bias_act_dropout(x, None, key, "none", 0.4)), "ones, scaled or dropped: no rounding"


def test_words_are_those_of_the_paper() -> None:
    """The known answers of Random123 for philox4x32 with ten rounds and with seven, of a zero counter and key."""
    ten, seven = ([int(word) for word in philox(torch.tensor(0), torch.tensor([0]), rounds)] for rounds in (10, 7))
    assert ten == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert seven == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_a_counter_serves_eight_elements() -> None:
    (words,) = random_words(torch.tensor(9), torch.tensor([4])).tolist()
    drawn = [int(word) for word in philox(torch.tensor(9), torch.tensor([4]), 7)]
    assert words == [part & 0x7FFF for word in drawn for part in (word, word >> 16)]


def test_share_and_scale() -> None:
    stay = kept(torch.tensor([7]), 200_000, 0.25)
    assert stay.float().mean().item() == pytest.approx(0.75, abs=5e-3)
    assert keep_scale(0.25) == pytest.approx(4 / 3) and keep_scale(1.0) == 0.0 and keep_scale(0.0) == 1.0


def test_other_seeds_and_places_drop_others() -> None:
    a, b = (kept(torch.tensor([seed]), 4096, 0.5) for seed in (1, 2))
    assert 0.4 < (a == b).float().mean().item() < 0.6
    assert torch.equal(kept(torch.tensor([1]), 1000, 0.5), a[:1000]), "an element's fate is its own"


def test_nan_is_not_hidden_by_a_mask() -> None:
    x = torch.full((1, 64), float("nan"))
    assert bias_act_dropout(x, None, torch.tensor([3]), "none", 0.5).isnan().all()


@needs_interpreter
@pytest.mark.parametrize("activation", ["gelu", "relu", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_is_not_hidden_by_the_kernel(activation: str, dtype: torch.dtype) -> None:
    x = torch.full((4, 64), float("nan"), dtype=dtype)
    assert loaded(BIAS_ACT_DROPOUT)(x, None, torch.tensor([3]), activation, 0.5).isnan().all()


@needs_interpreter
def test_a_bias_that_lies_apart() -> None:
    x, bias, seed = torch.randn(4, 64).bfloat16(), torch.randn(128).bfloat16()[::2], torch.tensor([3])
    case = DropoutCase(rows=4, columns=64, dtype="bf16", device="cpu")
    assert_agrees(BIAS_ACT_DROPOUT, case, inputs=(x, bias, seed, "gelu", 0.1))
