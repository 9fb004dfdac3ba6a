"""Other ways to cut the work of the serving kernels, against the ceilings measured in the same run: what the rules in
`split_tiling`, `plan`, `tiling` and the fp8 kernels were taken from.

    python -m benchmarks.tilings_gpu [paged] [small] [qkv] [fp8]

Each way is timed from CUDA graphs on inputs in turn past L2; one that fails leaves the others. JSON comes last: for
every shape the share of the ceiling (or TFLOP/s) by way, the best first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from armillary.kernels import fp8_product_triton, paged_attention_triton, qkv_cache_triton
from armillary.kernels.fp8_linear import E4M3
from armillary.kernels.fp8_quantise_triton import quantise
from armillary.kernels.paged_attention import PAGED_ATTENTION, PagedCase
from armillary.kernels.qkv_cache import QKV_CACHE, QkvCase
from armillary.kernels.small_linear_triton import Tiles, plan, run_tiles, small_linear
from armillary.kernels.timing import time_calls
from armillary.kernels.trial import input_sets
from armillary.profiling.kernel_bench import measure_some
from armillary.profiling.settings import settings_for

CUDA = torch.device("cuda")
Ways = dict[str, Callable[..., Any]]


def shares(ways: Ways, sets: list[Any], amount: float, roof: float = 1e12, rest_s: float = 0.0) -> dict[str, Any]:
    """Way -> amount a second over the roof, in percent for bytes."""
    found: dict[str, Any] = {}
    for name, run in ways.items():
        try:
            calls = [lambda inputs=inputs, run=run: run(*inputs) for inputs in sets]
            took = time_calls(calls, CUDA, budget_s=0.05, rest_s=rest_s, graph=rest_s == 0).seconds
            found[name] = round(amount / took / roof * (1 if rest_s else 100), 1)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:60]}"
        print(name, found[name], file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    return dict(sorted(found.items(), key=lambda item: -item[1] if isinstance(item[1], float) else 0))


def paged(roofs: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Stages, workers a multiprocessor, keys a tile and warps of the split kernel."""
    plain = paged_attention_triton.split_tiling

    def way(**other: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with patch.object(paged_attention_triton, "split_tiling", lambda *args: replace(plain(*args), **other)):
                return paged_attention_triton.paged_attention(*inputs)

        return run

    others: list[dict[str, Any]] = [
        {}, {"stages": 3}, {"stages": 4}, {"workers": 3, "stages": 3}, {"n": 32, "stages": 5}, {"warps": 8},
        {"warps": 2},
    ]  # fmt: skip
    ways = {" ".join(f"{k}={v}" for k, v in other.items()) or "rule": way(**other) for other in others}
    for case in (PagedCase(batch=256, context=1024), PagedCase(batch=256, context=1024, heads=16, kv_heads=2),
                 PagedCase(batch=256, context=1024, ragged=True), PagedCase(batch=1, context=32768),
                 PagedCase(batch=32, context=4096, head_dim=64),
                 PagedCase(batch=256, context=1024, cache="fp8")):  # fmt: skip
        sets = input_sets(PAGED_ATTENTION, case)
        yield case.label, shares(ways, sets, PAGED_ATTENTION.work(case).bytes, roofs["read"])


def small(roofs: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Rows, depth, splits and stages of small matmuls."""

    def way(tiles: Tiles) -> Callable[..., Any]:
        return lambda x, weight: run_tiles(x, weight, None, None, 1e-6, False, tiles)

    for outputs, inputs in ((4096, 14336), (14336, 4096), (6144, 4096), (5120, 13824), (1024, 8192)):
        weights = [torch.randn(outputs, inputs, device=CUDA).bfloat16() for _ in range(4)]
        for tokens in (1, 8, 32, 64):
            mine = plan(tokens, outputs, inputs)
            ways: Ways = {"torch": F.linear, "rule": small_linear}
            for change in ({"stages": mine.stages + 1}, {"stages": mine.stages - 1}, {"early": not mine.early},
                           {"splits": mine.splits + 1}, {"splits": max(1, mine.splits // 2)}, {"warps": 8},
                           {"rows": 128, "splits": max(1, mine.splits * mine.rows // 128)},
                           {"depth": 256, "stages": 2}):  # fmt: skip
                ways[" ".join(f"{k}={v}" for k, v in change.items())] = way(replace(mine, **change))
            x = torch.randn(tokens, inputs, device=CUDA).bfloat16()
            moved = 2.0 * (outputs * inputs + tokens * (inputs + outputs))
            found = shares(ways, [(x, w) for w in weights], moved, roofs["read"])
            yield f"{outputs} × {inputs}, {tokens} tokens", found


def qkv(roofs: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Tokens and warps of a program of the cache write."""

    def way(sizes: tuple[int, int]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with patch.object(qkv_cache_triton, "tiling", lambda *args: sizes):
                return qkv_cache_triton.qkv_cache(*inputs)

        return run

    for case in (QkvCase(tokens=16384), QkvCase(tokens=16384, heads=64), QkvCase(tokens=256)):
        sizes = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8))
        ways: Ways = {"rule": qkv_cache_triton.qkv_cache} | {str(size): way(size) for size in sizes}
        yield case.label, shares(ways, input_sets(QKV_CACHE, case), QKV_CACHE.work(case).bytes, roofs["copy"])


def fp8(roofs: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The product alone, ours and the library's."""
    a, b = (quantise(torch.randn(8192, 8192, device=CUDA).bfloat16(), E4M3, "row") for _ in range(2))

    def way(library: bool, fast: bool) -> Callable[..., Any]:
        return lambda a, b: fp8_product_triton.multiplied(a, b, torch.bfloat16, fast=fast, library=library)

    ways = {f"{'library' if library else 'own'}{'' if fast else ', sums in fp32'}": way(library, fast)
            for library in (True, False) for fast in (True, False)}  # fmt: skip
    yield "8192³ TFLOP/s", shares(ways, [(a, b)], 2.0 * 8192**3, rest_s=0.05)


PARTS = {"paged": paged, "small": small, "qkv": qkv, "fp8": fp8}


def main(parts: list[str]) -> None:
    roofs = measure_some(settings_for(CUDA, quick=False), {"read", "copy"})
    found: dict[str, Any] = {"TB/s": {name: round(roof / 1e12, 3) for name, roof in roofs.items()}}
    try:
        for part in parts or PARTS:
            found |= {f"{part} {label}": result for label, result in PARTS[part](roofs)}
    finally:
        print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
