"""Other ways to cut the work of kernels, against the ceilings measured in the same run: what the rules in
`split_tiling`, `plan`, `tiling`, `norm_shape`, rope and the fp8 kernels were taken from.

    python -m benchmarks.tilings_gpu [paged] [small] [vector] [qkv] [fp8] [norm] [bare] [weights] [rope]
        [stores=.cs]

`stores=.cs` lets norms and rope store past the cache; it holds for a whole run.

Each way is timed from CUDA graphs on inputs in turn past L2; one that fails leaves the others. JSON comes last: for
every shape the share of the ceiling (or TFLOP/s) by way, the best first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton.language as tl

from armillary.kernels.core.timing import time_calls
from armillary.kernels.core.version_trial import input_sets
from armillary.kernels.fp8 import matmul_triton as fp8_matmul_triton
from armillary.kernels.fp8.linear import E4M3
from armillary.kernels.fp8.quantize_triton import quantise
from armillary.kernels.gemm.gemv_triton import GemvTiles, run_vector
from armillary.kernels.gemm.skinny_triton import SkinnyTiles, plan, run_tiles, small_linear
from armillary.kernels.norm import norm_triton
from armillary.kernels.norm import rows_triton as norm_rows_triton
from armillary.kernels.norm.launch_config import LaunchShape, backward_shape
from armillary.kernels.norm.norm import NORM, NormCase
from armillary.kernels.paged import paged_attention_triton
from armillary.kernels.paged import qkv_to_cache_triton as qkv_cache_triton
from armillary.kernels.paged.paged_attention import PAGED_ATTENTION, PagedCase
from armillary.kernels.paged.qkv_to_cache import QKV_CACHE, QkvCase
from armillary.kernels.pointwise import rope_triton
from armillary.kernels.pointwise.rope import ROPE, RopeCase
from armillary.profiling.ceilings.settings import settings_for
from armillary.profiling.kernel_bench.bench import measure_some

CUDA = torch.device("cuda")
Ways = dict[str, Callable[..., Any]]


def shares(ways: Ways, sets: list[Any], amount: float, ceiling: float = 1e12, rest_s: float = 0.0) -> dict[str, Any]:
    """Way -> amount a second over the ceiling, in percent for bytes."""
    found: dict[str, Any] = {}
    for name, run in ways.items():
        try:
            calls = [lambda inputs=inputs, run=run: run(*inputs) for inputs in sets]
            took = time_calls(calls, CUDA, budget_s=0.03, rest_s=rest_s, graph=rest_s == 0).seconds
            found[name] = round(amount / took / ceiling * (1 if rest_s else 100), 1)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:60]}"
        print(name, found[name], file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    return dict(sorted(found.items(), key=lambda item: -item[1] if isinstance(item[1], float) else 0))


def patched(run: Callable[..., Any], module: Any, **names: Any) -> Callable[..., Any]:
    """`run` with other values for names of a module."""

    def call(*inputs: Any) -> Any:
        with ExitStack() as stack:
            for name, value in names.items():
                stack.enter_context(patch.object(module, name, value))
            return run(*inputs)

    return call


def paged(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Values the second launch adds per step, stages, workers per multiprocessor, keys per tile, warps."""
    plain, run = paged_attention_triton.split_tiling, paged_attention_triton.paged_attention

    def way(**other: Any) -> Callable[..., Any]:
        return patched(run, paged_attention_triton, split_tiling=lambda *args: replace(plain(*args), **other))

    others: list[dict[str, Any]] = [
        {"ahead": 0},
        {"ahead": 2},
        {"stages": 4},
        {"workers": 3, "stages": 3},
        {"n": 32, "stages": 5},
        {"n": 64, "stages": 4},
        {"warps": 8},
    ]
    ways: Ways = {"rule": run}
    for count in (1024, 2048):
        ways[f"{count} added at a time"] = patched(run, paged_attention_triton, _COMBINE_ELEMENTS=count)
    ways |= {" ".join(f"{k}={v}" for k, v in other.items()): way(**other) for other in others}
    for case in (
        PagedCase(batch=256, context=1024, heads=16, kv_heads=2),
        PagedCase(batch=256, context=1024),
        PagedCase(batch=256, context=1024, heads=16, ragged=True),
        PagedCase(batch=1, context=32768),
        PagedCase(batch=64, context=2048),
        PagedCase(batch=32, context=4096, head_dim=64),
        PagedCase(batch=256, context=1024, cache="fp8"),
    ):
        sets = input_sets(PAGED_ATTENTION, case)
        yield case.label, shares(ways, sets, PAGED_ATTENTION.work(case).bytes, ceilings["read"])


def small(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Rows, depth, splits and stages of small matmuls."""

    def way(tiles: SkinnyTiles) -> Callable[..., Any]:
        return lambda x, weight: run_tiles(x, weight, None, None, 1e-6, False, tiles)

    for outputs, inputs in ((4096, 14336), (14336, 4096), (6144, 4096), (5120, 13824), (1024, 8192)):
        weights = [torch.randn(outputs, inputs, device=CUDA).bfloat16() for _ in range(4)]
        for tokens in (1, 8, 32, 64):
            mine = plan(tokens, outputs, inputs)
            ways: Ways = {"torch": F.linear, "rule": small_linear}
            for change in (
                {"stages": mine.stages + 1},
                {"stages": mine.stages - 1},
                {"early": not mine.early},
                {"splits": mine.splits + 1},
                {"splits": max(1, mine.splits // 2)},
                {"warps": 8},
                {"rows": 128, "splits": max(1, mine.splits * mine.rows // 128)},
                {"depth": 256, "stages": 2},
            ):
                ways[" ".join(f"{k}={v}" for k, v in change.items())] = way(replace(mine, **change))
            x = torch.randn(tokens, inputs, device=CUDA).bfloat16()
            moved = 2.0 * (outputs * inputs + tokens * (inputs + outputs))
            found = shares(ways, [(x, w) for w in weights], moved, ceilings["read"])
            yield f"{outputs} × {inputs}, {tokens} tokens", found


def qkv(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Tokens and warps of a program of the cache write."""

    def way(sizes: tuple[int, int]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            with patch.object(qkv_cache_triton, "tiling", lambda *args: sizes):
                return qkv_cache_triton.qkv_cache(*inputs)

        return run

    for case in (QkvCase(tokens=16384), QkvCase(tokens=16384, heads=64), QkvCase(tokens=256)):
        sizes = ((1, 1), (2, 1), (4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8))
        ways: Ways = {"rule": qkv_cache_triton.qkv_cache} | {str(size): way(size) for size in sizes}
        yield case.label, shares(ways, input_sets(QKV_CACHE, case), QKV_CACHE.work(case).bytes, ceilings["copy"])


def fp8(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The product alone, ours and the library's."""
    a, b = (quantise(torch.randn(8192, 8192, device=CUDA).bfloat16(), E4M3, "row") for _ in range(2))

    def way(library: bool, fast: bool) -> Callable[..., Any]:
        return lambda a, b: fp8_matmul_triton.multiply(a, b, torch.bfloat16, fast=fast, library=library)

    ways = {
        f"{'library' if library else 'own'}{'' if fast else ', sums in fp32'}": way(library, fast)
        for library in (True, False)
        for fast in (True, False)
    }
    yield "8192³ TFLOP/s", shares(ways, [(a, b)], 2.0 * 8192**3, rest_s=0.05)


def always(value: Any) -> Callable[..., Any]:
    return lambda *args, **more: value


def _backward_sets(case: NormCase, residual: bool) -> list[tuple[Any, ...]]:
    """Arguments of the backward kernel, three sets."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA).bfloat16()

    weight = randn(case.columns) if case.weight else None
    mean, rstd = torch.zeros(0 if case.kind == "rms" else case.rows, device=CUDA), torch.ones(case.rows, device=CUDA)
    size = (case.rows, case.columns)
    rest = (weight, mean, rstd, False, case.bias, False)
    return [(randn(*size), randn(*size) if residual else None, randn(*size), *rest) for _ in range(3)]


def bare(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Launch shapes of the backward of norms without weights, which leave nothing to add up."""
    layer, rms = {"kind": "layer", "weight": False}, {"weight": False}
    for rows, columns, how, residual in (
        (16384, 4096, layer, False),
        (16384, 4096, layer, True),
        (8192, 8192, layer, False),
        (8192, 5120, rms, False),
        (8192, 12288, rms, False),
    ):
        case = NormCase(rows=rows, columns=columns, **how)
        shapes = [
            LaunchShape(held, 256 * warps, warps) for held, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (2, 4))
        ]
        yield _backwards(case, residual, shapes, ceilings)


def weights(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Launch shapes of the backward of wide norms with weights."""
    layer = {"kind": "layer", "bias": True}
    for rows, columns, how in ((8192, 12288, layer), (8192, 4608, {}), (4096, 16384, {}), (8192, 8192, layer)):
        case = NormCase(rows=rows, columns=columns, **how)  # type: ignore[arg-type]
        rule = backward_shape(columns, 2, False, sums=1 + case.bias)
        shapes = [rule._replace(stages=stages) for stages in (2, 4)] + [rule._replace(ahead=not rule.ahead)]
        shapes += [rule._replace(warps=warps, width=256 * warps) for warps in (8, 16, 32) if warps != rule.warps]
        yield _backwards(case, False, shapes, ceilings)


def _backwards(case: NormCase, residual: bool, shapes: list[LaunchShape], ceilings: dict[str, float]) -> Any:
    run = norm_triton._norm_backward
    ways: Ways = {"rule": run}
    for shape in shapes:
        name = f"{shape.rows} rows, {shape.warps} warps, {shape.stages} stages{', ahead' if shape.ahead else ''}"
        ways[name] = patched(run, norm_triton, backward_shape=always(shape))
    moved = 2.0 * case.rows * case.columns * (4 if residual else 3)
    label = f"{case.label}{' residual' if residual else ''}, backward"
    return label, shares(ways, _backward_sets(case, residual), moved, ceilings["copy"])


def norm(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Rows held or read twice, by rows and warps of a program, and by pieces; forward."""
    run = NORM.version("triton").load()  # type: ignore[union-attr]
    for case in (
        NormCase(rows=16384, columns=4096),
        NormCase(rows=8192, columns=8192),
        NormCase(rows=8192, columns=8192, kind="layer"),
        NormCase(rows=8192, columns=12288),
    ):
        ways: Ways = {"rule": run}
        for held, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16)):
            shape = LaunchShape(held, 256 * warps, warps)
            once: dict[str, Any] = {"reads_twice": always(False), "forward_shape": always(shape)}
            ways[f"held {held}, {warps} warps"] = patched(run, norm_triton, **once)
        for piece in (2048, 4096, 8192):
            ways[f"twice, pieces of {piece}"] = patched(run, norm_triton, reads_twice=always(True), _PIECE=piece)
        yield case.label, shares(ways, input_sets(NORM, case), NORM.work(case).bytes, ceilings["copy"])


def rope(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Numbers of a program and of a thread where heads are gone over from end to end; forward."""
    run = ROPE.version("triton").load()  # type: ignore[union-attr]
    for dim, rotated in ((96, 24), (80, 80), (80, 20), (64, 16), (96, 96)):
        case = RopeCase(tokens=8192, heads=64, kv_heads=64, head_dim=dim, rotary_dim=rotated)
        sizes = ((8192, 16), (8192, 32), (4096, 16), (4096, 32), (16384, 32))
        whole = {"_SECTOR": 1 << 30}  # no half begins at the start of so large a sector
        ways: Ways = {"rule": run} | {f"{size}": patched(run, rope_triton, _WHOLE=size, **whole) for size in sizes}
        yield case.label, shares(ways, input_sets(ROPE, case), ROPE.work(case).bytes, ceilings["copy"])


def vector(ceilings: dict[str, float]) -> Iterable[tuple[str, dict[str, Any]]]:
    """One token: programs of a few rows against tiles for tensor cores."""

    def way(tiles: GemvTiles) -> Callable[..., Any]:
        return lambda x, weight: run_vector(x, weight, None, None, 1e-6, False, tiles)

    for outputs, inputs in ((4096, 14336), (14336, 4096), (6144, 4096), (4096, 4096), (1024, 8192)):
        weights = [torch.randn(outputs, inputs, device=CUDA).bfloat16() for _ in range(6)]
        x = torch.randn(1, inputs, device=CUDA).bfloat16()
        tiles = plan(1, outputs, inputs)
        ways: Ways = {"torch": F.linear, "rule": small_linear, "rule again": small_linear}
        ways["tensor cores"] = lambda x, w, tiles=tiles: run_tiles(x, w, None, None, 1e-6, False, tiles)
        for sizes in (
            (2, 1024, 4),
            (4, 1024, 4),
            (8, 1024, 4),
            (4, 2048, 8),
            (4, 512, 2),
            (8, 512, 2),
            (2, 2048, 4),
            (1, 2048, 4),
        ):
            for early in (True, False):
                ways[f"{sizes}{' early' if early else ''}"] = way(GemvTiles(*sizes, early))
        moved = 2.0 * (outputs * inputs + inputs + outputs)
        yield f"{outputs} × {inputs}", shares(ways, [(x, w) for w in weights], moved, ceilings["read"])


PARTS = {
    "paged": paged,
    "small": small,
    "vector": vector,
    "qkv": qkv,
    "fp8": fp8,
    "norm": norm,
    "bare": bare,
    "weights": weights,
    "rope": rope,
}


def main(parts: list[str]) -> None:
    for how in [part.partition("=")[2] for part in parts if part.startswith("stores=")]:
        for module in (norm_rows_triton, rope_triton):
            vars(module)["STREAM"] = tl.constexpr(how)  # before anything is compiled
    parts = [part for part in parts if "=" not in part]
    ceilings = measure_some(settings_for(CUDA, quick=False), {"read", "copy"})
    found: dict[str, Any] = {"TB/s": {name: round(ceiling / 1e12, 3) for name, ceiling in ceilings.items()}}
    try:
        for part in parts or PARTS:
            found |= {f"{part} {label}": result for label, result in PARTS[part](ceilings)}
    finally:
        print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    main(parser.parse_args().parts)
