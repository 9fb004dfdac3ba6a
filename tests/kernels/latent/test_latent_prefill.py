"""Expanded latent attention: the kernels against the plain reference, in the interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.latent import latent_prefill_triton
from armillary.kernels.latent.latent_prefill import LATENT_PREFILL, LatentPrefillCase, latent_prefill
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter
from tests.kernels.latent.latent_batches import Shape, batch
from tests.kernels.pages import error, wide


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Whole prompts, chunks behind a cached prefix, rows without queries, rows without keys."""
    queries = draw(st.lists(st.sampled_from([0, 1, 40]), min_size=1, max_size=3))
    lengths = [0 if draw(st.integers(0, 9)) == 0 else count + draw(st.integers(0, 60)) for count in queries]
    return Shape(
        queries=queries,
        lengths=lengths,
        heads=draw(st.sampled_from([1, 2])),
        nope_dim=draw(st.sampled_from([16, 24])),
        v_dim=draw(st.sampled_from([16, 40])),
        page=draw(st.sampled_from([16, 24])),
        padding=draw(st.sampled_from([0, 2])),
    )


@needs_interpreter
@settings(max_examples=4, deadline=None)
@given(shape=shapes(), more=st.sampled_from([None, 0, 9]))
def test_the_kernel_agrees(shape: Shape, more: int | None) -> None:
    """With the number of keys, an upper bound of it, and without."""
    made = batch(shape)
    given_keys = None if more is None else sum(shape.lengths) + more
    right = latent_prefill(*wide(made.prefill()))
    assert error(loaded(LATENT_PREFILL)(*made.prefill(), given_keys), right) < 1e-5


@needs_interpreter
def test_heads_in_groups_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = batch(Shape(queries=[5, 20], lengths=[30, 20], heads=3))
    whole = loaded(LATENT_PREFILL)(*made.prefill())
    monkeypatch.setattr(latent_prefill_triton, "_WORKSPACE_BYTES", 2 * 50 * 32 * 4)  # two heads at a time
    assert error(loaded(LATENT_PREFILL)(*made.prefill()), whole) < 1e-6


@needs_interpreter
def test_bf16_agrees() -> None:
    case = LatentPrefillCase(
        batch=2, context=50, queries=20, heads=2, rank=32, rope_dim=16, nope_dim=16, v_dim=16, device="cpu"
    )
    assert_agrees(LATENT_PREFILL, case)
