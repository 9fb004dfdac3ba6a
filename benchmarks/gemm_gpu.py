"""Our persistent GEMM and cuBLAS's on a GPU, in turns: TFLOP/s on five shapes, and what an epilogue costs each.

    python benchmarks/gemm_gpu.py

The last line on stdout is one line of JSON: shape -> [ours, cuBLAS, our share in %]. Agreement with fp32 at odd shapes
comes first.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.gemm.large_linear import SHAPES
from armillary.kernels.gemm.large_linear_wgmma import PLAIN, WITH_RESIDUAL, LinearTiles, launch

ODD = ((1000, 776, 520), (1, 8, 8), (129, 264, 72), (1030, 2048, 4096))
ROUNDS, SECONDS_PER_ROUND = 5, 0.03


def operands(M: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    x, weight = (torch.randn(n, K, device="cuda", generator=generator) for n in (M, N))
    return x.bfloat16(), (weight * K**-0.5).bfloat16()


def multiplied(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    added: Tensor | None = None,
    *,
    tiles: LinearTiles | None = None,
) -> Tensor:
    """By our kernel; `tiles` None: the usual ones."""
    return launch(x, weight, bias, activation, added, tiles or (PLAIN if added is None else WITH_RESIDUAL))


def error(y: Tensor, expected: Tensor) -> float:
    if not bool(torch.isfinite(y).all()):
        return float("nan")
    return float((y.float() - expected).norm() / expected.norm())


def agreement(tiles: LinearTiles | None = None, *, residual: bool = True) -> dict[str, float]:
    """Largest relative errors, without and with an epilogue."""
    plain, full = 0.0, 0.0
    for M, N, K in ODD:
        x, weight = operands(M, N, K)
        bias, added = torch.randn(N, device="cuda").bfloat16(), torch.randn(M, N, device="cuda").bfloat16()
        expected = x.float() @ weight.float().T
        plain = max(plain, error(multiplied(x, weight, tiles=tiles), expected))
        for activation, wide in (("silu", F.silu), ("gelu_tanh", lambda y: F.gelu(y, approximate="tanh"))):
            after = wide(expected + bias.float())
            y = multiplied(x, weight, bias, activation, added if residual else None, tiles=tiles)
            full = max(full, error(y, after + added.float() if residual else after))
    return {"plain": round(plain, 5), "epilogue": round(full, 5)}


def seconds_in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each call, from rounds in which all take their turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {name: max(1, int(SECONDS_PER_ROUND / once(call, 3))) for name, call in calls.items()}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(once(call, counts[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def once(call: Callable[[], object], count: int) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    call()
    marks[0].record()
    for _ in range(count):
        call()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / count / 1e3


def speeds(tiles: LinearTiles | None = None) -> dict[str, list[float]]:
    found = {}
    for name, (M, N, K) in SHAPES.items():
        x, weight = operands(M, N, K)
        calls: dict[str, Callable[[], object]] = {
            "own": lambda x=x, weight=weight: multiplied(x, weight, tiles=tiles),
            "cublas": lambda x=x, weight=weight: F.linear(x, weight),
        }
        seconds = seconds_in_turns(calls)
        rates = {each: 2 * M * N * K / s / 1e12 for each, s in seconds.items()}
        share = 100 * rates["own"] / rates["cublas"]
        found[name] = [round(rates["own"]), round(rates["cublas"]), round(share, 1)]
    return found


def epilogues() -> dict[str, list[float]]:
    """TFLOP/s at 8192 × 8192 × 4096 with bias, SiLU and residual: ours in one kernel, cuBLAS's with torch's."""
    M, N, K = 8192, 8192, 4096
    x, weight = operands(M, N, K)
    bias, added = torch.randn(N, device="cuda").bfloat16(), torch.randn(M, N, device="cuda").bfloat16()
    calls: dict[str, Callable[[], object]] = {
        "own": lambda: multiplied(x, weight, bias, "silu", added),
        "torch": lambda: F.silu(F.linear(x, weight, bias)) + added,
    }
    rates = {name: 2 * M * N * K / s / 1e12 for name, s in seconds_in_turns(calls).items()}
    return {"bias, silu, residual": [round(rate) for rate in rates.values()]}


def main() -> None:
    found: dict[str, Any] = {"agrees": agreement(), **speeds(), **epilogues()}
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
