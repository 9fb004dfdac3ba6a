"""Grouped GEMMs: the kernels agree with the loop over experts, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.kernels.core import launch
from armillary.kernels.core.requirements import lacking
from armillary.kernels.gemm.grouped import GROUPED_LINEAR, GroupedCase, grouped_linear
from armillary.machine.accelerator import accelerator_of
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter
from tests.machine.gpus import forgotten, pretend  # noqa: F401

POINTERS = "triton, pointers"


def inputs(counts: list[int], outputs: int, into: int, *, beyond: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts) + beyond, into, generator=generator)
    weight = torch.randn(len(counts), outputs, into, generator=generator)
    return x, weight, torch.tensor(counts).cumsum(0).to(torch.int32)


def offered(name: str, **sizes: Any) -> list[str]:
    """Versions that a chip is offered, in order of preference."""
    case = GroupedCase(**{"rows": 64, "experts": 8, "outputs": 256, "inputs": 128} | sizes)
    return [v.name for v in GROUPED_LINEAR.versions if not lacking(v.needs, "cuda") and not v.refuses(case)]


@pytest.mark.parametrize(
    ("chip", "versions"),
    [
        ("T4", []),
        ("A100", [POINTERS]),
        ("RTX 3090", [POINTERS]),
        ("L4", [POINTERS]),
        ("H200", ["triton", "torch"]),
        ("B200", ["triton", POINTERS, "torch"]),
        ("RTX 5090", ["triton", POINTERS]),
        ("MI300X", [POINTERS]),
    ],
)
def test_what_a_chip_is_offered(monkeypatch: pytest.MonkeyPatch, chip: str, versions: list[str]) -> None:
    pretend(monkeypatch, chip)
    assert offered(chip) == versions


def test_hopper_has_pointers_for_odd_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "H200")
    assert offered("H200", inputs=100) == [POINTERS]


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chip", ["A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090", "MI300X"])
def test_tiles_fit_the_chip(monkeypatch: pytest.MonkeyPatch, chip: str, dtype: torch.dtype) -> None:
    from armillary.kernels.gemm import grouped_triton as launches

    described = accelerator_of(pretend(monkeypatch, chip))
    assert described is not None
    for module in (launches, launch):
        monkeypatch.setattr(module, "accelerator_of", lambda device: described)
    found = [
        launches._tile(torch.empty(0, dtype=dtype), rows, forward=forward, tma=tma)
        for rows in (1, 50, 500, 5000)
        for forward in (True, False)
        for tma in (True, False)
    ]
    assert all(tile.shared_bytes(dtype.itemsize) <= described.shared_bytes for tile in found)
    if chip == "H200" and dtype == torch.bfloat16:  # by TMA, as they were timed
        assert set(found[0:12:2]) == {(128, 256, 64, 8, 4)} and found[12] == (256, 128, 64, 8, 3)


@needs_interpreter
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=4, deadline=None)
def test_agrees_whatever_experts_get(counts: list[int], outputs: int, into: int, beyond: int) -> None:
    """Experts without rows, rows without experts, and sizes that no tile divides."""
    case = GroupedCase(rows=1, experts=len(counts), outputs=8 * outputs, inputs=8 * into, dtype="fp32", device="cpu")
    given = (*inputs(counts, 8 * outputs, 8 * into, beyond=beyond), not beyond)
    assert_agrees(GROUPED_LINEAR, case, inputs=given)
    assert_agrees(GROUPED_LINEAR, case, POINTERS, inputs=given)


@needs_interpreter
@pytest.mark.parametrize(
    ("counts", "outputs", "into", "beyond"),
    [([1], 1, 1, 0), ([0, 0, 1], 7, 3, 0), ([40, 0, 33], 35, 67, 0), ([0, 0], 5, 9, 4), ([3] * 9, 33, 1, 2)],
)
def test_pointers_take_any_size(counts: list[int], outputs: int, into: int, beyond: int) -> None:
    """One token, one number, experts without rows, rows without experts; nothing is a multiple of 16 bytes."""
    case = GroupedCase(rows=1, experts=len(counts), outputs=outputs, inputs=into, dtype="fp32", device="cpu")
    given = (*inputs(counts, outputs, into, beyond=beyond), not beyond)
    assert_agrees(GROUPED_LINEAR, case, POINTERS, inputs=given)


@needs_interpreter
@pytest.mark.parametrize("version", ["triton", POINTERS])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_agrees_in_every_format(dtype: str, version: str) -> None:
    case = GroupedCase(rows=90, experts=3, outputs=40, inputs=72, dtype=dtype, device="cpu")
    assert_agrees(GROUPED_LINEAR, case, version)


def test_rows_meet_the_weight_of_their_expert() -> None:
    x, weight, ends = inputs([2, 0, 3], 8, 16, beyond=2)
    y = grouped_linear(x, weight, ends, full=False)
    torch.testing.assert_close(y[:2], x[:2] @ weight[0].t())
    torch.testing.assert_close(y[2:5], x[2:5] @ weight[2].t())
    assert not y[5:].any()


@needs_interpreter
@pytest.mark.parametrize("version", ["triton", POINTERS])
def test_nan_of_one_expert_stays_there(version: str) -> None:
    """Tiles read rows of their neighbours; what they find there must not reach anybody."""
    x, weight, ends = inputs([5, 7], 8, 16)
    x[5:] = float("nan")
    x.requires_grad_()
    weight.requires_grad_()
    y = loaded(GROUPED_LINEAR, version)(x, weight, ends)
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
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own backward thread has no context at first
@pytest.mark.parametrize(
    "version, dtype",
    [
        ("triton", "bf16"),
        ("triton", "fp16"),
        ("triton", "fp32"),
        ("torch", "bf16"),
        (POINTERS, "bf16"),
        (POINTERS, "fp16"),
        (POINTERS, "fp32"),
    ],
)
@given(st.integers(1, 3000), st.sampled_from((1, 3, 8, 40)), st.integers(1, 90), st.integers(1, 90), st.booleans())
@example(2500, 1, 33, 20, False)  # tiles for many rows
@settings(max_examples=7, deadline=None)
def test_agrees_on_a_gpu(
    version: str, dtype: str, rows: int, experts: int, outputs: int, into: int, even: bool
) -> None:
    """Experts without rows too: what each gets is drawn at random."""
    case = GroupedCase(dtype=dtype, rows=rows, experts=experts, outputs=8 * outputs, inputs=8 * into, even=even)
    assert_agrees(GROUPED_LINEAR, case, version)
    x, weight, ends = GROUPED_LINEAR.inputs(case, torch.Generator("cuda").manual_seed(1))
    beyond = torch.cat((x, x[: 1 + rows // 3]))
    assert_agrees(GROUPED_LINEAR, case, version, inputs=(beyond, weight, ends, False))
