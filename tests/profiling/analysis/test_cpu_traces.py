"""Real traces of this machine's CPU: the budget adds up, and planted bottlenecks are named."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from armillary.profiling.analysis.analyse import amdahl_of, analyse
from armillary.profiling.analysis.kernel_time import KERNEL_PARTS
from armillary.profiling.profile import Profile
from tests.profiling.traces import ROOFLINE

pytestmark = pytest.mark.slow  # real runs, whose shares depend on what else the machine does

Record = Callable[..., Profile]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    def run(step: Callable[[], object], *, steps: int = 2, stacks: bool = False) -> Profile:
        path = tmp_path / "cpu.json"
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            profile_memory=True,
            with_stack=stacks,
            schedule=plan,
            on_trace_ready=lambda p: p.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(steps + 1):
                step()
                profiler.step()
        found = analyse(path, roofline=ROOFLINE)
        assert found.steps == steps and found.device == "cpu"
        assert sum(found.budget.values()) == pytest.approx(found.wall_s, rel=5e-3)
        assert found.fraction("unknown") <= 0.05
        return found

    return run


def test_a_training_step(record: Record) -> None:
    layers = (torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(torch.randn(32, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = record(step, stacks=True)
    rows = {row.name: row for row in found.operators}
    # two products forward; backward: both weights' gradients, and one input's
    assert rows["aten::addmm"].flops == 2 * 2 * 2 * 32 * 64 * 128
    assert rows["aten::mm"].flops == 2 * 3 * 2 * 32 * 64 * 128
    assert rows["aten::addmm"].module.startswith("Linear")
    assert rows["aten::native_layer_norm"].work == "norm"
    assert found.memory is not None and found.memory.peak_bytes > 0
    assert sum(found.memory.by_category.values()) == pytest.approx(found.memory.peak_bytes)
    assert sum(row.share for row in amdahl_of(found)) == pytest.approx(1.0, abs=5e-3)


@pytest.mark.slow  # judges the clock
def test_a_big_gemm_is_compute(record: Record) -> None:
    a = torch.randn(700, 700)
    found = record(lambda: a @ a)
    row = found.operators[0]
    assert (row.name, row.work, row.bound, row.calls) == ("aten::mm", "gemm", "compute", 2)
    assert row.flops == 2 * 2 * 700**3
    assert sum(map(found.fraction, KERNEL_PARTS)) > 0.5


@pytest.mark.slow  # judges the clock
def test_a_sleeping_loader(record: Record) -> None:
    class Slow(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                time.sleep(0.02)
                yield torch.zeros(4)

    batches = iter(torch.utils.data.DataLoader(Slow(), batch_size=None))
    found = record(lambda: next(batches) + 1)
    assert found.fraction("host") > 0.5 and found.gaps[0].cause == "loader"
    assert "loader starves" in found.findings[0]


@pytest.mark.slow  # judges the clock
def test_many_tiny_operators_are_overhead(record: Record) -> None:
    a = torch.zeros(2)

    def step() -> None:
        b = a
        for _ in range(400):
            b = b + 1

    found = record(step)
    assert found.fraction("launch_gap") > 0.3
    assert any("launch-bound" in line for line in found.findings)
    assert next(row for row in found.operators if row.name == "aten::add").bound == "overhead"


def test_convolution_and_attention_by_their_shapes(record: Record) -> None:
    conv, image = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.randn(2, 3, 16, 16)
    q = torch.randn(1, 4, 32, 16)

    def step() -> None:
        conv(image).sum().backward()
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    rows = {row.name: row for row in record(step).operators}
    forward = 2 * (2 * 8 * 8 * 8) * 3 * 9
    assert rows["aten::convolution"].flops == 2 * forward
    assert rows["aten::convolution_backward"].flops == 2 * forward  # the image needs no gradient
    attention = rows["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert attention.flops == 2 * 2 * 4 * (16 + 16) * (32 * 33 // 2)
