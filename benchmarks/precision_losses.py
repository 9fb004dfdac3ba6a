"""Losses of the same run in several number formats: the same weights at the start, the same text in the same order.

    python benchmarks/precision_losses.py [--model armillary-25m] [--steps 500] [--device cuda] [--json FILE]
                                          [--formats fp32 bf16 fp8-token fp8-tensor fp8-row] [--home FOLDER]

The text is the default corpus, Python's standard library on this machine. A loss is the mean of the last 20 steps, and
beside it the loss on text that was held out; both are compared with fp32's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from armillary.spec.recipe import recipe_from_dict
from armillary.store.home import Home
from armillary.training.start import train_recipe

LAST = 20


def run(name: str, arguments: argparse.Namespace, home: Home) -> dict[str, Any]:
    precision, _, scaling = name.partition("-")
    recipe = recipe_from_dict({
        "model": {"name": arguments.model},
        "hardware": {"on": "here"},
        "data": {"source": "stdlib"},
        "layout": {"precision": precision, "fp8_scaling": scaling or "token", "micro_batch": arguments.rows},
        "train": {"sequence": arguments.sequence, "batch_tokens": arguments.rows * arguments.sequence,
                  "steps": arguments.steps, "eval_every": arguments.steps, "eval_batches": 8, "profile_every": 0},
    })  # fmt: skip
    losses: list[float] = []
    begin = time.perf_counter()
    done = train_recipe(
        recipe, home=home, device=arguments.device, run=name, watch=lambda report: losses.append(report.gauges["loss"])
    )
    last = losses[-LAST:]
    return {"loss": sum(last) / len(last), "val_loss": done.val_loss, "first": losses[0], "steps": len(losses),
            "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| format | loss | against fp32 | held out | against fp32 |", "|---|---:|---:|---:|---:|"]
    plain = found.get("fp32")
    for name, row in found.items():
        cells = []
        for key in ("loss", "val_loss"):
            off = f"{100 * (row[key] / plain[key] - 1):+.2f} %" if plain and plain is not row else ""
            cells += [f"{row[key]:.4f}", off]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["fp32", "bf16", "fp8-token", "fp8-tensor", "fp8-row"])
    parser.add_argument("--model", default="armillary-25m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32, help="sequences of a step")
    parser.add_argument("--device")
    parser.add_argument("--home", type=Path, help="where data and kernels are kept between runs")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    home = Home.at(arguments.home or tempfile.mkdtemp())
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.formats:
        found[name] = run(name, arguments, home)
        print(name, json.dumps(found[name]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
