"""A linear layer's GEMMs, by torch and by a chosen cuBLASLt algorithm: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from armillary.kernels.gemm import autotune
from armillary.kernels.gemm.autotune import LinearShape, tune, tune_sums
from armillary.kernels.gemm.cublaslt import CublasLtGemm, gemm_layout
from armillary.kernels.gemm.gemm import Gemms, GemmShape, TunedGemms
from tests.kernels.interpreter import needs_interpreter

M, N, K = 5, 3, 4


def columns(rows: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """What lies in memory row by row, read column by column as a matrix of that size."""
    return np.ascontiguousarray(rows).reshape(-1).reshape(size, order="F")


@pytest.mark.parametrize("kind", ["forward", "back", "weight"])
def test_the_library_s_view_of_a_product(kind: str) -> None:
    x, w, dy = (np.random.default_rng(0).normal(size=size) for size in ((M, K), (N, K), (M, N)))
    first, second = {"forward": (x, w), "back": (dy, w), "weight": (dy, x)}[kind]
    expected = {"forward": x @ w.T, "back": dy @ w, "weight": dy.T @ x}[kind]
    seen = gemm_layout(kind, M, N, K)
    a, b = columns(second, seen.a), columns(first, seen.b)
    d = (a.T if seen.trans_a else a) @ (b.T if seen.trans_b else b)
    assert d.shape == seen.d
    np.testing.assert_allclose(d.T, expected)  # written column by column, read row by row


def test_what_was_not_chosen_goes_to_torch() -> None:
    x, w, dy, add = (torch.randn(size) for size in ((2, M, K), (N, K), (2, M, N), (2, M, N)))
    plain, tuned = Gemms(), TunedGemms({GemmShape("forward", 10, N, K).key: "torch"})
    torch.testing.assert_close(tuned.forward(x, w), plain.forward(x, w))
    torch.testing.assert_close(tuned.forward(x, w, add), x @ w.t() + add)
    torch.testing.assert_close(tuned.back(dy, w), dy @ w)
    torch.testing.assert_close(tuned.weight(dy[0], x[0]), dy[0].t() @ x[0])


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_gradients_are_summed_in_the_sum_s_own_format(wide: torch.dtype) -> None:
    """The first replaces what was there; narrow parts are added without narrowing the sum."""
    total, parts = torch.full((N, K), torch.nan, dtype=wide), []
    for i in range(3):
        dy, x = torch.randn(M, N), torch.randn(M, K)
        TunedGemms({}).sum(total, dy, x, first=i == 0)
        parts.append(dy.t() @ x)
    torch.testing.assert_close(total, sum(part.to(wide) for part in parts), rtol=1e-6, atol=1e-6)


@needs_interpreter
def test_a_narrow_gradient_is_added_in_one_pass() -> None:
    from armillary.kernels.core.reductions_triton import add_

    total, part = torch.randn(3, 5000), torch.randn(3, 5000).bfloat16()
    expected = total + part.float()
    add_(total, part)
    assert torch.equal(total, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 1])
def test_an_algorithm_of_the_library(place: int) -> None:
    """Against fp32, no worse than twice torch's own error; with something added on the way, too."""
    sizes = ((2, 256, 512), (384, 512), (2, 256, 384), (2, 256, 384))
    x, w, dy, add = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
    tuned = TunedGemms({GemmShape(kind, 512, 384, 512).key: f"lt {place}" for kind in ("forward", "back", "weight")})
    plain = Gemms()
    cases = {"forward": (x, w), "back": (dy, w), "weight": (dy.flatten(0, 1), x.flatten(0, 1)), "added": (x, w, add)}
    for name, given in cases.items():
        kind = "forward" if name == "added" else name
        exact = getattr(plain, kind)(*(tensor.float() for tensor in given))
        theirs, ours = ((getattr(made, kind)(*given) - exact).norm() / exact.norm() for made in (plain, tuned))
        assert ours < max(1e-3, 2 * theirs), name


@pytest.mark.gpu
def test_other_settings_of_an_algorithm() -> None:
    """By name, in another process too; a setting that the library refuses leaves the GEMM to torch."""
    shape = GemmShape("forward", 4096, 2048, 1024)
    x, w = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((4096, 1024), (2048, 1024)))
    names = CublasLtGemm(*shape, torch.bfloat16).variants("0")
    assert all(name.startswith("0.") for name in names)
    for name in [*names, "0.77.0", "99"]:
        made = TunedGemms({shape.key: f"lt {name}"}).forward(x, w)
        assert (made.float() - x.float() @ w.float().t()).norm() / made.float().norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", "apart", "lt 0", "lt 1"])
def test_gradients_summed_on_a_gpu(name: str) -> None:
    """In fp32 over three micro-batches; a part that was bf16 in between is off by bf16's rounding and no more."""
    tuned, total, exact = (
        TunedGemms({GemmShape("sum", 512, 384, 256).key: name}),
        torch.full((384, 256), torch.nan),
        0.0,
    )
    total = total.cuda()
    for i in range(3):
        dy, x = (torch.randn(512, width, device="cuda", dtype=torch.bfloat16) for width in (384, 256))
        tuned.sum(total, dy, x, first=i == 0)
        exact = exact + dy.double().t() @ x.double()
    assert (total - exact).norm() / exact.norm() < (4e-3 if name == "apart" else 1e-5)


@pytest.mark.gpu
def test_every_product_of_a_layer_is_named() -> None:
    how = ([LinearShape(512, 256, added=True)], 1024, torch.bfloat16, torch.device("cuda"))
    names = tune(*how)
    assert set(names) == {GemmShape(kind, 1024, 512, 256).key for kind in ("forward", "back", "weight")}
    assert all(name == "torch" or name.startswith(("lt ", "persistent ")) for name in names.values())
    sums = tune_sums(*how, names)
    assert set(sums) == {GemmShape("sum", 1024, 512, 256).key}
    assert all(name in ("torch", "apart") or name.startswith("lt ") for name in sums.values())


def test_the_fastest_is_taken_only_where_it_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"torch": 1.0, "lt 0": 0.999, "lt 1": 1.2, "lt 2": 1.1, "lt 3": 3.0}
    runs = {name: lambda name=name: name for name in spent}
    monkeypatch.setattr(autotune, "seconds", lambda run, about_s: spent[run()])
    assert autotune.fastest(runs) == "torch"
    spent["lt 2"] = 0.9
    assert autotune.fastest(runs) == "lt 2"
