"""2-simplicial attention: the reference is the definition, and every version agrees with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.attention.attention import reference as plain_reference
from armillary.kernels.core.requirements import lacking
from armillary.kernels.simplicial.paged import PAGED_SIMPLICIAL, PagedSimplicialCase
from armillary.kernels.simplicial.simplicial import SIMPLICIAL, SimplicialCase, by_blocks, reference
from armillary.machine.accelerator import of_nvidia
from tests.kernels.agreeing import assert_agrees
from tests.kernels.gluon_interpreter import gluon_on_cpu
from tests.kernels.interpreter import needs_interpreter


def drawn(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 3, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, length, n, dim) for n in (heads, 2 * kv_heads, 2 * kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def by_definition(q: Tensor, k: Tensor, v: Tensor, windows: tuple[int, int], documents: Tensor | None) -> Tensor:
    """Pair by pair, in plain loops."""
    outs = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [
                (j, m)
                for j in range(max(0, i - windows[0] + 1), i + 1)
                for m in range(max(0, i - windows[1] + 1), i + 1)
                if documents is None or (documents[b, [j, m]] == documents[b, i]).all()
            ]
            for h in range(q.shape[2]):
                n = 2 * (h // (q.shape[2] // (k.shape[2] // 2)))
                logits = torch.stack([(q[b, i, h] * k[b, j, n] * k[b, m, n + 1]).sum() for j, m in seen])
                weights = (logits * q.shape[-1] ** -0.5).softmax(0)
                outs[b, i, h] = sum(w * v[b, j, n] * v[b, m, n + 1] for w, (j, m) in zip(weights, seen, strict=True))
    return outs


@pytest.mark.parametrize("windows", [(2, 5), (5, 2), (20, 20)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_reference_is_the_definition(windows: tuple[int, int], packed: bool) -> None:
    q, k, v = (x.detach() for x in drawn(9))
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2], [3] * 9]) if packed else None
    options = AttentionOptions(pair_windows=windows, documents_BT=documents)
    wanted = by_definition(q, k, v, windows, documents)
    torch.testing.assert_close(reference(q, k, v, options), wanted, rtol=1e-10, atol=1e-12)


def test_a_first_key_and_value_of_ones_in_a_window_of_one_is_plain_attention() -> None:
    q, k, v = (x.detach() for x in drawn(12))
    k[:, :, 0::2], v[:, :, 0::2] = 1.0, 1.0
    out = reference(q, k, v, AttentionOptions(pair_windows=(1, 5)))
    wanted = plain_reference(q, k[:, :, 1::2], v[:, :, 1::2], AttentionOptions(window=5))
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_give_the_outputs_and_gradients_of_the_reference(packed: bool) -> None:
    """40 tokens are three blocks, of which later ones leave out the first keys."""
    inputs, documents = drawn(40), None
    if packed:
        documents = (torch.arange(40) // 17).expand(2, -1)
    options = AttentionOptions(pair_windows=(3, 7), documents_BT=documents)
    found = []
    for run in (reference, by_blocks):
        out = run(*inputs, options)
        found.append((out, *torch.autograd.grad((out * torch.arange(out.numel()).view_as(out)).sum(), inputs)))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-10 * a.norm()


CPU = SimplicialCase(batch=1, length=13, heads=2, kv_heads=1, head_dim=16, device="cpu", dtype="fp32", window_1=3)
CASES = {
    "heads fill nothing": replace(CPU, window_2=9),
    "longer first window": replace(CPU, window_1=9, window_2=4),
    "windows beyond the row": replace(CPU, window_1=16, window_2=32, length=9),
    "two KV heads, odd dim": replace(CPU, batch=2, heads=6, kv_heads=2, head_dim=12, window_2=6),
    "documents": replace(CPU, documents=3, window_2=9),
    "bf16": replace(CPU, dtype="bf16", window_2=7),
    "one head more than a tile": replace(CPU, heads=17, length=6, window_2=4),
}


@needs_interpreter
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_agree(name: str) -> None:
    assert_agrees(SIMPLICIAL, CASES[name])


HOPPER = SimplicialCase(batch=1, length=130, heads=128, window_1=6, window_2=70)
HOPPER_CASES = {
    "part of a tile": HOPPER,
    "whole windows": replace(HOPPER, batch=2, length=301, window_1=5, window_2=130),
    "longer first window": replace(HOPPER, window_1=70, window_2=6),
    "two KV heads": replace(HOPPER, batch=2, length=150, heads=256, kv_heads=2, window_1=3, window_2=129),
    "documents": replace(HOPPER, batch=2, length=121, window_2=33, documents=3),
    "fp16": replace(HOPPER, dtype="fp16"),
}


@needs_interpreter
@pytest.mark.parametrize("documents", [0, 2])
def test_the_kernels_for_hopper_interpreted(documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.simplicial import wgmma

    monkeypatch.setattr(wgmma, "accelerator_of", lambda device: of_nvidia((9, 0), multiprocessors=132))
    small = replace(HOPPER, length=7, window_1=2, window_2=4, documents=documents, device="cpu")
    with gluon_on_cpu():
        assert_agrees(SIMPLICIAL, small, "triton, Hopper")


@pytest.mark.gpu
@pytest.mark.skipif(bool(lacking(("wgmma",), "cuda")) if torch.cuda.is_available() else True, reason="Hopper's")
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_the_kernels_for_hopper_agree(name: str) -> None:
    assert_agrees(SIMPLICIAL, HOPPER_CASES[name], "triton, Hopper")


def test_the_kernels_for_hopper_are_for_128_heads_of_128_dims_on_hopper() -> None:
    version = SIMPLICIAL.version("triton, Hopper")
    assert version is not None
    assert version.refuses(HOPPER) is None
    refused = {"heads": 64, "kv_heads": 2, "head_dim": 64, "dtype": "fp32"}
    assert all(version.refuses(replace(HOPPER, **{name: value})) for name, value in refused.items())
    assert of_nvidia((9, 0)).wgmma and not any(of_nvidia(each).wgmma for each in ((8, 9), (10, 0), (12, 0)))
    assert lacking(version.needs, "cpu") is not None


@needs_interpreter
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("windows", [(3, 9), (9, 3)])
def test_the_paged_kernel_agrees(queries: int, windows: tuple[int, int]) -> None:
    case = PagedSimplicialCase(
        batch=2,
        context=14,
        queries=queries,
        heads=4,
        kv_heads=2,
        head_dim=16,
        window_1=windows[0],
        window_2=windows[1],
        page=4,
        device="cpu",
        dtype="fp32",
    )
    assert_agrees(PAGED_SIMPLICIAL, case)
