"""Attention under a window of 128 keys by its own kernel for Hopper, interpreted: against scores in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from armillary.kernels.attention.attention import ATTENTION, AttentionCase, inputs, reference
from armillary.kernels.core.agreement import check, expect, relative_error
from armillary.kernels.core.requirements import lacking
from armillary.machine.accelerator import of_nvidia
from tests.kernels.gluon_interpreter import gluon_on_cpu
from tests.kernels.interpreter import needs_interpreter

ON_HOPPER = torch.cuda.is_available() and lacking(("triton", "wgmma"), "cuda") is None
CASE = AttentionCase(batch=2, length=150, heads=16, kv_heads=2, head_dim=64, window=128, sinks=True)
CASES = {
    "shorter than a tile": replace(CASE, batch=1, length=5, heads=8, kv_heads=1),
    "one window": replace(CASE, batch=1, length=128, heads=8, kv_heads=1),
    "no sinks, fp16": replace(CASE, sinks=False, dtype="fp16"),
    "16 heads share keys": replace(CASE, length=203, kv_heads=1),
    "several chunks": replace(CASE, batch=1, length=330),
}


def drawn(case: AttentionCase, device: str = "cpu") -> tuple[Any, ...]:
    return inputs(case, torch.Generator(device).manual_seed(case.length))


@needs_interpreter
@pytest.mark.parametrize("places", [1, 100])
@pytest.mark.parametrize("name", list(CASES))
def test_it_agrees(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few and many chunks in a row of one program."""
    from armillary.kernels.attention import window_attention as launches

    monkeypatch.setattr(launches, "num_programs", lambda x, count: places)
    q, k, v, options = drawn(CASES[name])
    scale = q.shape[-1] ** -0.5
    out, lse = (x.fill_(torch.nan) for x in launches._empty(q, k, v, options.sinks_N, scale, 128, False))
    with gluon_on_cpu():
        launches.launch(q, k, v, options.sinks_N, scale, out, lse)
    wide = tuple(x.double() for x in (q, k, v))
    assert relative_error(out, reference(*wide, options)) < 4e-3
    ones = torch.ones_like(wide[1])  # with values of one, the output is the share of the keys in the softmax
    share = reference(wide[0], wide[1], ones, options)[..., 0].transpose(1, 2)
    sinks = torch.zeros(q.shape[2]) if options.sinks_N is None else options.sinks_N.float()
    if options.sinks_N is not None:
        torch.testing.assert_close(torch.exp2(sinks[:, None] * launches.LOG2E - lse), (1 - share).float())
    assert lse.isfinite().all()


@needs_interpreter
@pytest.mark.parametrize(("name", "places"), [(name, 100) for name in CASES] + [("several chunks", 1)])
def test_gradients_agree(name: str, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of sinks too, which are one number per head."""
    from armillary.kernels.attention import window_attention as launches
    from armillary.kernels.attention import window_gradients

    monkeypatch.setattr(window_gradients, "num_programs", lambda x, count: places)
    monkeypatch.setattr(launches, "accelerator_of", lambda device: of_nvidia((9, 0), multiprocessors=132))
    q, k, v, options = drawn(CASES[name])
    grad, found = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).to(q.dtype), []
    for run, dtype in ((launches.both_ways, q.dtype), (reference, torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, options.sinks_N) if x is not None]
        sinks = None if options.sinks_N is None else leaves[3]
        with gluon_on_cpu():
            out = run(*leaves[:3], replace(options, sinks_N=sinks))
            found.append(torch.autograd.grad(out, leaves, grad.to(dtype)))
    for mine, exact in zip(*found, strict=True):
        assert relative_error(mine, exact) < 6e-3


@needs_interpreter
@pytest.mark.parametrize("function", ["attention", "both_ways"])
def test_heads_that_lie_apart(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the op, from a fused projection; gradients by the kernels for all masks, and by their own."""
    from armillary.kernels.attention import window_attention as launches

    monkeypatch.setattr(launches, "accelerator_of", lambda device: of_nvidia((9, 0), multiprocessors=132))
    *_, options = drawn(replace(CASE, heads=8))
    qkv = torch.randn(1, 150, 10, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    given = (*qkv.split([8, 1, 1], dim=2), options)
    assert launches.why_not(*given) is None
    with gluon_on_cpu():
        found = check(
            getattr(launches, function), ATTENTION, expect(ATTENTION, given, torch.Generator().manual_seed(2))
        )
    assert found.agreed, found.why_not


@needs_interpreter
def test_what_it_cannot_take_goes_to_the_kernels_for_all_masks() -> None:
    from armillary.kernels.attention import window_attention as launches

    q, k, v, options = drawn(replace(CASE, length=20, dtype="fp32"))
    assert launches.why_not(q, k, v, options) == "wgmma is Hopper's"
    assert relative_error(launches.attention(q, k, v, options), reference(q, k, v, options)) < 1e-5
    others = {
        "causal": replace(options, causal=False),
        "documents": replace(options, documents_BT=torch.zeros(2, 20)),
        "caps": replace(options, softcap=5.0),
        "16 bits": options,
    }
    for why, each in others.items():
        assert why in str(launches.refused(q, k, v, each))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert launches.refused(q, k, v, options) is None
    assert "a time" in str(launches.refused(q[:, :, :6], k, v, options))
    assert "aligned" in str(launches.refused(torch.randn(2, 20, 16, 65).bfloat16()[..., 1:], k, v, options))


def test_the_version_is_offered_for_its_shapes_on_hopper() -> None:
    version = ATTENTION.version("triton, narrow window")
    assert version is not None and version.refuses(CASE) is None and lacking(version.needs, "cpu") is not None
    others = {"window": 64, "head_dim": 128, "kv_heads": 4, "documents": 2, "softcap": 5.0, "dtype": "fp32"}
    assert all(version.refuses(replace(CASE, **{name: value})) for name, value in others.items())


@needs_interpreter
def test_programs_get_chunks_that_fill_the_chip() -> None:
    from armillary.kernels.attention.window_attention import chunks_per_program

    assert chunks_per_program(64, 64, 132) == 32  # 128 programs at once
    assert chunks_per_program(64, 8, 132) == 4  # 128 again
    assert chunks_per_program(1, 8, 132) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", [*CASES, "whole"])
def test_on_a_gpu(name: str) -> None:
    from armillary.kernels.attention.window_attention import attention, both_ways, why_not

    case = CASES.get(name, replace(CASE, batch=1, length=2048, heads=64, kv_heads=8))
    given = drawn(case, "cuda")
    assert why_not(*given) is None
    for run in (attention, both_ways):
        found = check(run, ATTENTION, expect(ATTENTION, given, torch.Generator("cuda").manual_seed(2)))
        assert found.agreed, found.why_not
        assert torch.equal(run(*given), run(*given))
