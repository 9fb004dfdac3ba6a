"""Products grouped by expert: the kernels agree with the loop over experts, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.kernels.grouped_linear import GROUPED_LINEAR, GroupedCase, grouped_linear
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter


def inputs(counts: list[int], outputs: int, into: int, *, beyond: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts) + beyond, into, generator=generator)
    weight = torch.randn(len(counts), outputs, into, generator=generator)
    return x, weight, torch.tensor(counts).cumsum(0).to(torch.int32)


@needs_interpreter
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=8, deadline=None)
def test_agrees_whatever_experts_get(counts: list[int], outputs: int, into: int, beyond: int) -> None:
    """Experts without rows, rows without experts, and sizes that no tile divides."""
    case = GroupedCase(rows=1, experts=len(counts), outputs=8 * outputs, inputs=8 * into, dtype="fp32", device="cpu")
    given = (*inputs(counts, 8 * outputs, 8 * into, beyond=beyond), not beyond)
    assert_agrees(GROUPED_LINEAR, case, inputs=given)


@needs_interpreter
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_agrees_in_every_format(dtype: str) -> None:
    assert_agrees(GROUPED_LINEAR, GroupedCase(rows=90, experts=3, outputs=40, inputs=72, dtype=dtype, device="cpu"))


def test_rows_meet_the_weight_of_their_expert() -> None:
    x, weight, ends = inputs([2, 0, 3], 8, 16, beyond=2)
    y = grouped_linear(x, weight, ends, full=False)
    torch.testing.assert_close(y[:2], x[:2] @ weight[0].t())
    torch.testing.assert_close(y[2:5], x[2:5] @ weight[2].t())
    assert not y[5:].any()


@needs_interpreter
def test_nan_of_one_expert_stays_there() -> None:
    """Tiles read rows of their neighbours; what they find there must not reach anybody."""
    x, weight, ends = inputs([5, 7], 8, 16)
    x[5:] = float("nan")
    x.requires_grad_()
    weight.requires_grad_()
    y = loaded(GROUPED_LINEAR)(x, weight, ends)
    y.backward(torch.where(torch.arange(12)[:, None] < 5, 1.0, float("nan")).expand_as(y).contiguous())
    assert torch.isfinite(y[:5]).all() and torch.isfinite(weight.grad[0]).all() and torch.isfinite(x.grad[:5]).all()
    assert weight.grad[1].isnan().all()


def test_torchs_own_agrees() -> None:
    """On a CPU torch has it for checking only; on a GPU it is one of those that are chosen from."""
    case = GroupedCase(rows=50, experts=3, outputs=24, inputs=16, dtype="bf16", device="cpu")
    x, weight, ends = (t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs([4, 0, 30], 24, 16))
    assert_agrees(GROUPED_LINEAR, case, "torch", inputs=(x, weight, ends))
    padded = torch.cat((x, x[:3]))
    assert_agrees(GROUPED_LINEAR, case, "torch", inputs=(padded, weight, ends, False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own backward thread has no context at first
@pytest.mark.parametrize(
    "version, dtype", [("triton", "bf16"), ("triton", "fp16"), ("triton", "fp32"), ("torch", "bf16")]
)
@given(st.integers(1, 3000), st.sampled_from((1, 3, 8, 40)), st.integers(1, 90), st.integers(1, 90), st.booleans())
@example(2500, 1, 33, 20, False)  # tiles for many rows
@settings(max_examples=10, deadline=None)
def test_agrees_on_a_gpu(
    version: str, dtype: str, rows: int, experts: int, outputs: int, into: int, even: bool
) -> None:
    """Experts without rows too: what each gets is drawn at random."""
    case = GroupedCase(dtype=dtype, rows=rows, experts=experts, outputs=8 * outputs, inputs=8 * into, even=even)
    assert_agrees(GROUPED_LINEAR, case, version)
    x, weight, ends = GROUPED_LINEAR.inputs(case, torch.Generator("cuda").manual_seed(1))
    beyond = torch.cat((x, x[: 1 + rows // 3]))
    assert_agrees(GROUPED_LINEAR, case, version, inputs=(beyond, weight, ends, False))
