"""Linear + cross-entropy in chunks: the same loss and gradients as with all logits held at once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.loss import linear_cross_entropy_chunked as module
from armillary.kernels.loss.linear_cross_entropy import LINEAR_CROSS_ENTROPY, reference
from armillary.kernels.loss.linear_cross_entropy_chunked import _chunk_rows, _loss, chunked
from tests.kernels.interpreter import needs_interpreter

# a GPU that is new to the thread of a backward: torch sets it up and says so
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning", "ignore:All-NaN:RuntimeWarning")

M, H, V = st.integers(0, 20), st.integers(1, 40), st.integers(1, 300)


def assert_agrees(*inputs: object, spare_bytes: int = 1 << 30) -> None:
    """Forward and backward, against a reference one format wider."""
    generator = torch.Generator().manual_seed(5)
    expected = expect(LINEAR_CROSS_ENTROPY, inputs, generator)
    with patch.object(module, "SPARE_BYTES", spare_bytes):
        found = check(chunked, LINEAR_CROSS_ENTROPY, expected)
    assert found.agreed, found.why_not


def random(
    m: int, h: int, v: int, *, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(m * 7 + h * 3 + v)
    x, weight = (size * torch.randn(m, h)).to(dtype), torch.randn(v, h).to(dtype)
    return x, weight, torch.randint(0, v, (m,)).where(torch.rand(m) > 0.2, -100)


@needs_interpreter
def test_targets_that_lie_apart() -> None:
    x, weight, _ = random(6, 8, 33)
    assert_agrees(x, weight, torch.arange(12)[::2])


@needs_interpreter
@settings(max_examples=8, deadline=None, derandomize=True)
@given(M, H, V, st.sampled_from([0.0, 7.0]), st.sampled_from([1.0, 0.3]), st.sampled_from(["mean", "sum"]))
def test_any_shape_in_any_chunks(m: int, h: int, v: int, softcap: float, scale: float, reduction: str) -> None:
    assert_agrees(*random(m, h, v), -100, reduction, softcap, scale, spare_bytes=v * 4 * max(1, m // 3))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_formats_and_a_vocabulary_of_several_blocks(dtype: torch.dtype) -> None:
    assert_agrees(*random(9, 16, 9001, dtype=dtype), -100, "mean", 0.0, 1.0, spare_bytes=9001 * 8 * 4)


@needs_interpreter
def test_half_sums_that_would_overflow_before_they_are_scaled() -> None:
    """All tokens want the same word: unscaled, its gradient is beyond fp16's largest value."""
    x, weight = torch.full((170, 4), 400.0, dtype=torch.float16), torch.zeros(8, 4, dtype=torch.float16)
    assert_agrees(x, weight, torch.zeros(170, dtype=torch.int64), -100, "mean", 0.0, 1.0)


@needs_interpreter
def test_scaling_rounds_once() -> None:
    from armillary.kernels.loss.linear_cross_entropy_triton import scaled

    x, factor = torch.randn(10_000).half(), torch.tensor(1 / 7711)
    torch.testing.assert_close(scaled(x, factor, torch.float16), (x.float() * factor).half(), rtol=0, atol=0)


@needs_interpreter
def test_extreme_logits_neither_overflow_nor_vanish() -> None:
    assert_agrees(*random(17, 8, 200, size=1e4), -100, "mean", 0.0, 1.0)


@needs_interpreter
def test_nan_reaches_the_loss_and_the_gradients_it_belongs_to() -> None:
    x, weight, targets = random(12, 8, 50)
    targets[3], x[3, 2] = 1, torch.nan
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = chunked(x, weight, targets)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and dx[3].isnan().all() and dw.isnan().any()
    assert dx[[0, 1, 2, *range(4, 12)]].isfinite().all()


@needs_interpreter
def test_a_target_outside_the_vocabulary_is_a_nan_not_a_guess() -> None:
    x, weight, targets = random(5, 8, 50)
    targets[2] = 50
    assert chunked(x, weight, targets).isnan()


def test_no_target_that_counts_is_a_nan_without_gradient_as_in_torch() -> None:
    x, weight, targets = random(5, 8, 50, dtype=torch.float64)
    for loss_of in (reference, chunked):
        leaf = x.detach().requires_grad_()
        loss = loss_of(leaf, weight, targets.fill_(-100))
        assert loss.isnan() and not torch.autograd.grad(loss, leaf)[0].any()


def test_gradients_are_made_only_for_what_asks() -> None:
    x, weight, targets = random(6, 8, 50, dtype=torch.float64)
    _, dx, dw = _loss(x, weight, targets, -100, 0.0, 1.0, True, False, 1 << 30)
    assert dx.shape == x.shape and not dw.numel()
    leaf = x.detach().requires_grad_()
    frozen = torch.autograd.grad(chunked(leaf, weight, targets), leaf)[0]
    torch.testing.assert_close(frozen, torch.autograd.grad(reference(leaf, weight, targets), leaf)[0])
    with torch.no_grad():
        assert not chunked(leaf, weight, targets).requires_grad


def test_a_graph_may_be_walked_twice() -> None:
    x, weight, targets = random(6, 8, 50, dtype=torch.float64)
    leaf = x.requires_grad_()
    loss = chunked(leaf, weight, targets)
    once = torch.autograd.grad(loss, leaf, torch.tensor(2.0, dtype=x.dtype), retain_graph=True)[0]
    torch.testing.assert_close(once, 2 * torch.autograd.grad(loss, leaf)[0])


@given(st.integers(1, 10**6), st.integers(1, 8192), st.integers(1, 300_000), st.booleans())
def test_chunks_stay_within_the_memory_that_dw_needs_anyway(m: int, h: int, v: int, trains: bool) -> None:
    x = torch.empty(m, h, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(v, h, device="meta", dtype=torch.bfloat16)
    rows = _chunk_rows(x, weight, trains, 1_400_000_000)
    assert 1 <= rows <= m
    assert rows * v * 2 <= 1_400_000_000 + (v * h * 2 if trains else 0)
    if m * v * 2 <= 1_400_000_000:
        assert rows == m, "what fits is one chunk"


def test_the_op_can_be_traced() -> None:
    x, weight, targets = random(6, 8, 50, dtype=torch.float64)
    arguments = (x.requires_grad_(), weight.requires_grad_(), targets, -100, 0.0, 1.0, True, True, 1 << 20)
    torch.library.opcheck(_loss, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("m", "h", "v"), [(1000, 512, 32000), (77, 100, 50257), (300, 1024, 256000), (0, 64, 1000)])
def test_on_a_gpu(dtype: torch.dtype, m: int, h: int, v: int) -> None:
    x, weight, targets = (part.cuda() for part in random(m, h, v, dtype=dtype))
    generator = torch.Generator("cuda").manual_seed(5)
    expected = expect(LINEAR_CROSS_ENTROPY, (x, weight * h**-0.5, targets, -100, "sum", 0.0, 1.0), generator)
    for spare in (1 << 30, v * x.element_size() * 128):
        with patch.object(module, "SPARE_BYTES", spare):
            found = check(chunked, LINEAR_CROSS_ENTROPY, expected)
        assert found.agreed, found.why_not


@pytest.mark.gpu
def test_memory_beyond_the_gradients_is_bounded() -> None:
    tokens, hidden, vocab = 16384, 2048, 131072
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(chunked(x, weight, targets), (x, weight))
    extra = torch.cuda.max_memory_allocated() - before - 2 * x.numel() - 6 * weight.numel()
    assert extra < 1.5e9
