"""Every kernel on a GPU as `armillary bench kernels` measures it, cold, with a short table last.

    python benchmarks/kernels_gpu.py [FOLDER] [--op NAME …] [--limit SECONDS]

FOLDER gets kernels.json, kernels.md and kernels.html.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from armillary.profiling.kernel_bench import LIMIT_S, KernelBench, Measured, bench_kernels
from armillary.profiling.kernel_plot import bench_page
from armillary.store.home import Home


def percent(one: Measured | None) -> str:
    """'95/91' of the ceiling, forward and backward."""
    if one is None or one.forward_share is None:
        return "-"
    return f"{100 * one.forward_share:.0f}" + (f"/{100 * one.backward_share:.0f}" if one.backward_share else "")


def behind(bench: KernelBench) -> list[str]:
    """Cases where what was chosen is slower than another version that was timed, rivals included."""
    found = []
    for row in bench.rows:
        won = row.of(row.chosen)
        quicker = [one for one in row.measured if won and won.seconds and one.seconds and one.seconds < won.seconds]
        found += [f"{row.op} {row.name}: {one.version}" for one in quicker]
    return found


def table(bench: KernelBench) -> str:
    """Markdown, a line a case."""
    head = ["op", "case", "shape", "chosen", "chosen %", "ours %", "compile %", "eager %"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in bench.rows:
        cells = [row.of(row.chosen), row.ours, row.of("compile"), row.of("eager")]
        shares = " | ".join(percent(one) for one in cells)
        lines.append(f"| {row.op} | {row.name} | {row.shape} | {row.chosen} | {shares} |")
    return "\n".join(lines)


def main(folder: Path, ops: list[str], limit_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    bench = bench_kernels(
        torch.device("cuda"), ops=ops, home=Home.at(folder / "home"), limit_s=limit_s,
        watch=lambda done, total, what: print(f"{done}/{total} {what}", file=sys.stderr, flush=True),
    )  # fmt: skip
    (folder / "kernels.json").write_text(json.dumps(asdict(bench), indent=1))
    (folder / "kernels.html").write_text(bench_page(bench))
    (folder / "kernels.md").write_text(table(bench) + "\n")
    print(json.dumps({
        "device": bench.device,
        "torch": torch.__version__,
        "ceilings": {name: round(top / 1e12, 3) for name, top in bench.ceilings.items()},
        "rows": {f"{row.op}/{row.name}": [row.chosen, percent(row.of(row.chosen)), percent(row.ours)]
                 for row in bench.rows},
        "behind": behind(bench),
        "skipped": bench.skipped,
        "warm_s": round(bench.warm_s, 1),
        "seconds": round(bench.seconds, 1),
    }, ensure_ascii=False))  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."))
    parser.add_argument("--op", action="append", default=[])
    parser.add_argument("--limit", type=float, default=LIMIT_S)
    given = parser.parse_args()
    main(given.folder, given.op, given.limit)
