"""Activations: the kernel agrees with the reference, and the reference with the model's MLP."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.pointwise import activation as gated
from armillary.kernels.pointwise.activation import ACTIVATE, ActivationCase
from armillary.model.layers.mlp import activate as model_activate
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter

PLAIN = ["silu", "gelu", "gelu_tanh", "relu", "relu2"]
kinds = st.one_of(
    st.tuples(st.sampled_from([*PLAIN, "swiglu_clamped"]), st.just(True)),
    st.tuples(st.sampled_from([*PLAIN, "none"]), st.just(False)),
)


@needs_interpreter
@given(kinds, st.integers(0, 5), st.integers(1, 700), st.sampled_from(["fp32", "bf16", "fp16"]))
@settings(max_examples=20, deadline=None)
def test_agrees(kind: tuple[str, bool], rows: int, ffn: int, dtype: str) -> None:
    activation, is_gated = kind
    case = ActivationCase(rows=rows, ffn=ffn, activation=activation, gated=is_gated, dtype=dtype, device="cpu")
    assert_agrees(ACTIVATE, case)


@pytest.mark.parametrize("activation", [*PLAIN, "swiglu_clamped"])
def test_the_reference_is_what_the_model_does(activation: str) -> None:
    x = torch.randn(3, 20) * 5
    torch.testing.assert_close(gated.activate(x, activation, True), model_activate(x, activation, gated=True))
    if activation != "swiglu_clamped":
        torch.testing.assert_close(gated.activate(x, activation, False), model_activate(x, activation, gated=False))


@needs_interpreter
@pytest.mark.parametrize("activation", [*PLAIN, "swiglu_clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_and_nan_as_in_torch(activation: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e4, -1e4, 1e15, -1e15, float("nan"), 1.0])
    up = torch.tensor([1.0, -1.0, 2.0, 1e4, 0.5, 0.5, 1.0, float("nan")])
    gate, x = gate.to(dtype), torch.stack((gate, up), -1).flatten().to(dtype)
    run = loaded(ACTIVATE)
    torch.testing.assert_close(run(x, activation, True), gated.activate(x, activation, True), equal_nan=True)
    if activation != "swiglu_clamped":
        mine, theirs = run(gate, activation, False), gated.activate(gate, activation, False)
        torch.testing.assert_close(mine, theirs, equal_nan=True)


@needs_interpreter
@pytest.mark.parametrize("activation", [*PLAIN, "swiglu_clamped"])
def test_gradients_far_out(activation: str) -> None:
    x = torch.tensor([[1e4, 2.0, -1e4, 1e4, 30.0, -30.0, 7.0, 7.0, -7.0, -7.0]])
    case = ActivationCase(rows=1, ffn=5, activation=activation, device="cpu")
    assert_agrees(ACTIVATE, case, inputs=(x, activation, True))


@needs_interpreter
def test_inputs_that_lie_apart() -> None:
    x = torch.randn(6, 40)[:, 4:24]
    assert_agrees(ACTIVATE, ActivationCase(rows=6, ffn=10, device="cpu"), inputs=(x, "silu", True))
    assert loaded(ACTIVATE)(x, "silu", True).shape == (6, 10)
