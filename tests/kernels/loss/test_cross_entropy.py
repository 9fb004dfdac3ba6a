"""Cross-entropy: the kernel agrees with the reference on every kind of row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.kernels.loss.cross_entropy import CROSS_ENTROPY, IGNORED, CrossEntropyCase
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter

pytestmark = needs_interpreter
cases = st.builds(
    CrossEntropyCase,
    rows=st.integers(0, 6),
    vocab=st.integers(1, 400),
    smoothing=st.sampled_from([0.0, 0.1]),
    z_loss=st.sampled_from([0.0, 1e-3]),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    device=st.just("cpu"),
)


@given(cases)
@settings(max_examples=8, deadline=None)
@example(CrossEntropyCase(rows=2, vocab=40_001, dtype="fp32", device="cpu", smoothing=0.1, z_loss=1e-3))
def test_agrees(case: CrossEntropyCase) -> None:
    assert_agrees(CROSS_ENTROPY, case)


def agrees(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> None:
    case = CrossEntropyCase(rows=len(targets), vocab=logits.shape[-1], device="cpu")
    assert_agrees(CROSS_ENTROPY, case, inputs=(logits, targets, IGNORED, smoothing, 0.0))


@pytest.mark.parametrize("scale", [1e4, 1e30])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extreme_logits(scale: float, smoothing: float) -> None:
    agrees(torch.randn(8, 33) * scale, torch.arange(8), smoothing)


def test_a_right_answer_that_is_certain_costs_nothing() -> None:
    logits = torch.full((1, 9), -1e4)
    logits[0, 3] = 1e4
    assert loaded(CROSS_ENTROPY)(logits, torch.tensor([3])).item() == 0.0


def test_forbidden_words() -> None:
    """Minus infinity for part of a vocabulary, also for a whole first piece of it."""
    logits = torch.randn(3, 20_000)
    logits[0, :9000] = -float("inf")
    logits[1, 5] = -float("inf")
    agrees(logits, torch.tensor([19_999, 6, 0]))


def test_nan_stays_in_its_row() -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = float("nan")
    losses = loaded(CROSS_ENTROPY)(logits, torch.tensor([1, 2, 3]))
    assert losses.isnan().tolist() == [False, True, False]
    agrees(logits, torch.tensor([1, 2, 3]))


def test_ignored_rows_give_no_loss_and_no_gradient() -> None:
    logits = torch.randn(4, 11, requires_grad=True)
    targets = torch.tensor([IGNORED, 2, IGNORED, 5])
    losses = loaded(CROSS_ENTROPY)(logits, targets)
    losses.sum().backward()
    assert losses[[0, 2]].tolist() == [0, 0] and not logits.grad[[0, 2]].any() and logits.grad[[1, 3]].any()
    assert torch.allclose(losses.sum(), F.cross_entropy(logits, targets, reduction="sum"))


def test_a_target_that_no_word_has_is_not_hidden() -> None:
    losses = loaded(CROSS_ENTROPY)(torch.randn(2, 5), torch.tensor([5, 1]))
    assert losses.isnan().tolist() == [True, False]


def test_leading_dims_and_rows_that_lie_apart() -> None:
    agrees(torch.randn(2, 3, 40)[..., 5:30], torch.randint(0, 25, (2, 3)))


def test_the_gradient_may_take_the_place_of_the_logits() -> None:
    x, targets = torch.randn(4, 30), torch.tensor([3, IGNORED, 7, 9])
    plain, placed = (x.clone().requires_grad_() for _ in range(2))
    run = loaded(CROSS_ENTROPY)
    run(plain * 1, targets).sum().backward()
    logits = placed * 1
    run(logits, targets, IGNORED, 0.0, 0.0, True).sum().backward()
    assert torch.equal(plain.grad, placed.grad) and torch.equal(logits.detach(), placed.grad)
