"""Experts for many tokens: any routing, any distribution over experts, agreeing with the plain reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.kernels.core import requirements
from armillary.kernels.core.agreement import check, expect
from armillary.kernels.moe.expert_choice import choose_experts
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.moe.moe import GROUPED_MOE, MoECase, inputs, moe_layer
from armillary.machine.accelerator import Accelerator
from tests.kernels.interpreter import needs_interpreter

BASE = MoECase(tokens=20, hidden=48, ffn=24, experts=8, top_k=2, dtype="fp32", device="cpu", norm=False)
CASES = {
    "several tiles of an expert": BASE,
    "one token": replace(BASE, tokens=1),
    "a norm and a residual": replace(BASE, tokens=9, norm=True),
    "gpt-oss": replace(BASE, experts=3, score="softmax_topk", bias=True, activation="swiglu_clamped"),
    "deepseek": replace(BASE, experts=12, score="sigmoid", selection_bias=True, groups=4, top_groups=2),
    "mxfp4": replace(BASE, hidden=96, ffn=64, experts=3, packed="mxfp4", group=32),
    "int4": replace(BASE, hidden=96, ffn=64, experts=3, packed="int4", group=64, zeros=True),
    "int8, whole rows": replace(BASE, hidden=96, ffn=64, experts=3, packed="int8"),
    "fp8 blocks": replace(BASE, hidden=160, ffn=64, experts=3, packed="fp8", group=128),
    "nvfp4": replace(BASE, hidden=96, ffn=64, experts=3, packed="nvfp4", group=16),
    "llama 4": replace(BASE, top_k=1, score="sigmoid", normalize=False, scale_input=True),
}


@needs_interpreter
@pytest.mark.parametrize(("name", "tma"), [*((name, True) for name in CASES), ("gpt-oss", False)])
def test_agrees(name: str, tma: bool) -> None:
    from armillary.kernels.moe.grouped_moe_triton import grouped_moe

    case = CASES[name]
    arguments = inputs(case, torch.Generator().manual_seed(3))
    expected = expect(GROUPED_MOE, arguments, torch.Generator().manual_seed(5))
    found = check(lambda *given: grouped_moe(*given, tma=tma), GROUPED_MOE, expected)
    assert found.agreed, found.why_not


@needs_interpreter
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.packed])
def test_many_rows_meet_dequantised_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.moe import grouped_moe_triton

    monkeypatch.setattr(grouped_moe_triton, "_DEQUANTISED_ROWS", 1)
    arguments = inputs(CASES[name], torch.Generator().manual_seed(3))
    expected = expect(GROUPED_MOE, arguments, torch.Generator().manual_seed(5))
    found = check(grouped_moe_triton.grouped_moe, GROUPED_MOE, expected)
    assert found.agreed, found.why_not


@needs_interpreter
@pytest.mark.parametrize("tokens", [1, 50])
def test_choices_are_sorted_into_tiles_of_one_expert(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.moe import expert_sort_triton
    from armillary.kernels.moe.expert_sort_triton import choose_and_sort, most_tiles

    monkeypatch.setattr(expert_sort_triton, "_CHUNK", 32)  # several for the choices of 50 tokens

    moe = replace(BASE, experts=5, top_k=2).moe
    logits_ME = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 1, 9, 1, 1])
    found = choose_and_sort(logits_ME, inputs(BASE, torch.Generator())[1], moe, rows=16)
    weights_Mk, experts_Mk = choose_experts(logits_ME, moe)
    torch.testing.assert_close(found.weights_P.view(tokens, 2), weights_Mk)
    assert torch.equal(found.experts_P.view(tokens, 2).long(), experts_Mk)
    assert torch.equal(found.order_P.long(), experts_Mk.flatten().sort(stable=True).indices)
    counts = torch.bincount(experts_Mk.flatten(), minlength=5)
    assert torch.equal(found.ends_E.long(), counts.cumsum(0))
    tiles = [(e, int(counts[:e].sum()) + row) for e in range(5) for row in range(0, int(counts[e]), 16)]
    assert found.tiles_T2[: len(tiles)].tolist() == [list(tile) for tile in tiles]
    assert found.tiles_T2[len(tiles) :, 0].eq(-1).all() and len(found.tiles_T2) == most_tiles(2 * tokens, 5, 16)


@needs_interpreter
@pytest.mark.parametrize(
    "case", [replace(BASE, tokens=5), replace(BASE, tokens=5, experts=3, score="softmax_topk", bias=True)]
)
@pytest.mark.parametrize("live", [0, 3, 5])
def test_choices_of_live_tokens_are_counted(case: MoECase, live: int) -> None:
    """By both kernels as by the reference; what was counted before stays."""
    from armillary.kernels.moe.grouped_moe_triton import grouped_moe
    from armillary.kernels.moe.small_moe_triton import small_moe

    x, weights, moe, *rest = inputs(case, torch.Generator().manual_seed(3))
    logits_ME = torch.nn.functional.linear(x, weights.router_EH, weights.router_bias_E)
    _, experts_Mk = choose_experts(logits_ME, moe)
    expected = 7 + torch.bincount(experts_Mk[:live].flatten(), minlength=case.experts)
    for run in (moe_layer, small_moe, grouped_moe):
        load = ExpertLoad(torch.full((case.experts,), 7), torch.tensor([live], dtype=torch.int32))
        plain = run(x, weights, moe, *rest)
        assert torch.equal(run(x, weights, moe, *rest, load=load), plain)
        assert torch.equal(load.counts_E, expected)


@needs_interpreter
def test_one_expert_takes_all() -> None:
    from armillary.kernels.moe.grouped_moe_triton import grouped_moe

    x, weights, *rest = inputs(replace(BASE, top_k=1), torch.Generator().manual_seed(3))
    weights = weights._replace(router_EH=torch.zeros_like(weights.router_EH).index_fill(0, torch.tensor([6]), 1.0))
    arguments = (x.abs(), weights, *rest)
    found = check(grouped_moe, GROUPED_MOE, expect(GROUPED_MOE, arguments, torch.Generator().manual_seed(5)))
    assert found.agreed, found.why_not


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@needs_interpreter
def test_without_tma_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an A100 takes: launches depend on shapes only, so CUDA graphs can hold them."""
    a100 = Accelerator(vendor="nvidia", arch="sm_80", capability=(8, 0), shared_bytes=163 << 10, multiprocessors=108)
    monkeypatch.setattr(requirements, "accelerator_of", lambda device: a100)
    able = [version for version in GROUPED_MOE.versions if requirements.lacking(version.needs, "cuda") is None]
    assert [version.name for version in able] == ["triton, pointers"]
    monkeypatch.undo()
    arguments = inputs(replace(BASE, tokens=3), torch.Generator().manual_seed(3))
    with Operators() as ran:
        able[0].load()(*arguments)
    assert not ran.names & {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2"}, ran.names
