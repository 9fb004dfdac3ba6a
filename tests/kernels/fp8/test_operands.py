"""Operands of fp8 GEMMs: norms, activations and their gradients, quantised as plain torch would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from armillary.kernels.fp8.gemm import Fp8Gemm
from armillary.kernels.fp8.linear import E4M3, E5M2, quantised
from armillary.kernels.fp8.operands import Operand, ScaledTensor, Source, make_operand, norm_source
from armillary.kernels.pointwise.activation import activate as activated
from tests.kernels.interpreter import needs_interpreter

SCALINGS = st.sampled_from(["row", "tensor", "token"])


def is_near(found: Operand, right: Tensor, dtype: torch.dtype) -> None:
    """As near as the format is: for numbers that torch rounded to bf16 on the way."""
    for mine, plain in ((found.rows, right), (found.transposed, right.t())):
        assert mine is not None
        numbers = mine.values[:, : plain.shape[1]].float() * mine.scale
        assert (numbers - plain.float()).norm() < (0.04 if dtype == E4M3 else 0.08) * plain.float().norm()


def agrees(found: Operand, right: Tensor, dtype: torch.dtype, scaling: str, most_off: float) -> None:
    for mine, plain in ((found.rows, right), (found.transposed, right.t())):
        values, scale = quantised(plain, dtype, scaling)
        if scaling == "token" and mine is found.transposed:  # the rows' numbers, at the largest of their scales
            assert found.rows is not None and mine is not None
            scale = found.rows.scale.max() if right.numel() else mine.scale
            values = (found.rows.values.float() * (found.rows.scale / scale)).to(dtype).t()
        assert mine is not None and mine.scale.shape == scale.shape
        torch.testing.assert_close(mine.scale, scale, rtol=1e-5, atol=0.0)
        inside, beyond = mine.values[:, : plain.shape[1]].float(), mine.values[:, plain.shape[1] :].float()
        assert not beyond.any() and mine.values.shape[1] % 16 == 0
        assert int((inside != values.float()).sum()) <= most_off * right.numel()


def made(kind: str, x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> tuple[Source, Tensor, torch.dtype]:
    """What an operand is made of, and the numbers themselves."""
    if kind == "plain":
        return Source(x=x), x, E5M2
    gated = kind.endswith("gated")
    name = "silu" if gated else "gelu_tanh"
    how: dict[str, Any] = {"x": x, "activation": name, "gated": gated}
    if kind.startswith("activation"):
        return Source(kind="activation", **how), activated(x, name, gated), E4M3
    leaf = x.detach().requires_grad_()
    (right,) = torch.autograd.grad(activated(leaf, name, gated), leaf, dy[:, : x.shape[1] // (2 if gated else 1)])
    return Source(kind="backward", dy=dy[:, : x.shape[1] // (2 if gated else 1)], **how), right, E5M2


def drawn(m: int, k: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(m * 7 + k)
    sizes = ((m, k), (m, k), (k,), (k,))
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


KINDS = ["plain", "activation", "activation gated", "backward", "backward gated"]


@needs_interpreter
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 150), st.integers(1, 5), SCALINGS, st.sampled_from(KINDS))
def test_operands_are_what_plain_torch_quantises(m: int, k16: int, scaling: str, kind: str) -> None:
    source, right, dtype = made(kind, *drawn(m, 32 * k16))
    agrees(make_operand(source, dtype, scaling), right, dtype, scaling, 0.0 if kind == "plain" else 0.01)


@needs_interpreter
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(1, 70), st.sampled_from([16, 48, 96]), SCALINGS, st.booleans(), st.booleans())
def test_a_norm_is_made_into_an_operand(m: int, k: int, scaling: str, rms: bool, plus_one: bool) -> None:
    x, _, weight, bias = drawn(m, k)
    scale = weight + 1 if plus_one else weight
    right = F.rms_norm(x, (k,), scale, 1e-6) if rms else F.layer_norm(x, (k,), scale, bias, 1e-6)
    source = norm_source(x, weight, None if rms else bias, 1e-6, rms, plus_one)
    found = make_operand(source, E4M3, scaling)
    agrees(found, right, E4M3, scaling, 0.02)
    again = make_operand(source, E4M3, scaling, rows=False, known=found.known)
    assert again.rows is None and again.transposed is not None and found.transposed is not None
    assert torch.equal(again.transposed.values.view(torch.uint8), found.transposed.values.view(torch.uint8))


def test_products_add_and_sum_on_a_cpu() -> None:
    a, b = (ScaledTensor(*quantised(torch.randn(rows, 32), E4M3, "row")) for rows in (8, 16))
    right = (a.values.float() * a.scale) @ (b.values.float() * b.scale).t()
    multiply, total = Fp8Gemm(), torch.ones(8, 16)
    torch.testing.assert_close(multiply(a, b, torch.float32, fast=True), right)
    assert multiply(a, b, torch.float32, fast=False, add=total, out=total) is total
    torch.testing.assert_close(total, right + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["row", "tensor", "token"])
@pytest.mark.parametrize(("m", "n", "k"), [(300, 256, 512), (77, 48, 4096), (4096, 1024, 1024)])
def test_on_a_gpu(scaling: str, m: int, n: int, k: int) -> None:
    """Operands of every kind, and their GEMMs with an addend, in bf16 and accumulated in fp32."""
    for kind in KINDS:
        source, right, dtype = made(kind, *drawn(m, k, "cuda", torch.bfloat16))
        found = make_operand(source, dtype, scaling)
        agrees(found, right, dtype, scaling, 0.0) if kind == "plain" else is_near(found, right, dtype)
    x, dy, weight, _ = drawn(m, k, "cuda", torch.bfloat16)
    normed = make_operand(norm_source(x, weight, None, 1e-6, True, False), E4M3, scaling)
    is_near(normed, F.rms_norm(x, (k,), weight, 1e-6), E4M3)
    one, other = make_operand(Source(x=dy), E5M2, scaling), make_operand(Source(x=x), E4M3, scaling)
    w = make_operand(Source(x=torch.randn(n, k, device="cuda", dtype=torch.bfloat16)), E4M3, scaling)
    multiply = Fp8Gemm()
    pairs = ((other.rows, w.rows, True), (one.rows, w.rows, False), (one.transposed, other.transposed, False))
    for a, b, fast in pairs:
        assert a is not None and b is not None
        right = (a.values.float() * a.scale) @ (b.values.float() * b.scale).t()
        add = torch.randn_like(right).bfloat16()
        for dtype in (torch.bfloat16, torch.float32):
            made_here = multiply(a, b, dtype, fast=fast)
            assert made_here.dtype == dtype and (made_here - right).norm() < 1e-2 * right.norm()
            total = add.to(dtype, copy=True)
            assert multiply(a, b, dtype, fast=fast, add=total, out=total) is total
            assert (total - right - add).norm() < 1e-2 * (right + add).norm()
