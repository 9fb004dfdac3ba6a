"""Packed weights on this GPU: GEMMs of a Llama-3.1-8B layer at one token by format and tiles, at a few tokens,
block-scaled fp8 at 4,096 tokens, and 2:4 weights. Every kernel is compared with plain torch before it is timed.

    python benchmarks/quantized_gpu.py [--only int4,fp8,blocks,sparse,tokens] [--read BYTES_PER_S] [--fp8 FLOPS]
    python benchmarks/quantized_gpu.py --only new

`new` is what has not run on a GPU yet: GGUF's and bitsandbytes' formats, and fp8 by rows. Jobs that would begin after
--limit seconds are left out and named. Prints tables, and the figures as JSON in the last line. Kernels are
compiled by several processes first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.core.agreement import relative_error
from armillary.kernels.quantized.block_fp8 import BLOCK_FP8, BlockFp8Case
from armillary.kernels.quantized.packed_gemv_triton import PackedGemvTiles, run_gemv
from armillary.kernels.quantized.sparse import SparseLinear, prune
from armillary.kernels.quantized.weight_only import WeightOnlyCase, bytes_read, inputs, reference
from armillary.kernels.quantized.weight_only_triton import gemv_tiles, weight_only_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
FORMATS: dict[str, dict[str, Any]] = {
    "int4": {"kind": "int4", "group": 128},
    "int4 zeros": {"kind": "int4", "group": 128, "zeros": True},
    "int8": {"kind": "int8", "group": 0},
    "fp8": {"kind": "fp8", "group": 0},
    "fp8 blocks": {"kind": "fp8", "group": 128},
    "mxfp4": {"kind": "mxfp4", "group": 32},
    "nvfp4": {"kind": "nvfp4", "group": 16},
    "q8_0": {"kind": "int8", "group": 32},
    "q4_0": {"kind": "int4", "group": 32},
    "nf4": {"kind": "table", "group": 64},
    "q4_k": {"kind": "q4_k", "group": 32},
    "q5_k": {"kind": "q5_k", "group": 32},
    "q6_k": {"kind": "q6_k", "group": 16},
}
NEW = ("q8_0", "q4_0", "nf4", "q4_k", "q5_k", "q6_k")
TUNED = ("int4", "int8", "fp8")


def candidates(kind: str, inputs: int) -> Iterator[PackedGemvTiles]:
    """A thread has 16 bytes of a row in a step."""
    long = inputs > 4096
    if kind in ("int8", "fp8"):
        shapes = ((2048, 4), (4096, 4), (1024, 2), (16384, 16)) if long else ((4096, 8), (4096, 4), (4096, 2))
        rows = (2, 4, 8) if not long else (2, 4)
    else:
        shapes = ((4096, 4), (4096, 2), (2048, 2), (16384, 8)) if long else ((4096, 4), (4096, 2), (2048, 2), (2048, 1))
        rows = (4, 8) if long else (2, 4, 8)
    for depth, warps in shapes:
        for count in rows:
            yield PackedGemvTiles(rows=count, depth=depth, warps=warps)


def case_of(name: str, shape: str, tokens: int = 1) -> WeightOnlyCase:
    outputs, width = SHAPES[shape]
    options = dict(FORMATS[name])
    options["group"] = options["group"] or width
    return WeightOnlyCase(tokens=tokens, outputs=outputs, inputs=width, **options)


def arguments_of(case: WeightOnlyCase) -> tuple[Any, ...]:
    return inputs(case, torch.Generator("cuda").manual_seed(1))


def copies(arguments: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """The same numbers in other memory: more than the cache holds."""
    return [tuple(each.clone() if isinstance(each, Tensor) else each for each in arguments) for _ in range(count)]


def graph_seconds(calls: list[Callable[[], Tensor]], repeats: int = 20) -> float:
    """Median of replays of one graph of all calls."""
    with torch.no_grad():
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        del kept
    return sorted(times)[len(times) // 2]


def check(result: Tensor, wanted: Tensor, what: str) -> None:
    error = relative_error(result, wanted.double())
    assert error < 2e-2, f"{what}: off by {error:.2g}"


def gemv(arguments: tuple[Any, ...], tiles: PackedGemvTiles) -> Tensor:
    (x, *rest) = arguments
    codes, scale, zero, kind, group = rest
    return run_gemv(x[0], codes, scale, zero, kind, group, tiles)


def tune(name: str, shape: str, found: dict[str, Any]) -> PackedGemvTiles:
    """The fastest tiles; all are compared and timed."""
    case = case_of(name, shape)
    arguments = arguments_of(case)
    wanted, moved = reference(*arguments)[0].float(), bytes_read(case)
    sets = copies(arguments, max(4, min(LAYERS, int(4e8 // moved))))
    best, best_s, rows = gemv_tiles(case.outputs, case.inputs, case.kind), 1e9, {}
    for tiles in dict.fromkeys((best, *candidates(case.kind, case.inputs))):
        label = f"{tiles.rows}x{tiles.depth}w{tiles.warps}"
        try:
            check(gemv(arguments, tiles), wanted, label)
            seconds = graph_seconds([lambda a=each, t=tiles: gemv(a, t) for each in sets], 10) / len(sets)  # type: ignore[misc]
        except Exception as error:
            rows[label] = f"{type(error).__name__}: {str(error)[:80]}"
            continue
        rows[label] = round(moved / seconds / 1e12, 3)
        if seconds < best_s:
            best, best_s = tiles, seconds
    found[f"{name} {shape}"] = {"default": f"{next(iter(rows))}", "TB/s": rows}
    print(f"  {name} {shape}: {rows}", flush=True)
    return best


def layer_seconds(name: str, chosen: dict[str, PackedGemvTiles] | None, tokens: int = 1) -> tuple[float, int]:
    """Seconds and bytes of LAYERS times the four GEMMs in one graph."""
    sets = {shape: copies(arguments_of(case_of(name, shape, tokens)), LAYERS) for shape in SHAPES}
    for shape, each in sets.items():
        run = weight_only_linear if chosen is None else None
        result = run(*each[0]) if run else gemv(each[0], chosen[shape])[None]  # type: ignore[index]
        check(result, reference(*each[0]).float(), f"{name} {shape}")
    calls: list[Callable[[], Tensor]] = []
    for layer in range(LAYERS):
        for shape in SHAPES:
            each = sets[shape][layer]
            if chosen is None:
                calls.append(lambda a=each: weight_only_linear(*a))  # type: ignore[misc]
            else:
                calls.append(lambda a=each, t=chosen[shape]: gemv(a, t))  # type: ignore[misc]
    moved = LAYERS * sum(bytes_read(case_of(name, shape, tokens)) for shape in SHAPES)
    return graph_seconds(calls), moved


def plain_seconds(tokens: int) -> float:
    """The same in bf16 by torch."""
    calls: list[Callable[[], Tensor]] = []
    for outputs, width in SHAPES.values():
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(outputs, width, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        calls += [lambda a=x, w=weight: F.linear(a, w) for weight in weights]  # type: ignore[misc]
    return graph_seconds(calls) * LAYERS / 8


def one_token(name: str, read: float, found: dict[str, Any]) -> None:
    with torch.no_grad():
        chosen = {shape: tune(name, shape, found) for shape in SHAPES} if name in TUNED else None
        rates = {}
        for label, tiles in (("default", None), ("tuned", chosen)):
            if label == "tuned" and tiles is None:
                continue
            seconds, moved = layer_seconds(name, tiles)
            rates[label] = {"us_per_layer": 1e6 * seconds / LAYERS, "share": moved / seconds / read}
    tiles_text = {shape: f"{t.rows}x{t.depth}w{t.warps}" for shape, t in (chosen or {}).items()}
    found[f"{name}, one token"] = {**rates, "tiles": tiles_text}
    for label, rate in rates.items():
        print(
            f"| {name}, one token, {label} | {rate['us_per_layer']:.1f} µs/layer | {rate['share']:.1%} of read |",
            flush=True,
        )


def few_tokens(found: dict[str, Any], formats: tuple[str, ...], counts: tuple[int, ...]) -> None:
    for tokens in counts:
        row = {"bf16": 1e6 * plain_seconds(tokens) / LAYERS}
        for name in formats if tokens > 1 else ():
            try:
                with torch.no_grad():
                    row[name] = 1e6 * layer_seconds(name, None, tokens)[0] / LAYERS
            except Exception as error:
                print(f"  {name} {tokens}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            torch.cuda.empty_cache()
        found[f"{tokens} tokens, us per layer"] = row
        print(
            f"| {tokens} tokens, µs/layer | { ({name: round(value, 1) for name, value in row.items()}) } |", flush=True
        )


def blocks(ceiling: float, found: dict[str, Any]) -> None:
    from armillary.kernels.quantized import block_fp8_triton as launches

    tilings = {
        f"own {t.rows}x{t.columns} s{t.stages} w{t.warps}": t
        for t in (
            launches.BlockFp8Tiles(),
            launches.BlockFp8Tiles(stages=3),
            launches.BlockFp8Tiles(warps=4),
            launches.BlockFp8Tiles(rows=64, warps=4, stages=5),
            launches.BlockFp8Tiles(rows=256, warps=8, stages=3),
        )
    }
    for case_name, case in BLOCK_FP8.cases.items():
        assert isinstance(case, BlockFp8Case)
        x, codes, scale = BLOCK_FP8.inputs(case, torch.Generator("cuda").manual_seed(1))
        numbers, of_token = launches.quantise_tokens(x)
        wanted, flops = BLOCK_FP8.reference(x[:256], codes, scale).float(), BLOCK_FP8.work(case).flops
        gemms: dict[str, Callable[[], Tensor]] = {
            "cublas": lambda: launches.library_gemm(numbers, of_token, codes, scale, x.dtype)  # noqa: B023
        }
        for label, tiles in tilings.items():
            gemms[label] = lambda t=tiles: launches.gemm(numbers, of_token, codes, scale, x.dtype, t)  # type: ignore[misc]  # noqa: B023
        for label, run in gemms.items():
            try:
                with torch.no_grad():
                    check(run()[:256], wanted, label)
                    seconds = graph_seconds([run] * 5, 10) / 5
                    time.sleep(0.2)
            except Exception as error:
                print(f"  {case_name}, {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rate = flops / seconds
            found[f"blocks {case_name}, {label}"] = rate / ceiling
            print(f"| blocks {case_name}, {label} | {rate / 1e12:.0f} TFLOP/s | {rate / ceiling:.1%} |", flush=True)
        seconds = graph_seconds([lambda: launches.quantise_tokens(x)[0]] * 5) / 5  # noqa: B023
        print(f"  quantising {case_name}: {1e6 * seconds:.0f} µs", flush=True)


def sparse(found: dict[str, Any]) -> None:
    size = 8192
    x, weight = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = prune(weight)
    linear = SparseLinear(weight)
    with torch.no_grad():
        check(linear(x[:512]), F.linear(x[:512], weight).float(), "sparse")
        print("  ", type(linear.weight).__name__, flush=True)
        times = {}
        for label, run in (("dense", lambda: F.linear(x, weight)), ("2:4", lambda: linear(x))) * 2:
            time.sleep(0.3)
            times[label] = min(times.get(label, 1.0), graph_seconds([run] * 3, 8) / 3)
    found["2:4 speed-up at 8192³"] = times["dense"] / times["2:4"]
    print(
        f"| 2:4 at 8192³ | dense {1e3 * times['dense']:.3f} ms, 2:4 {1e3 * times['2:4']:.3f} ms | "
        f"{times['dense'] / times['2:4']:.2f}× |",
        flush=True,
    )


def compile_part(part: int, parts: int, names: list[str]) -> None:
    """Compile every parts-th kernel by running it once, for the cache on disk."""
    compile_new(part, parts, names)
    work = [
        (name, shape, tiles)
        for name in TUNED
        if name in names
        for shape in ("o", "down")
        for tiles in candidates(FORMATS[name]["kind"], SHAPES[shape][1])
    ]
    made: dict[tuple[str, str], Any] = {}
    with torch.no_grad():
        for name, shape, tiles in work[part::parts]:
            if (name, shape) not in made:
                made[name, shape] = arguments_of(case_of(name, shape))
            try:
                gemv(made[name, shape], tiles)
                torch.cuda.synchronize()
            except Exception as error:
                print(name, shape, tiles, type(error).__name__, str(error)[:100])


def compile_new(part: int, parts: int, names: list[str]) -> None:
    """The same for `NEW` formats."""
    jobs: list[Callable[[], object]] = [
        lambda name=name, shape=shape, tokens=tokens: weight_only_linear(*arguments_of(case_of(name, shape, tokens)))  # type: ignore[misc]
        for name in NEW
        if name in names
        for shape in ("o", "down")
        for tokens in (1, 8, 256)
    ]
    with torch.no_grad():
        for job in jobs[part::parts]:
            try:
                job()
                torch.cuda.synchronize()
            except Exception as error:
                print("compiling:", type(error).__name__, str(error)[:100])
            torch.cuda.empty_cache()


def compile_all(names: list[str]) -> None:
    parts = max(1, min(12, (os.cpu_count() or 2) - 2))
    command = [sys.executable, os.path.abspath(__file__)]
    command += ["--only", ",".join(names)]
    running = [subprocess.Popen([*command, "--part", f"{part}/{parts}"]) for part in range(parts)]
    for each in running:
        each.wait(timeout=200)


def main() -> None:
    parser = argparse.ArgumentParser()
    old = [name for name in FORMATS if name not in NEW]
    parser.add_argument("--only", default=",".join((*old, "tokens", "blocks", "sparse")))
    parser.add_argument("--read", type=float, default=4.39e12)
    parser.add_argument("--fp8", type=float, default=1.49e15)
    parser.add_argument("--limit", type=float, default=400.0)
    parser.add_argument("--part", default="")
    arguments = parser.parse_args()
    names = arguments.only.replace("new", ",".join((*NEW, "blocks", "few"))).split(",")
    if arguments.part:
        part, parts = map(int, arguments.part.split("/"))
        return compile_part(part, parts, names)
    begin, found = time.monotonic(), {}  # type: ignore[var-annotated]
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if set(names) & {*TUNED, *NEW}:
        compile_all(names)
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    jobs: dict[str, Callable[[], None]] = {
        **{name: lambda name=name: one_token(name, arguments.read, found) for name in FORMATS},  # type: ignore[misc]
        "blocks": lambda: blocks(arguments.fp8, found),
        "sparse": lambda: sparse(found),
        "tokens": lambda: few_tokens(found, ("int4", "int8", "fp8", "mxfp4"), (1, 8, 32)),
        "few": lambda: few_tokens(found, NEW, (8, 256)),
    }
    for name, job in jobs.items():
        if name not in names:
            continue
        if time.monotonic() - begin > arguments.limit:
            print(f"  {name}: left out, {arguments.limit:.0f} s are over", flush=True)
            continue
        try:
            job()
        except Exception:
            found[name] = traceback.format_exc()[-600:]
            print(found[name], flush=True)
        torch.cuda.empty_cache()
        print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
