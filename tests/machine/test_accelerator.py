"""What is known of a GPU, chip by chip; ROCm is never taken for Hopper."""

from __future__ import annotations

import pytest
import torch

from armillary.kernels.core.launch import can_start_early
from armillary.kernels.core.requirements import lacking
from armillary.machine.accelerator import SHARED_BYTES, accelerator_of
from armillary.profiling.ceilings.gemm import dtypes
from tests.machine.gpus import CHIPS, forgotten, pretend  # noqa: F401

UNITS = {
    # chip: (Triton kernels, TMA, fp8, early launch, torch's grouped GEMM)
    "T4": (False, False, False, False, False),
    "A100": (True, False, False, False, False),
    "RTX 3090": (True, False, False, False, False),
    "L4": (True, False, True, False, False),
    "H200": (True, True, True, True, True),
    "B200": (True, True, True, True, True),
    "RTX 5090": (True, True, True, True, False),
    "MI300X": (True, False, False, False, False),
}


@pytest.mark.parametrize("name", CHIPS)
def test_units_of_a_chip(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    device = pretend(monkeypatch, name)
    chip = accelerator_of(device)
    assert chip is not None
    found = (not lacking(("triton",), "cuda"), chip.tma, chip.fp8, chip.early_launch, chip.grouped_gemm)
    assert found == UNITS[name]
    needs = ("tma", "fp8", "grouped_gemm")
    assert [not lacking((need,), "cuda") for need in needs] == [chip.tma, chip.fp8, chip.grouped_gemm]


def test_rocm_is_never_taken_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pretend(monkeypatch, "MI300X")
    assert torch.cuda.get_device_capability() == (9, 4)
    chip = accelerator_of(device)
    assert chip is not None and (chip.vendor, chip.arch, chip.capability) == ("amd", "gfx942", (0, 0))
    assert chip.shared_bytes == 64 << 10
    assert lacking(("sm_90",), "cuda") == "needs an NVIDIA GPU of compute capability 9.0"
    can_start_early.cache_clear()
    assert not can_start_early(device)
    can_start_early.cache_clear()
    assert dtypes(device) == ["fp32", "bf16", "fp16"]


def test_measured_dtypes_follow_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fp8" not in dtypes(pretend(monkeypatch, "A100"))
    assert "fp8" in dtypes(pretend(monkeypatch, "L4"))
    assert dtypes(pretend(monkeypatch, "T4")) == ["fp32", "fp16", "int8"]


@pytest.mark.parametrize("name", [name for name in CHIPS if name != "MI300X"])
def test_the_table_has_what_the_drivers_say(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A driver that says nothing leaves the table; both agree."""
    chip = accelerator_of(pretend(monkeypatch, name))
    assert chip is not None and chip.shared_bytes == SHARED_BYTES[chip.capability]
    monkeypatch.delitem(CHIPS[name], "shared_memory_per_block_optin")
    untold = accelerator_of(pretend(monkeypatch, name))
    assert untold == chip


def test_a_cpu_is_none() -> None:
    assert accelerator_of(torch.device("cpu")) is None
