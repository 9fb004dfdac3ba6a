"""Two profiles, budget by budget and kernel by kernel, per step."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.profiling.analysis.analyse import analyse
from armillary.profiling.analysis.compare import compare
from armillary.profiling.analysis.memory_timeline import BEFORE
from tests.profiling.traces import ROOFLINE, HandMade


def test_eager_against_fused(tmp_path: Path) -> None:
    eager = HandMade().step(1000).kernel("elementwise", launched=0, at=0, takes=400)
    eager.kernel("elementwise", launched=5, at=400, takes=600)
    fused = HandMade().step(500, number=1).step(1000, at=500, number=2)
    fused.kernel("triton_poi_fused", launched=0, at=0, takes=500)
    fused.kernel("triton_poi_fused", launched=5, at=500, takes=500)
    before, after = (
        analyse(made.write(tmp_path / f"{i}.json"), roofline=ROOFLINE) for i, made in enumerate((eager, fused))
    )
    found = compare(before, after)
    assert found.speedup == pytest.approx(2.0) and after.steps == 2
    assert [(c.name, c.before_calls, c.after_calls) for c in found.kernels] == [
        ("elementwise", 2, 0),
        ("triton_poi_fused", 0, 1),
    ]
    assert found.kernels[0].saved_s == pytest.approx(1e-3) and found.kernels[0].speedup is None
    assert sum(c.before_s for c in found.budget) == pytest.approx(before.step_s)


def test_memory_at_the_peak_by_who_asked(tmp_path: Path) -> None:
    made = HandMade().step(100).python("nn.Module: Linear_0", 10, 20).op("aten::mm", 12, 5, [4, 4], [4, 4])
    made.kernel("sgemm", launched=13, at=20, takes=80)
    made.op("autograd::engine::evaluate_function: MmBackward0", 40, 20)
    made.memory(14, 100, 1100, 1).memory(45, 50, 1150, 2).memory(60, -100, 1050, 1)
    memory = analyse(made.write(tmp_path / "m.json"), roofline=ROOFLINE).memory
    assert memory is not None and (memory.peak_bytes, memory.peak_s) == (1150, pytest.approx(45e-6))
    assert memory.by_category == {BEFORE: 1000, "activations": 100, "gradients": 50}
    assert memory.by_module == {"Linear_0": 100, "outside modules": 50}
