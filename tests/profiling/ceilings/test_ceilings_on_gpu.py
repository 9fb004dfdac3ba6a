"""Ceilings on a GPU: what is timed computes the right thing, and every section gives points."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from armillary.kernels.core.timing import time_calls
from armillary.profiling.ceilings import gemm
from armillary.profiling.ceilings.ceilings import measure_ceilings
from armillary.profiling.ceilings.settings import settings_for

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16", "fp8", "int8"])
def test_the_products_that_are_timed_are_right(dtype: str) -> None:
    if dtype not in gemm.dtypes(CUDA):
        pytest.skip(f"this GPU has no {dtype}")
    generator = torch.Generator(CUDA).manual_seed(1)
    transposed = dtype in ("fp8", "int8")
    shapes = ((64, 128), (96, 128) if transposed else (128, 96))
    raw = [torch.randn(shape, device=CUDA, generator=generator) for shape in shapes]
    a, b = ((x * 20).to(torch.int8) if dtype == "int8" else x.to(gemm._TORCH[dtype]) for x in raw)
    with gemm.precision("tf32" if dtype == "tf32" else "ieee", CUDA):
        found = gemm._CALLS.get(dtype, gemm._plain)(a, b)()
    expected = a.double() @ (b.double().t() if transposed else b.double())
    error = (found.double() - expected).norm() / expected.norm()
    assert error <= {"fp32": 1e-5, "tf32": 1e-3, "int8": 0.0}.get(dtype, 1e-2)


def test_tf32_is_left_as_it_was() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with gemm.precision("tf32", CUDA):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_the_chain_of_multiply_adds_is_one() -> None:
    from armillary.profiling.ceilings.fma_triton import chain

    row = torch.randn(4096, device=CUDA)
    expected = row.double()
    for _ in range(50):
        expected = expected * 0.97 + 0.31
    chain(row, 50)
    assert torch.allclose(row.double(), expected, rtol=1e-5, atol=1e-5)


def test_calls_are_taken_in_turn_inside_a_graph() -> None:
    counts = [torch.zeros((), device=CUDA) for _ in range(3)]
    timing = time_calls([lambda x=x: x.add_(1) for x in counts], CUDA, budget_s=0.01)
    torch.cuda.synchronize()
    low, *_, high = sorted(float(x) for x in counts)
    assert timing.calls > 3 and low > 0 and high / low < 1.5


def test_every_section_gives_points(tmp_path: Path) -> None:
    found = measure_ceilings(CUDA, quick=True, folder=tmp_path)
    kinds = {"copy", "read", "write", "triad", "cache", "gemm", "launch", "host_copy", "disk"}
    assert kinds <= set(found.peaks.points) and found.peaks.device == torch.cuda.get_device_name()
    assert {point["mode"] for point in found.peaks.points["launch"]} == {"eager", "graph", "round_trip"}
    assert "sm_clock_hz" in found.peaks.points["gemm"][-1]["beside"]


def test_the_last_cache_is_the_l2() -> None:
    assert settings_for(CUDA).cache_bytes > 1 << 20
