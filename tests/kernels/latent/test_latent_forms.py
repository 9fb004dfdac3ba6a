"""Latent attention: absorbed, expanded and mixed forms against the formula, query by query."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.latent.latent_decode import latent_decode
from armillary.kernels.latent.latent_forms import latent_attention, latent_batch, most_absorbed
from armillary.kernels.latent.latent_prefill import latent_prefill
from tests.kernels.latent.latent_batches import Shape, batch, expected
from tests.kernels.pages import error


@st.composite
def shapes(draw: st.DrawFn, longest: int = 12) -> Shape:
    """Rows that decode, rows of a chunk, rows without queries, rows without keys."""
    queries = draw(st.lists(st.sampled_from([0, 1, 1, 3, longest]), min_size=1, max_size=4))
    lengths = [0 if draw(st.integers(0, 9)) == 0 else count + draw(st.integers(0, 40)) for count in queries]
    return Shape(
        queries=queries,
        lengths=lengths,
        heads=draw(st.sampled_from([1, 3, 4])),
        page=draw(st.sampled_from([4, 16])),
        padding=draw(st.sampled_from([0, 2])),
    )


@settings(max_examples=12, deadline=None)
@given(shape=shapes(), most=st.sampled_from([1, 2, 4, 100]))
def test_every_form_is_the_formula(shape: Shape, most: int) -> None:
    """`most` decides which sequences are absorbed and which expanded."""
    made = batch(shape, dtype=torch.float64)
    right = expected(shape, made)
    step = latent_batch(made.batch, shape.num_tokens, most)
    found = latent_attention(made.q_TNP, made.q_TNR, made.cache, made.up_NUC, step, made.scale)
    assert found.shape == right.shape
    assert error(found, right) < 1e-10


def test_a_mixed_batch_splits_by_queries() -> None:
    made = batch(Shape(queries=[1, 12, 0, 3], lengths=[9, 30, 0, 3], padding=2))
    seen: dict[str, list[int]] = {}

    def decode(q_TNC, q_TNR, cache, rows, scale):  # type: ignore[no-untyped-def]
        seen["absorbed"] = rows.starts.diff().tolist()
        return latent_decode(q_TNC, q_TNR, cache, rows, scale)

    def prefill(*arguments):  # type: ignore[no-untyped-def]
        seen["expanded"] = arguments[4].lengths_B.tolist()
        return latent_prefill(*arguments)

    step = latent_batch(made.batch, 18, most=4, num_keys=42)
    latent_attention(*made.prefill()[:4], step, 1.0, decode=decode, prefill=prefill)
    assert seen == {"absorbed": [1, 0, 0, 3], "expanded": [0, 30, 0, 0]}
    assert step.num_keys == 42


def test_the_crossover_is_where_both_forms_take_as_many_flops() -> None:
    most, keys = most_absorbed(512, 128, 128), 1 << 20

    def flops(queries: int) -> tuple[float, float]:
        absorbed = 2 * queries * keys * (2 * 512 + 64) + 2 * queries * 512 * 256
        return absorbed, 2 * queries * keys * (128 + 64 + 128) + 2 * keys * 512 * 256

    assert most == 170
    assert flops(most)[0] <= flops(most)[1] and flops(most + 1)[0] > flops(most + 1)[1]
    assert most_absorbed(64, 128, 128) > 10**6  # a latent so narrow is always cheaper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_keep_their_dtype(dtype: torch.dtype) -> None:
    made = batch(Shape(queries=[1], lengths=[5]), dtype=dtype)
    assert latent_decode(*made.decode()).dtype == latent_prefill(*made.prefill()).dtype == dtype
