"""Tiles by shared memory: an H200 takes those that were timed there, smaller chips the first that fits."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from armillary.kernels.core import launch
from armillary.machine.accelerator import Accelerator, accelerator_of
from tests.kernels.interpreter import INTERPRETED, needs_interpreter
from tests.machine.gpus import forgotten, pretend  # noqa: F401

HALF, WIDE = torch.bfloat16, torch.float32
OWN = ("attention.tiles", "paged.paged_attention_triton")


def on(monkeypatch: pytest.MonkeyPatch, name: str) -> Accelerator:
    """Tensors on the CPU are taken for tensors on this chip."""
    chip = accelerator_of(pretend(monkeypatch, name))
    assert chip is not None
    for module in (launch, *(import_module(f"armillary.kernels.{name}") for name in OWN if INTERPRETED)):
        monkeypatch.setattr(module, "accelerator_of", lambda device: chip)
    return chip


def test_the_first_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert launch.first_fitting(device, (300, 100, 50), lambda kb: kb << 10) == 300  # the interpreter holds anything
    for name, right in (("H200", 100), ("A100", 100), ("L4", 50)):
        on(monkeypatch, name)
        assert launch.first_fitting(device, (300, 100, 50), lambda kb: kb << 10) == right
    assert launch.first_fitting(device, (300, 200), lambda kb: kb << 10) == 200  # fails its trial, if anything does


@needs_interpreter
@pytest.mark.parametrize("name", ["A100", "RTX 3090", "L4", "H200", "B200", "RTX 5090"])
@pytest.mark.parametrize("dtype", [HALF, WIDE])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, head_dim: int) -> None:
    from armillary.kernels.attention.tiles import attention_tiles

    chip, q = on(monkeypatch, name), torch.empty(1, 1, 1, head_dim, dtype=dtype)
    for kernel, packed in (("forward", False), ("forward", True), ("key", False), ("query", False)):
        tiles = attention_tiles(kernel, q, packed=packed)
        assert tiles.shared_kb << 10 <= chip.shared_bytes


@needs_interpreter
def test_an_h200_has_what_was_timed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.attention.tiles import attention_tiles
    from armillary.kernels.paged.paged_attention_triton import prefill_tiling, split_tiling

    on(monkeypatch, "H200")

    def sizes(kernel: str, q: torch.Tensor, *, packed: bool = False) -> tuple[int, ...]:
        tiles = attention_tiles(kernel, q, packed=packed)
        return tiles.queries, tiles.keys, tiles.warps, tiles.stages

    q, wide, device = torch.empty(1, 1, 1, 128, dtype=HALF), torch.empty(1, 1, 1, 256, dtype=HALF), torch.device("cpu")
    assert [sizes("forward", q, packed=packed) for packed in (False, True)] == [(64, 64, 4, 3), (64, 64, 4, 3)]
    assert attention_tiles("forward", q, packed=True).edge_stages == 2
    assert [sizes(kernel, q) for kernel in ("key", "query")] == [(64, 64, 4, 2), (128, 64, 8, 3)]
    assert [sizes(kernel, wide) for kernel in ("key", "query")] == [(64, 64, 8, 2), (128, 32, 8, 2)]
    prompts = prefill_tiling(device, 4, 128, HALF)
    assert (prompts.m, prompts.n, prompts.warps, prompts.stages) == (128, 64, 8, 3)
    assert {
        split_tiling(device, 4, queries, dim, dtype).stages
        for queries in (1, 16)
        for dim in (64, 128)
        for dtype in (HALF, WIDE)
    } == {3}
    assert split_tiling(device, 4, 16, 256, HALF).stages == 2  # three take 256 KB


@needs_interpreter
def test_a_chip_of_99_kb_takes_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    from armillary.kernels.paged.paged_attention_triton import prefill_tiling, split_tiling

    on(monkeypatch, "L4")
    assert prefill_tiling(torch.device("cpu"), 4, 256, HALF).m == 64
    assert split_tiling(torch.device("cpu"), 4, 16, 256, WIDE).stages == 1
    assert launch.fitting_stages(torch.empty(0), (64 + 64) * 256, 6) == 3
