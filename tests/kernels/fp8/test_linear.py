"""fp8 GEMMs: quantisers bit-equal to plain torch, the three GEMMs of training against rounded operands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.kernels.core.agreement import check, expect, relative_error
from armillary.kernels.fp8.linear import E4M3, E5M2, FP8_LINEAR, Fp8LinearCase, quantised, reference, refuses, rounded
from armillary.kernels.fp8.matmul import FP8_MATMUL, Fp8MatmulCase, produced
from armillary.kernels.fp8.matmul import reference as matmul
from tests.kernels.interpreter import needs_interpreter

# a GPU that is new to the thread of a backward: torch sets it up and says so
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning", "ignore:All-NaN:RuntimeWarning")

SCALINGS = st.sampled_from(["row", "tensor"])


def exact(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values that stay as they are: every row and column has the format's largest, or is zero."""
    torch.manual_seed(rows * 7 + columns)
    largest = torch.finfo(dtype).max
    x = (torch.randn(rows, columns) * largest / 8).clamp(-largest, largest).to(dtype).float()
    diagonal = torch.arange(max(rows, columns))
    if x.numel():
        x[diagonal % rows, diagonal % columns] = largest
    return x


@needs_interpreter
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(0, 70),
    st.integers(1, 90),
    SCALINGS,
    st.sampled_from([E4M3, E5M2]),
    st.sampled_from([1e-20, 1.0, 1e9]),
)
def test_quantisers_round_as_plain_torch_does(m: int, k: int, scaling: str, dtype: torch.dtype, size: float) -> None:
    from armillary.kernels.fp8.quantize_triton import quantise, quantise_columns

    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m * 7 + k)) * size
    for mine, plain in ((quantise(x, dtype, scaling), x), (quantise_columns(x, dtype, scaling), x.t())):
        values, scale = quantised(plain, dtype, scaling)
        q, my_scale = mine
        assert q.shape[1] % 16 == 0 and not q[:, plain.shape[1] :].float().any()
        assert torch.equal(my_scale, scale) and torch.equal(q[:, : plain.shape[1]].float(), values.float())


@needs_interpreter
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 40), st.sampled_from(["row", "tensor", "token"]))
def test_forward_and_backward_agree(m: int, n: int, k: int, scaling: str) -> None:
    from armillary.kernels.fp8.linear_triton import fp8_linear

    x, weight, dy = exact(m, k, E4M3), exact(n, k, E4M3), exact(m, n, E5M2)
    for run in (fp8_linear, reference):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = run(*leaves, scaling)
        # all operands are exact, so this is plain algebra
        found = (y, *torch.autograd.grad(y, leaves, dy))
        for mine, plain in zip(found, (x @ weight.t(), dy @ weight, dy.t() @ x), strict=True):
            assert relative_error(mine.detach(), plain.double()) < 1e-5


@needs_interpreter
@settings(max_examples=7, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 90), SCALINGS, st.sampled_from(["", "norm", "gated"]))
def test_a_product_with_a_weight_in_fp8(m: int, n: int, k: int, scaling: str, producer: str) -> None:
    """What the producer gives is quantised as if it had been written out."""
    from armillary.kernels.fp8.matmul_triton import fp8_matmul
    from armillary.kernels.fp8.quantize_triton import quantise_rows

    torch.manual_seed(m * 31 + k)
    x, norm = torch.randn(m, k * (2 if producer == "gated" else 1)), torch.rand(k) if producer == "norm" else None
    how = norm, producer == "gated"
    weight, scale = quantised(torch.randn(n, k), E4M3, scaling)
    assert relative_error(fp8_matmul(x, weight, scale, *how), matmul(x.double(), weight, scale.double(), *how)) < 1e-2
    q, q_scale = quantise_rows(x, E4M3, *how)
    values, right_scale = quantised(produced(x, *how, 1e-6), E4M3, "row")
    torch.testing.assert_close(q_scale, right_scale)
    off = (q[:, :k].float() != values.float()).sum()
    assert off <= (0 if not producer else 0.02 * values.numel() + 1)  # a norm's last bit may change a tie


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), SCALINGS)
def test_the_reference_is_off_by_the_formats_step_at_most(m: int, k: int, scaling: str) -> None:
    torch.manual_seed(m * 31 + k)
    x = torch.randn(m, k, dtype=torch.float64)
    amax = x.abs().amax(1, keepdim=True) if scaling == "row" else x.abs().amax()
    for dtype, step, least in ((E4M3, 2**-4, 2**-10), (E5M2, 2**-3, 2**-17)):
        smallest = amax / torch.finfo(dtype).max * least
        assert ((rounded(x, dtype, scaling) - x).abs() <= step * x.abs() + smallest).all()


def test_nan_spoils_only_its_row() -> None:
    x, weight = exact(4, 32, E4M3), exact(16, 32, E4M3)
    x[2, 7] = torch.nan
    y = reference(x, weight, "row")
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("scaling", ["row", "tensor", "token"])
def test_an_overflow_is_not_hidden(scaling: str, bad: float) -> None:
    """Forward, and backward by the gradient: a run must not train on after it."""
    x, weight = exact(4, 32, E4M3).requires_grad_(), exact(16, 32, E4M3).requires_grad_()
    y = reference(x, weight, scaling)
    dy = torch.ones_like(y)
    dy[1, 3] = bad
    assert all(not grad.isfinite().all() for grad in torch.autograd.grad(y, (x, weight), dy))
    spoilt = x.detach().clone()
    spoilt[2, 7] = bad
    assert not reference(spoilt, weight, scaling).isfinite().all()


def test_zeros_stay_zeros() -> None:
    assert not reference(torch.zeros(3, 16), torch.randn(8, 16), "row").any()


def test_what_cannot_be_done_is_said() -> None:
    assert "16" in str(refuses(Fp8LinearCase(tokens=8, outputs=24, inputs=64)))
    assert "bf16" in str(refuses(Fp8LinearCase(tokens=8, outputs=32, inputs=64, dtype="fp32")))
    assert refuses(Fp8LinearCase(tokens=7, outputs=32, inputs=64)) is None
    with pytest.raises(BadInput, match="row or tensor or token"):
        reference(torch.zeros(1, 16), torch.zeros(16, 16), "block")


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["row", "tensor", "token"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(512, 256, 1024), (77, 48, 4096), (1, 16, 16), (300, 64, 20000), (0, 32, 32)]
)
def test_on_a_gpu(scaling: str, m: int, n: int, k: int) -> None:
    from armillary.kernels.fp8.linear_triton import fp8_linear, library_linear
    from armillary.kernels.fp8.quantize_triton import quantise, quantise_columns

    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    for dtype in (E4M3, E5M2) if scaling != "token" else ():
        for (q, scale), plain in ((quantise(x, dtype, scaling), x), (quantise_columns(x, dtype, scaling), x.t())):
            values, plain_scale = quantised(plain, dtype, scaling)
            assert torch.equal(scale, plain_scale) and torch.equal(q[:, : plain.shape[1]].float(), values.float())
    expected = expect(FP8_LINEAR, (x, weight, scaling), torch.Generator("cuda").manual_seed(5))
    for run in (fp8_linear, library_linear):
        found = check(run, FP8_LINEAR, expected, tolerance=2e-2)
        assert found.agreed, found.why_not


@pytest.mark.gpu
@pytest.mark.parametrize("producer", ["", "norm", "gated"])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 256, 1024), (5, 48, 20000), (33, 50, 100), (0, 32, 32)])
def test_fused_producers_on_a_gpu(producer: str, scaling: str, m: int, n: int, k: int) -> None:
    from armillary.kernels.fp8.matmul_triton import fp8_matmul, library_matmul

    case = Fp8MatmulCase(
        tokens=m, outputs=n, inputs=k, scaling=scaling, norm=producer == "norm", gated=producer == "gated"
    )
    generator = torch.Generator("cuda").manual_seed(5)
    expected = expect(FP8_MATMUL, FP8_MATMUL.inputs(case, generator), generator)
    for run in (fp8_matmul, library_matmul) if n % 16 == 0 else (fp8_matmul,):
        found = check(run, FP8_MATMUL, expected, tolerance=2e-2)
        assert found.agreed, found.why_not


@pytest.mark.gpu
def test_nan_on_a_gpu() -> None:
    from armillary.kernels.fp8.linear_triton import fp8_linear, library_linear

    x, weight = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((48, 64), (32, 64)))
    x[2, 7] = torch.nan
    for run in (fp8_linear, library_linear):
        y = run(x, weight, "row")
        assert y[2].isnan().all() and y[3:].isfinite().all()


@pytest.mark.gpu
def test_our_own_product_takes_any_size_and_format() -> None:
    from armillary.kernels.fp8.linear_triton import fp8_linear

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, weight = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((130, 101), (259, 101)))
        expected = expect(FP8_LINEAR, (x, weight, "row"), torch.Generator("cuda").manual_seed(5))
        found = check(fp8_linear, FP8_LINEAR, expected, tolerance=2e-2)
        assert found.agreed, found.why_not
