"""Timing a version: nothing of it stays, and one that cannot be captured is timed call by call."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import Tensor

from armillary.kernels.core.op import Case, Op
from armillary.kernels.core.version_trial import capturing, input_sets, time_version
from armillary.kernels.norm.norm import NORM, NormCase
from armillary.kernels.pointwise.activation import ACTIVATE, ActivationCase
from armillary.kernels.pointwise.rope import ROPE, RopeCase

CASES: list[tuple[Op, Case]] = [
    (NORM, NormCase(rows=8, columns=64, dtype="fp32", device="cpu")),
    (ROPE, RopeCase(tokens=8, heads=4, kv_heads=2, head_dim=16, rotary_dim=16, dtype="fp32", device="cpu")),
    (ACTIVATE, ActivationCase(rows=8, ffn=32, dtype="fp32", device="cpu")),
]


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@pytest.mark.parametrize(("op", "case"), CASES, ids=[op.name for op, _ in CASES])
def test_nothing_of_a_case_stays(op: Op, case: Case) -> None:
    def timed() -> None:
        sets = input_sets(op, case)[:2]
        times = time_version(op.reference, op, sets, budget_s=1e-4, name="eager")
        assert times.forward_s > 0 and times.backward_s is not None

    timed()
    before = tensors()
    timed()
    assert tensors() == before


def reserved() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved())


@pytest.mark.gpu
def test_a_version_that_waits_for_the_device_is_timed_call_by_call(caplog: pytest.LogCaptureFixture) -> None:
    case = NormCase(rows=64, columns=4096)
    sets = input_sets(NORM, case)[:2]

    def waits(x: Tensor, *rest: object) -> Tensor:
        return NORM.reference(x, *rest) * float(x.sum() == x.sum())  # type: ignore[no-any-return]

    before, stream = reserved(), torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING, logger="armillary.kernels"):
        times = time_version(waits, NORM, sets, budget_s=1e-3, name="waits")
    assert times.method.startswith("calls") and "norm, waits: not captured" in caplog.text
    assert torch.cuda.current_stream() == stream and reserved() <= before + (32 << 20)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_stream_and_memory_as_they_were() -> None:
    x, stream = torch.ones(1 << 20, device="cuda"), torch.cuda.current_stream()
    before = reserved()
    with pytest.raises(RuntimeError), capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
        y = x * 2
        y.nonzero()  # its size must be known on the host
    del y
    assert torch.cuda.current_stream() == stream
    z = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")  # from the common memory again, and given back
    del z
    assert reserved() <= before + (4 << 20)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, torch.cuda.graph_pool_handle()):
        doubled = x * 2
    graph.replay()
    assert torch.equal(doubled, x * 2)
