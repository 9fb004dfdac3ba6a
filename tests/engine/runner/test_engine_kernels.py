"""Kernel cases of an engine on a GPU, built without one: every family's shapes are described by fields that exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.engine.runner import engine_kernels
from armillary.kernels.core.op import Case, Op
from armillary.spec.catalogue import models


@pytest.mark.parametrize("name", sorted(models()))
def test_cases_of_a_gpu_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: dict[str, Case] = {}

    def chosen(op: Op, case: Case, **_: Any) -> SimpleNamespace:
        cases[op.name] = case
        return SimpleNamespace(version="triton", run=torch.add)

    monkeypatch.setattr(engine_kernels, "choose", chosen)
    monkeypatch.setattr(engine_kernels, "has_triton", lambda device: False)
    config = models()[name].config
    engine_kernels.pick_kernels(config, dtype=torch.bfloat16, device=torch.device("cuda"), batch=8)
    attention = {"qkv_cache", "paged_attention"} if config.mla is None else {"latent_to_cache", "latent_decode"}
    assert {"norm", "add_norm", "sample"} | attention <= set(cases)
    assert {case.device for case in cases.values()} == {"cuda"} and ("grouped_moe" in cases) == (config.moe is not None)


def test_packed_experts_wait_for_the_device() -> None:
    kernels = engine_kernels.EngineKernels(capturable=True, moe=torch.add, grouped_moe=torch.add)
    assert not kernels.for_packed().capturable and kernels.for_packed().grouped_moe is None
    assert engine_kernels.EngineKernels(capturable=True).for_packed().capturable
