"""Norms: the Triton kernels agree with the reference, forward and backward, whatever the shape."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.kernels.core.op import Op
from armillary.kernels.norm import norm as module
from armillary.kernels.norm.launch_config import LaunchShape, backward_shape, forward_shape
from armillary.kernels.norm.norm import ADD_NORM, NORM, NormCase
from armillary.model.layers.norm import Norm
from tests.kernels.agreeing import assert_agrees, loaded
from tests.kernels.interpreter import needs_interpreter

cases = st.builds(
    NormCase,
    rows=st.integers(0, 9),
    columns=st.integers(8, 300),  # fewer leave hardly a gradient: x / |x| does not change with x
    kind=st.sampled_from(["rms", "layer"]),
    weight=st.booleans(),
    bias=st.booleans(),
    plus_one=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    device=st.just("cpu"),
)


@given(cases, st.sampled_from([1, 1, 3]))
@settings(max_examples=10, deadline=None)
def test_a_row_alone_is_normed_as_among_others(case: NormCase, rows: int) -> None:
    generator = torch.Generator().manual_seed(case.columns)
    x, residual = (torch.randn(rows, case.columns, generator=generator).to(case.torch_dtype) for _ in range(2))
    weight = torch.randn(case.columns, generator=generator).to(case.torch_dtype) if case.weight else None
    rest = (weight, x[0] if case.bias else None, 1e-5, case.kind, case.plus_one)
    for found, right in zip(module.row_add_norm(x, residual, *rest), module.add_norm(x, residual, *rest), strict=True):
        assert found.dtype == right.dtype
        torch.testing.assert_close(found, right, rtol=1e-5 if case.dtype == "fp32" else 1e-2, atol=1e-5)
    torch.testing.assert_close(module.row_norm(x, *rest), module.norm(x, *rest), rtol=1e-2, atol=1e-5)


@needs_interpreter
@given(cases)
@settings(max_examples=7, deadline=None)
@example(NormCase(rows=0, columns=8, dtype="fp32", device="cpu", bias=True))
def test_norm_agrees(case: NormCase) -> None:
    assert_agrees(NORM, case)


@needs_interpreter
@given(cases)
@settings(max_examples=7, deadline=None)
def test_add_norm_agrees(case: NormCase) -> None:
    assert_agrees(ADD_NORM, case)


@needs_interpreter
@given(cases, st.sampled_from([NORM, ADD_NORM]))
@settings(max_examples=8, deadline=None)
def test_rows_too_wide_for_a_program(case: NormCase, op: Op) -> None:
    """The kernels for very wide rows, met here at 64 columns."""
    triton = import_module("armillary.kernels.norm.norm_triton")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WIDEST_FORWARD", "WIDEST_BACKWARD", "WIDEST_TWO_SUMS", "_PIECE"):
            patch.setattr(triton, name, 64)
        assert_agrees(op, case)


@needs_interpreter
@pytest.mark.parametrize("op", [NORM, ADD_NORM], ids=["norm", "add_norm"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "how",
    [
        LaunchShape(1, 64, 4, 1),
        LaunchShape(1, 64, 4, 1, ahead=True),
        LaunchShape(2, 64, 4, 1),
        LaunchShape(4, 32, 4, 1),
    ],
)
def test_rows_in_pieces(op: Op, kind: str, how: LaunchShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 columns in pieces of 64 or 32, whichever way rows are held."""
    triton = import_module("armillary.kernels.norm.norm_triton")
    for name in ("forward_shape", "backward_shape"):
        monkeypatch.setattr(triton, name, lambda *args, **kwargs: how)
    assert_agrees(op, NormCase(rows=5, columns=150, kind=kind, bias=kind == "layer", dtype="fp32", device="cpu"))


@pytest.mark.parametrize("columns", [*range(4096, 16385, 512), 2880, 3584, 18432, 20480])
@pytest.mark.parametrize("element_size", [2, 4])
def test_launch_shapes(columns: int, element_size: int) -> None:
    """Whatever the width: threads read whole 16 bytes, and in a backward hardly a lane is idle."""
    forward = [
        forward_shape(columns, element_size, pairs, centred=centred, residual=residual)
        for pairs in (0, 1)
        for centred in (0, 1)
        for residual in (0, 1)
    ]
    assert all(shape.width * element_size == 512 * shape.warps and shape.rows in (1, 2) for shape in forward)
    shapes = [backward_shape(columns, element_size, pairs, sums=sums) for pairs in (0, 1) for sums in (0, 1, 2)]
    for shape in shapes:
        assert shape.rows * shape.width * element_size == 512 * shape.warps and shape.warps in (4, 8, 16, 32)
        assert -(-columns // shape.width) * shape.width <= 1.2 * columns


@needs_interpreter
def test_weights_that_lie_apart_and_a_residual_for_all_rows() -> None:
    x, weight, bias = torch.randn(4, 40), torch.randn(80)[::2], torch.randn(80)[::2]
    case = NormCase(rows=4, columns=40, dtype="fp32", device="cpu")
    assert_agrees(NORM, case, inputs=(x, weight, bias, 1e-6, "layer", False))
    assert_agrees(ADD_NORM, case, inputs=(x, torch.randn(1, 40), weight, bias, 1e-6, "rms", False))


@needs_interpreter
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_hardly_any_columns(columns: int) -> None:
    x = torch.randn(5, columns)
    torch.testing.assert_close(loaded(NORM)(x, None, None, 1e-6), module.norm(x, None, None, 1e-6))


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("plus_one", [False, True])
def test_the_reference_is_the_models_norm(kind: str, plus_one: bool) -> None:
    layer = Norm(24, kind=kind, eps=1e-5, bias=kind == "layer", plus_one=plus_one)
    torch.nn.init.normal_(layer.weight)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(5, 24)
    torch.testing.assert_close(module.norm(x, layer.weight, layer.bias, 1e-5, kind, plus_one), layer(x))


@needs_interpreter
def test_rows_that_lie_apart() -> None:
    """A slice of columns, and a transposed tensor: strides are honoured or a copy is made."""
    whole = torch.randn(4, 6, 40)
    weight = torch.randn(20)
    for x in (whole[..., 10:30], torch.randn(20, 4).t(), torch.randn(3, 2, 20)[:, 0]):
        assert_agrees(NORM, NormCase(rows=1, columns=20, device="cpu"), inputs=(x, weight, None, 1e-6, "rms", False))


@needs_interpreter
def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 17)
    x[1, 4] = float("nan")
    y = loaded(NORM)(x, None, None, 1e-6)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@needs_interpreter
def test_weights_may_have_another_format() -> None:
    x, weight = torch.randn(5, 32).bfloat16(), torch.randn(32)
    assert_agrees(NORM, NormCase(rows=5, columns=32, device="cpu"), inputs=(x, weight, None, 1e-6, "rms", False))


@needs_interpreter
@pytest.mark.parametrize("weight", [torch.randn(32), None])
def test_a_wider_bias_gets_a_gradient_as_wide(weight: torch.Tensor | None) -> None:
    x, bias = torch.randn(5, 32).bfloat16(), torch.randn(32, requires_grad=True)
    for version in ("triton", "eager"):
        y = loaded(NORM, version)(x, weight, bias, 1e-6, "layer")
        (grad,) = torch.autograd.grad(y.float().square().sum(), bias)
        assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())


@needs_interpreter
def test_a_residual_stream_may_be_wider() -> None:
    x, residual = torch.randn(5, 32).bfloat16(), torch.randn(5, 32)
    inputs = (x, residual, torch.randn(32), None, 1e-6, "rms", False)
    assert_agrees(ADD_NORM, NormCase(rows=5, columns=32, device="cpu"), inputs=inputs)
    assert loaded(ADD_NORM)(*inputs)[1].dtype == torch.float32


@needs_interpreter
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_outputs_may_be_unused(used: int) -> None:
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    grads = []
    for version in ("triton", "eager"):
        leaf = x.clone().requires_grad_()
        loaded(ADD_NORM, version)(leaf, residual, None, None, 1e-6)[used].square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@needs_interpreter
def test_only_what_needs_a_gradient_gets_one() -> None:
    x, weight = torch.randn(4, 16), torch.randn(16, requires_grad=True)
    loaded(NORM)(x, weight, None, 1e-6).sum().backward()
    assert weight.grad is not None and x.grad is None


@needs_interpreter
@pytest.mark.parametrize("columns", [200, pytest.param(9000, marks=pytest.mark.slow)])
def test_a_mean_far_from_zero_costs_no_precision(columns: int) -> None:
    """Held rows take the mean away first; rows in pieces sum by Welford's rule."""
    x = torch.randn(2, columns) + 100.0
    inputs = (x, torch.randn(columns), torch.randn(columns), 1e-6, "layer", False)
    assert_agrees(NORM, NormCase(rows=2, columns=columns, kind="layer", bias=True, device="cpu"), inputs=inputs)
