"""A CUDA GPU without triton: every path that a command can reach is there, with plain torch in the kernels' place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

IMPORTED = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import importlib, pkgutil
import armillary
from armillary.kernels.core.op import OPS, find_op
probes = ("armillary.profiling.ceilings.fma_triton", "armillary.profiling.memory.gpu_probes_triton")
skipped = ("armillary.kernels.", *probes, "armillary.__main__")
names = [m.name for m in pkgutil.walk_packages(armillary.__path__, "armillary.")]
for name in names:
    if not name.startswith(skipped):
        importlib.import_module(name)
assert len([find_op(name) for name in OPS]) > 10 and len(names) > 200
assert not [name for name in sys.modules if name.startswith("armillary") and name.endswith("_triton")]
"""

RUN = """
import sys
sys.modules["triton"] = None
from types import SimpleNamespace
import pytest, torch
from tests.machine.gpus import pretend
from armillary.kernels.optimizer import adamw
from armillary.kernels.gemm import gemm as products
from armillary.kernels.core.requirements import has_triton, lacking
from armillary.kernels.core.op import OPS, find_op
from armillary.parallel.context import ring_attention_block as ring_block
from armillary.engine.runner.engine_kernels import _decode_kernels

device = pretend(pytest.MonkeyPatch(), "H200")
assert torch.cuda.is_available() and not has_triton(device)


def on_gpu(**more):
    return SimpleNamespace(data=torch.zeros(1), device=device, is_cuda=True, dtype=torch.float32,
                           is_contiguous=lambda: True, shape=(1, 4, 2, 64), **more)


assert not adamw.takes([on_gpu()])
options, position = SimpleNamespace(window=0, slopes_N=None), SimpleNamespace(causal=True)
assert not ring_block._has_kernel(on_gpu(), on_gpu(), options, position)
assert _decode_kernels(device, fused=True) == {}
for op in map(find_op, OPS):
    offered = [v.name for v in op.all_versions if not lacking(v.needs, "cuda")]
    assert "eager" in offered and not [name for name in offered if "triton" in name], (op.name, offered)
    if op.name == "linear_cross_entropy":
        assert "chunked" in offered, "logits would be held in full"
x = torch.zeros(3)
x.grad = torch.full((3,), 2.0)
assert torch.allclose(adamw.gradient_norm([x]), torch.tensor(12.0).sqrt())
total = torch.ones(2)
products.add_(total, torch.ones(2, dtype=torch.bfloat16), first=False)
assert total.tolist() == [2.0, 2.0]
"""


def run(code: str) -> None:
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=where, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_everything_but_kernels_imports() -> None:
    run(IMPORTED)


def test_a_gpu_falls_back_to_plain_torch() -> None:
    run(RUN)
