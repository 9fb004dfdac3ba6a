"""Every kernel on a GPU as `armillary bench kernels` measures it, cold, with the bars and a short table last.

    python benchmarks/kernels_gpu.py [FOLDER] [--op NAME …] [--limit SECONDS]

FOLDER gets kernels.json, kernels.md and kernels.html, written anew after every case: a run that is cut off keeps what
it had. All that is printed on stdout is one line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from armillary.kernels.core.version_trial import ONE_CALL
from armillary.profiling.kernel_bench.bench import LIMIT_S, bench_kernels
from armillary.profiling.kernel_bench.report import bench_page
from armillary.profiling.kernel_bench.results import KernelBench, KernelRow, Measured
from armillary.store.home import Home

VERSIONS = ("eager", "compile", "torch", "cudnn", "flash", "sdpa", "cublas", "liger")
"""columns of their own, by how names of versions begin"""


def percent(one: Measured | None) -> str:
    """'95/91' of the ceiling, forward and backward; a star where one long call is all that was timed."""
    if one is None or one.forward_share is None:
        return "-"
    star = "*" if one.method == ONE_CALL else ""
    extra = "" if one.extra_bytes is None else f" {one.extra_bytes / 1e9:.2f}GB"
    backward = f"/{100 * one.backward_share:.0f}" if one.backward_share else ""
    return f"{100 * one.forward_share:.0f}{backward}{star}{extra}"


def best(row: KernelRow, name: str) -> Measured | None:
    """Of the versions whose names begin so, the quickest, rivals included."""
    timed = [one for one in row.measured if one.version.startswith(name) and one.seconds is not None]
    return min(timed, key=lambda one: one.seconds or 0.0, default=None)


def verdict(row: KernelRow, one: Measured | None) -> str:
    """'holds', what it misses, or nothing where there is no bar."""
    return "" if row.bar is None else "; ".join(row.misses(one)) or "holds"


def behind(bench: KernelBench) -> list[str]:
    """Cases where what was chosen is slower than another version that was timed, rivals included."""
    found = []
    for row in bench.rows:
        won = row.of(row.chosen)
        quicker = [one for one in row.measured if won and won.seconds and one.seconds and one.seconds < won.seconds]
        found += [f"{row.op} {row.name}: {one.version}" for one in quicker]
    return found


def table(bench: KernelBench) -> str:
    """Markdown, a line a case: shares of the ceiling in percent, and the bar."""
    shown = [name for name in VERSIONS if any(best(row, name) for row in bench.rows)]
    head = ["op", "case", "shape", "chosen", "chosen %", "ours %", *(f"{name} %" for name in shown)]
    head += ["of", "bar", "chosen", "ours", "s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in bench.rows:
        won = row.of(row.chosen)
        cells = [row.op, row.name, row.shape, row.chosen or row.failed, percent(won), percent(row.ours)]
        cells += [percent(best(row, name)) for name in shown]
        cells += [row.ceiling, row.bar.text if row.bar else "", verdict(row, won), verdict(row, row.ours)]
        lines.append("| " + " | ".join([*cells, f"{row.seconds:.1f}"]) + " |")
    return "\n".join(lines)


def summary(bench: KernelBench) -> dict[str, object]:
    """What is printed."""
    barred = [row for row in bench.rows if row.bar is not None]
    verdicts = {f"{row.op}/{row.name}": verdict(row, row.of(row.chosen)) for row in barred}
    missed = {name: text for name, text in verdicts.items() if text != "holds"}
    return {
        "device": bench.device,
        "torch": torch.__version__,
        "ceilings": {name: round(top / 1e12, 3) for name, top in bench.ceilings.items()},
        "rows": {
            f"{row.op}/{row.name}": [row.chosen, percent(row.of(row.chosen)), percent(row.ours)] for row in bench.rows
        },
        "bars": f"{len(barred) - len(missed)} of {len(barred)} hold",
        "missed": missed,
        "behind": behind(bench),
        "left": bench.left,
        "held_gb": round(max((row.held_bytes for row in bench.rows), default=0.0) / 1e9, 2),
        "slowest": {
            f"{row.op}/{row.name}": round(row.seconds, 1)
            for row in sorted(bench.rows, key=lambda row: -row.seconds)[:6]
        },
        "warm_s": round(bench.warm_s, 1),
        "seconds": round(bench.seconds, 1),
    }


def writer(folder: Path) -> Callable[[KernelBench], None]:
    def write(bench: KernelBench) -> None:
        (folder / "kernels.json").write_text(json.dumps(asdict(bench), indent=1))
        (folder / "kernels.html").write_text(bench_page(bench))
        (folder / "kernels.md").write_text(table(bench) + "\n")

    return write


def main(folder: Path, ops: list[str], limit_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()

    def watch(done: int, total: int, what: str) -> None:
        held = torch.cuda.memory_reserved() / 1e9 if done else 0.0
        print(f"{time.monotonic() - begin:.0f} s {done}/{total} {held:.2f} GB {what}", file=sys.stderr, flush=True)

    keep = writer(folder)
    bench = bench_kernels(
        torch.device("cuda"), ops=ops, home=Home.at(folder / "home"), limit_s=limit_s, watch=watch, save=keep
    )
    keep(bench)
    print(json.dumps(summary(bench), ensure_ascii=False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--limit", type=float, default=LIMIT_S)
    given = parser.parse_args()
    main(given.folder, given.op, given.limit)
