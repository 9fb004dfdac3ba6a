"""A GPU that torch cannot use is no device: dtypes and plans are the CPU's then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from armillary.machine import machine as module
from armillary.machine.gpus import HIDING, Gpu, built_for_gpus, torch_sees_gpus
from armillary.machine.machine import here, machine

GPU = Gpu(name="NVIDIA GeForce RTX 4090", vendor="nvidia", memory_bytes=24e9)


@pytest.mark.parametrize(
    ("cuda", "hip", "expected"), [("None", "None", False), ("'12.8'", "None", True), ("None", "'6.3'", True)]
)
def test_the_build_is_read(cuda: str, hip: str, expected: bool) -> None:
    text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    assert built_for_gpus(text) is expected
    assert built_for_gpus("nothing that we know")


def test_hidden_gpus_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in HIDING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("armillary.machine.gpus._built_for_gpus", lambda: True)
    assert torch_sees_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not torch_sees_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert torch_sees_gpus()


@pytest.mark.parametrize(("sees", "kind"), [(True, "gpu"), (False, "cpu")])
def test_a_gpu_that_torch_cannot_use_is_no_device(monkeypatch: pytest.MonkeyPatch, sees: bool, kind: str) -> None:
    monkeypatch.setattr(module, "torch_sees_gpus", lambda: sees)
    with_gpu = replace(machine(), gpus=(GPU,))
    monkeypatch.setattr(module, "machine", lambda: with_gpu)
    assert here().chip.kind == kind
    assert here(with_gpu).chip.kind == here(device="cuda").chip.kind == "gpu", "as somebody says"
