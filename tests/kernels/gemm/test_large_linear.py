"""A linear layer for many tokens: what follows it, and where our persistent GEMM is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from armillary.kernels.core.requirements import lacking
from armillary.kernels.gemm import autotune
from armillary.kernels.gemm import gemm as gemms
from armillary.kernels.gemm.autotune import LinearShape, tune
from armillary.kernels.gemm.gemm import Gemms, GemmShape, TunedGemms, persistent
from armillary.kernels.gemm.large_linear import LARGE_LINEAR, LargeLinearCase, reference
from tests.kernels.agreeing import assert_agrees
from tests.kernels.gluon_interpreter import gluon_on_cpu
from tests.kernels.interpreter import needs_interpreter

ON_HOPPER = torch.cuda.is_available() and lacking(("triton", "wgmma"), "cuda") is None
hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")


def test_the_reference_is_a_linear_layer_and_what_follows_it() -> None:
    x, weight, bias, added = (torch.randn(size) for size in ((5, 4), (3, 4), (3,), (5, 3)))
    y = F.linear(x, weight, bias)
    torch.testing.assert_close(reference(x, weight), x @ weight.T)
    torch.testing.assert_close(reference(x, weight, bias, "silu", added), y * torch.sigmoid(y) + added)
    torch.testing.assert_close(reference(x, weight, bias, "relu"), y.clamp_min(0))


def test_the_persistent_gemm_is_for_aligned_rows_of_16_bits_on_hopper() -> None:
    version = LARGE_LINEAR.version("triton, persistent")
    assert version is not None and lacking(version.needs, "cpu") is not None
    case = LargeLinearCase(tokens=5, outputs=24, inputs=16)
    assert version.refuses(case) is None
    others = {"dtype": "fp32", "outputs": 20, "inputs": 12, "activation": "gelu"}
    assert all(version.refuses(replace(case, **{name: value})) for name, value in others.items())


def test_a_chip_without_wgmma_multiplies_by_torch_whatever_was_chosen_elsewhere() -> None:
    x, weight = torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    names = {GemmShape("forward", 4, 8, 16).key: "persistent 128 rows"}
    assert persistent("persistent 128 rows", GemmShape("forward", 4, 8, 16), x) is None
    assert torch.equal(TunedGemms(names).forward(x, weight), Gemms().forward(x, weight))


def test_own_gemms_are_candidates_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is off, and one that does not compile, are left out; the others are timed beside the library's."""
    x, weight = torch.randn(4, 16), torch.randn(8, 16)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    runs = {
        "persistent good": lambda x, w, add=None: x @ w.T,
        "persistent off": lambda x, w, add=None: 1.1 * (x @ w.T),
        "persistent broken": broken,
    }
    monkeypatch.setattr(autotune, "own_tiles", lambda device, added: ["good", "off", "broken", "unknown"])
    monkeypatch.setattr(autotune, "persistent", lambda name, shape, rows: runs.get(name))
    found = autotune.own_candidates(GemmShape("forward", 4, 8, 16), x @ weight.T, (x, weight))
    assert list(found) == ["persistent good"]
    taken: dict[str, int] = {"torch": 2, "persistent good": 1}
    monkeypatch.setattr(autotune, "seconds", lambda run, about_s: taken[run()])
    assert autotune.fastest({name: lambda name=name: name for name in taken}) == "persistent good"


@needs_interpreter
@pytest.mark.parametrize("name", ["128 rows", "192 rows", "192 rows, stream-K"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(300, 520, 136), (1, 8, 8), (300, 1032, 2000)])
def test_tiles_interpreted(name: str, tokens: int, outputs: int, inputs: int) -> None:
    """On three programs; the last shape leaves a tile after three rounds, which stream-K shares out."""
    from armillary.kernels.gemm.large_linear_wgmma import TILES, launch

    generator = torch.Generator().manual_seed(inputs)
    x, weight, bias = (
        torch.randn(size, generator=generator).bfloat16() for size in ((tokens, inputs), (outputs, inputs), (outputs,))
    )
    with gluon_on_cpu():
        y, again = (launch(x, weight, bias, "silu", None, TILES[name]) for _ in range(2))
    exact = reference(x.double(), weight.double(), bias.double(), "silu")
    assert (y - exact).norm() / exact.norm() < 4e-3
    assert torch.equal(y, again)


@needs_interpreter
def test_sums_are_shared_out_where_a_round_is_not_full() -> None:
    from armillary.kernels.gemm.large_linear_wgmma import TILES, _segments

    tiles, device = TILES["192 rows, stream-K"], torch.device("cpu")
    assert _segments(300, 1032, 2000, tiles, 3, device)[1] == 2 and _segments(300, 520, 136, tiles, 3, device)[1] == 0


ODD = ((1000, 776, 520), (1, 8, 8), (129, 264, 72), (1030, 2048, 4096), (5000, 1000, 3000))


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), ODD)
def test_the_persistent_gemm_agrees(tokens: int, outputs: int, inputs: int) -> None:
    plain = LargeLinearCase(tokens=tokens, outputs=outputs, inputs=inputs)
    for case in (
        plain,
        replace(plain, dtype="fp16"),
        replace(plain, bias=True, activation="silu"),
        replace(plain, activation="gelu_tanh", residual=True),
        replace(plain, bias=True, activation="relu", residual=True),
    ):
        assert_agrees(LARGE_LINEAR, case, "triton, persistent")


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), ODD)
def test_every_choice_of_tiles_agrees(tokens: int, outputs: int, inputs: int) -> None:
    from armillary.kernels.gemm.large_linear_wgmma import TILES

    x, weight = (torch.randn(n, inputs, device="cuda").bfloat16() for n in (tokens, outputs))
    expected = x.float() @ weight.float().T
    for name in TILES:
        run = persistent(f"{gemms.PERSISTENT}{name}", GemmShape("forward", tokens, outputs, inputs), x)
        assert run is not None
        assert (run(x, weight) - expected).norm() / expected.norm() < 4e-3, name


@pytest.mark.gpu
@hopper
def test_a_layer_s_gemm_is_ours_where_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the GEMM of fused blocks, with the residual added inside; and it is among what `tune` times."""
    tried = []
    monkeypatch.setattr(autotune, "fastest", lambda runs, variants=None: tried.append(set(runs)) or "torch")
    tune([LinearShape(256, 512), LinearShape(512, 256, added=True)], 1024, torch.bfloat16, torch.device("cuda"))
    assert sum(any(name.startswith("persistent ") for name in runs) for runs in tried) == 2
    x, weight, added = (torch.randn(n, 512, device="cuda").bfloat16() for n in (300, 512, 300))
    tuned = TunedGemms({GemmShape("forward", 300, 512, 512).key: "persistent 128 rows"})
    for arguments in ((x, weight), (x, weight, added)):
        exact = Gemms().forward(*(each.float() for each in arguments))
        assert (tuned.forward(*arguments) - exact).norm() / exact.norm() < 4e-3
