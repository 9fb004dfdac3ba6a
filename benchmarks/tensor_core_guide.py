"""From FMA to wgmma: one GEMM in steps, each a small change, with the instruction that it compiles to and its TFLOP/s.

    python benchmarks/tensor_core_guide.py

The last line on stdout is one line of JSON: step -> [instruction, TFLOP/s, relative error].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def gemm(  # type: ignore[no-untyped-def]
    a_src,
    b_src,
    c_ptr,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
):
    """c[M, N] = a[M, K] @ b[N, K]ᵀ, for sizes that tiles divide; groups of eight row tiles share columns in L2."""
    tile, row_tiles, column_tiles = tl.program_id(0), M // ROWS, N // COLUMNS
    first = tile // (8 * column_tiles) * 8
    rows = tl.minimum(row_tiles - first, 8)
    row, column = first + tile % (8 * column_tiles) % rows, tile % (8 * column_tiles) // rows
    m, n, k = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, K // INNER, num_stages=STAGES):
        if TMA:
            a = a_src.load([row * ROWS, step * INNER])
            b = b_src.load([column * COLUMNS, step * INNER])
        else:
            a = tl.load(a_src + m[:, None] * K + (step * INNER + k)[None, :])
            b = tl.load(b_src + n[:, None] * K + (step * INNER + k)[None, :])
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    tl.store(c_ptr + m[:, None] * N + n[None, :], sums.to(c_ptr.dtype.element_ty))


@dataclass(frozen=True)
class Step:
    """A step of the guide: tile sizes decide what tl.dot compiles to on Hopper."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    tma: bool = False
    dtype: torch.dtype = torch.bfloat16


SIZE = 8192
STEPS = {
    "FMA on CUDA cores, fp32": Step(128, 64, 16, 8, 3, dtype=torch.float32),
    "mma.sync": Step(64, 128, 32, 2, 1),  # two warps are no warpgroup
    "mma.sync, loads ahead": Step(64, 128, 32, 2, 4),
    "wgmma": Step(128, 128, 64, 8, 1),
    "wgmma, loads ahead": Step(128, 128, 64, 8, 3),
    "wgmma, TMA": Step(128, 128, 64, 8, 4, tma=True),
}
INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "fma.rn.f32")


def run_step(step: Step, a: Tensor, b: Tensor, c: Tensor) -> Any:
    M, (N, K) = a.shape[0], b.shape
    sources = (a, b)
    if step.tma:
        sources = tuple(
            TensorDescriptor.from_tensor(x, [n, step.inner]) for x, n in ((a, step.rows), (b, step.columns))
        )
    return gemm[(M // step.rows * (N // step.columns),)](
        *sources, c, M, N, K, step.rows, step.columns, step.inner, step.stages, step.tma, num_warps=step.warps
    )


def instruction(compiled: Any) -> str:
    """The arithmetic instruction in its PTX, and its shape where it has one."""
    ptx = compiled.asm["ptx"]
    return next(name for name in INSTRUCTIONS if name in ptx)


def measured(size: int = SIZE) -> dict[str, list[Any]]:
    from gemm_gpu import error, seconds_in_turns

    wide = [torch.randn(size, size, device="cuda") * size**-0.25 for _ in range(2)]
    found: dict[str, list[Any]] = {}
    flops = 2 * size**3 / 1e12
    for name, step in STEPS.items():
        try:
            a, b = (x.to(step.dtype) for x in wide)
            c = torch.full((size, size), torch.nan, device="cuda", dtype=step.dtype)
            compiled = run_step(step, a, b, c)
            wrong = error(c[:256], a[:256].float() @ b.float().T)
            seconds = seconds_in_turns({"own": lambda a=a, b=b, c=c, step=step: run_step(step, a, b, c)})["own"]
            found[name] = [instruction(compiled), round(flops / seconds), round(wrong, 6)]
        except Exception as problem:  # the others are still worth knowing
            found[name] = [f"{type(problem).__name__} {str(problem).strip()[:120]}"]
        print(name, found[name], flush=True)
    a, b = (x.bfloat16() for x in wide)
    for name, call in finished(a, b).items():
        try:
            seconds = seconds_in_turns({"own": call})["own"]
            found[name] = ["", round(flops / seconds)]
        except Exception as problem:  # likewise
            found[name] = [f"{type(problem).__name__} {str(problem).strip()[:120]}"]
    return found


def finished(a: Tensor, b: Tensor) -> dict[str, Callable[[], object]]:
    """What the steps lead to: ours, the library's, and the library's with half of the weights zero (2:4)."""
    from armillary.kernels.gemm.large_linear_wgmma import large_linear
    from armillary.kernels.quantized.sparse import SparseLinear, prune

    calls: dict[str, Callable[[], object]] = {
        "wgmma, persistent, specialised warps": lambda: large_linear(a, b),
        "cuBLAS": lambda: F.linear(a, b),
    }
    try:
        calls["2:4 sparse, library"] = partial(SparseLinear(prune(b)), a)
    except (RuntimeError, NotImplementedError, ValueError) as problem:
        print("2:4 sparse:", problem, flush=True)
    return calls


def main() -> None:
    print(json.dumps(measured(), ensure_ascii=False))


if __name__ == "__main__":
    main()
