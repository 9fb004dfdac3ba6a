"""2-simplicial attention on a GPU: agreement with fp64, then tile sizes of each kernel timed at the published shape.

    python benchmarks/simplicial_gpu.py [FOLDER] [--limit SECONDS] [--kernel forward|query|second]

FOLDER gets simplicial.json, written anew after every measurement, so that a run that is cut off keeps what it had. The
last line on stdout is one line of JSON: the best tiles of each kernel and TFLOP/s by the exact count of FLOPs (4·D per
pair and head forward, 12·D backward; ramps at the start included), beside those of plain attention's shape of GEMM.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.kernels.core.agreement import check, expect
from armillary.kernels.simplicial import simplicial_triton as launches
from armillary.kernels.simplicial import tiles as tile_table
from armillary.kernels.simplicial.gradients_triton import query_gradients, second_gradients
from armillary.kernels.simplicial.paged import PAGED_SIMPLICIAL, PagedSimplicialCase
from armillary.kernels.simplicial.simplicial import SIMPLICIAL, SimplicialCase
from armillary.kernels.simplicial.tiles import SimplicialTiles, ordered

PUBLISHED = SimplicialCase(batch=4, length=8192, heads=128, window_1=32, window_2=512)
OTHERS = {
    "64 heads": replace(PUBLISHED, heads=64),
    "window 256": replace(PUBLISHED, window_2=256),
    "groups of 4": SimplicialCase(batch=2, length=4096, heads=32, kv_heads=8, window_1=16, window_2=256),
    "2k, batch 1": replace(PUBLISHED, batch=1, length=2048),
}
AGREES = {
    "128 heads": SimplicialCase(batch=1, length=130, heads=128, window_1=8, window_2=70),
    "groups of 3": SimplicialCase(batch=2, length=97, heads=6, kv_heads=2, window_1=5, window_2=41, head_dim=64),
    "longer first window": SimplicialCase(batch=1, length=75, heads=16, window_1=40, window_2=7),
    "documents": SimplicialCase(batch=2, length=120, heads=8, kv_heads=2, documents=3, window_1=6, window_2=33),
    "fp32": SimplicialCase(batch=1, length=70, heads=8, window_1=4, window_2=30, dtype="fp32"),
}
"""logits have a standard deviation of 4"""
CANDIDATES: dict[str, tuple[SimplicialTiles, ...]] = {
    "forward": tuple(
        SimplicialTiles(rows, keys, warps, stages, 0, flat)
        for rows, keys, warps, stages, flat in (
            (128, 64, 8, 3, False),
            (128, 64, 8, 3, True),
            (128, 128, 8, 2, False),
            (128, 128, 8, 2, True),
            (128, 64, 8, 4, True),
            (128, 64, 4, 3, False),
            (64, 64, 4, 3, False),
            (64, 64, 4, 3, True),
            (64, 128, 4, 2, False),
            (256, 64, 16, 3, False),
        )
    ),
    "query": tuple(
        SimplicialTiles(rows, keys, warps, stages, 0, flat)
        for rows, keys, warps, stages, flat in (
            (64, 64, 8, 2, False),
            (64, 64, 8, 2, True),
            (64, 128, 8, 2, False),
            (64, 64, 4, 2, False),
            (128, 64, 8, 2, False),
            (128, 64, 16, 2, False),
        )
    ),
    "second": tuple(
        SimplicialTiles(rows, keys, warps, 2, 0, flat)
        for rows, keys, warps, flat in (
            (64, 64, 8, False),
            (64, 64, 8, True),
            (64, 64, 4, False),
            (128, 64, 8, False),
            (64, 128, 8, False),
            (128, 128, 8, False),
        )
    ),
}
SHARE = {"forward": 1.0, "query": 8 / 4, "second": 8 / 4}
"""FLOPs that a kernel executes, over those of the forward pass"""


class Log:
    """Results as they come, in a file."""

    def __init__(self, folder: Path | None, limit_s: float) -> None:
        self.found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        self._file = None if folder is None else folder / "simplicial.json"
        self._end = time.monotonic() + limit_s

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def put(self, part: str, name: str, value: Any) -> None:
        self.found.setdefault(part, {})[name] = value
        print(part, name, value, flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self.found, indent=1))


def agreement(log: Log) -> None:
    cases: list[tuple[str, Any, Any]] = [(name, SIMPLICIAL, case) for name, case in AGREES.items()]
    cases += [
        (f"paged, {queries} queries", PAGED_SIMPLICIAL, PagedSimplicialCase(batch=3, context=150, queries=queries))
        for queries in (1, 40)
    ]
    for name, op, case in cases:
        generator = torch.Generator("cuda").manual_seed(0)
        version = op.version("triton")
        assert version is not None
        try:
            found = check(version.load(), op, expect(op, op.inputs(case, generator), generator))
            log.put("agrees", name, f"{found.error:.2g}" if found.agreed else f"NO: {found.why_not}")
        except Exception as error:  # the others are still worth knowing
            log.put("agrees", name, f"FAILED: {type(error).__name__} {str(error)[:200]}")


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Median of some calls, each between two events."""
    run()
    torch.cuda.synchronize()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for before, after in marks:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    times = sorted(before.elapsed_time(after) for before, after in marks)
    return times[len(times) // 2] / 1e3


def runs_of(case: SimplicialCase, *, hopper: bool = False) -> dict[str, Callable[[], object]]:
    """Each kernel with its own inputs; `hopper`: by the kernels in HOPPER_KERNELS where there is one."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, options = SIMPLICIAL.inputs(case, generator)
    scale = options.scale_for(case.head_dim)
    masks = (None, scale, *options.pair_windows, hopper)
    out, lse = launches._simplicial(q, k, v, *masks)
    keys, values, windows = ordered(k, v, *options.pair_windows)
    factors = (scale, scale * launches._LOG2E, *windows)
    grad, delta = torch.randn_like(out), torch.zeros_like(lse)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    shared: tuple[Tensor, Tensor, Tensor, None] = (grad, lse, delta, None)
    return {
        "forward": lambda: launches._simplicial(q, k, v, *masks),
        "query": lambda: query_gradients(q, keys, values, shared, dq, factors, hopper),
        "second": lambda: second_gradients(q, keys, values, shared, None, dk, dv, factors, 0, hopper),
        "backward": lambda: launches._simplicial_backward(grad, out, lse, q, k, v, *masks),
    }


def tune(log: Log, wanted: list[str]) -> None:
    flops, runs = SIMPLICIAL.work(PUBLISHED).flops, runs_of(PUBLISHED)
    for kernel in wanted:
        times: dict[SimplicialTiles, float] = {}
        for tiles in CANDIDATES[kernel]:
            if log.is_over:
                break
            tile_table._TILES[kernel, False] = (tiles,)
            name = f"{kernel} {tiles.rows}x{tiles.keys} warps {tiles.warps} stages {tiles.stages} flat {tiles.flat:d}"
            try:
                times[tiles] = seconds(runs[kernel], 3)
                log.put("tiles", name, round(SHARE[kernel] * flops / times[tiles] / 1e12))
            except Exception as error:  # too much shared memory, or a compiler that gives up: the next ones may do
                log.put("tiles", name, f"{type(error).__name__} {str(error).strip()[:120]}")
        if times:
            best = min(times, key=times.__getitem__)
            tile_table._TILES[kernel, False] = (best,)
            log.put("best", kernel, [best.rows, best.keys, best.warps, best.stages, best.flat])


def speeds(log: Log) -> None:
    for name, case in {"published": PUBLISHED, **OTHERS}.items():
        if log.is_over:
            return
        work, runs = SIMPLICIAL.work(case), runs_of(case, hopper=True)
        for part, flops in (("forward", work.flops), ("backward", work.backward_flops)):
            log.put("tflops", f"{name}, {part}", round(flops / seconds(runs[part], 3) / 1e12))


def gemm(log: Log) -> None:
    """What the chip's library reaches on a large GEMM, a moment later."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    log.put("tflops", "GEMM 8192", round(2 * 8192**3 / seconds(lambda: a @ b, 10) / 1e12))


def parts(wanted: list[str]) -> Iterator[Callable[[Log], None]]:
    yield agreement
    yield gemm
    yield lambda log: tune(log, wanted)
    yield speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--limit", type=float, default=440.0)
    parser.add_argument("--kernel", action="append", choices=list(CANDIDATES))
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    log = Log(given.folder, given.limit)
    for part in parts(given.kernel or list(CANDIDATES)):
        part(log)
    print(json.dumps({name: log.found.get(name) for name in ("device", "agrees", "best", "tflops")}))


if __name__ == "__main__":
    main()
