"""Ceilings of a GPU as `armillary bench ceilings` measures them, beside plain torch loops in the same run.

    python benchmarks/ceilings_gpu.py [FILE]      # FILE gets every point as JSON; a short table is printed last

Plain loop: three warm-ups, then twenty times the operation between two events, the mean. Ours: the median of bursts
with rests between. They take turns, each after a rest, because a chip under its power limit is slower.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from armillary.profiling.ceilings import bandwidth, gemm
from armillary.profiling.ceilings.ceilings import measure_ceilings
from armillary.profiling.ceilings.settings import Settings, settings_for

SIZE = 8192
COPY_BYTES = 8 << 30
ROUNDS = 5
LOOP = 20
REST_S = 0.3


def plain_loop(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, the usual way."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def gemm_by_turns(settings: Settings) -> dict[str, Any]:
    a, b = (torch.randn(SIZE, SIZE, device=settings.device, dtype=torch.bfloat16) for _ in range(2))
    case = {"m": SIZE, "n": SIZE, "k": SIZE, "dtype": "bf16"}
    flops = 2.0 * SIZE**3
    return by_turns(
        lambda: flops / plain_loop(lambda: a @ b, LOOP),
        lambda: next(gemm.measure([case], settings))[1]["flops"],
        "TFLOP/s",
    )


def copy_by_turns(settings: Settings) -> dict[str, Any]:
    source = torch.randn(COPY_BYTES // 8, device=settings.device)
    target = torch.randn_like(source)
    case = {"op": "copy", "bytes": COPY_BYTES, "hot": False}
    return by_turns(
        lambda: COPY_BYTES / plain_loop(lambda: target.copy_(source), LOOP),
        lambda: next(bandwidth.measure([case], settings))[1]["bytes_per_s"],
        "TB/s",
    )


def by_turns(plain: Callable[[], float], ours: Callable[[], float], unit: str) -> dict[str, Any]:
    pairs = [(rested(plain) / 1e12, rested(ours) / 1e12) for _ in range(ROUNDS)]
    theirs, mine = (median(column) for column in zip(*pairs, strict=True))
    shown = [[round(value, 3) for value in pair] for pair in pairs]
    off = round(mine / theirs - 1, 4)
    return {"unit": unit, "plain": round(theirs, 3), "ours": round(mine, 3), "off": off, "by_turns": shown}


def rested(measure: Callable[[], float]) -> float:
    torch.cuda.synchronize()
    time.sleep(REST_S)
    return measure()


def best(points: Any, measure: str, **where: Any) -> float | None:
    found = [p[measure] for p in points if all(p.get(key) == value for key, value in where.items())]
    return max(found, default=None)


def main(file: Path | None) -> None:
    begin = time.monotonic()
    device = torch.device("cuda")
    settings = settings_for(device)
    compared = {"gemm bf16 8192³": gemm_by_turns(settings), "copy 8 GiB": copy_by_turns(settings)}
    print(json.dumps(compared, ensure_ascii=False), flush=True)
    torch.cuda.empty_cache()
    found = measure_ceilings(device, folder=Path.cwd())
    points = found.peaks.points
    if file is not None:
        table = {"device": found.peaks.device, "date": found.peaks.date, "about": found.peaks.about, "points": points}
        file.write_text(json.dumps(table | {"compared": compared}, indent=1))
    gemms = points["gemm"]
    print(
        json.dumps(
            {
                "device": found.peaks.device,
                "torch": torch.__version__,
                "date": found.peaks.date,
                "compared": compared,
                "tflops": {name: round(best(gemms, "flops", dtype=name) / 1e12, 1) for name in gemm.dtypes(device)},
                "sustained_tflops": {
                    p["dtype"]: round(p["beside"]["sustained_flops"] / 1e12, 1)
                    for p in gemms
                    if "sustained_flops" in p["beside"]
                },
                "fma_tflops": round((best(points.get("fma", ()), "flops") or 0) / 1e12, 1),
                "tb_per_s": {op: round(best(points[op], "bytes_per_s") / 1e12, 3) for op in bandwidth.OPS},
                "launch_us": {p["mode"]: round(p["seconds"] * 1e6, 2) for p in points["launch"]},
                "ceilings_s": round(found.seconds, 1),
                "skipped": found.skipped,
                "whole_s": round(time.monotonic() - begin, 1),
            },
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="gets every point as JSON")
    main(parser.parse_args().file)
