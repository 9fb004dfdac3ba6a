"""Losses of the same run in several number formats: the same weights at the start, the same text in the same order.

    python benchmarks/precision_losses.py [--model armillary-25m] [--steps 500] [--device cuda] [--json FILE]
                                          [--formats fp32 bf16 fp8-token fp8-tensor fp8-row] [--data stdlib]
                                          [--home FOLDER]

The text is the default corpus, Python's standard library on this machine, or a folder of shards. A loss is the mean of
the last 20 steps, and beside it the loss on text that was held out; both are compared with fp32's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.training.prepare_run import train_recipe
from armillary.training.telemetry.step_telemetry import StepReport

LAST, EVERY = 20, 50
"""steps whose losses are averaged, and between two words about how it goes"""


def recipe_of(name: str, arguments: argparse.Namespace) -> Recipe:
    precision, _, scaling = name.partition("-")
    return recipe_from_dict(
        {
            "model": {"name": arguments.model},
            "hardware": {"on": "here"},
            "data": {"source": arguments.data},
            "layout": {"precision": precision, "fp8_scaling": scaling or "token", "micro_batch": arguments.rows},
            "train": {
                "sequence": arguments.sequence,
                "batch_tokens": arguments.rows * arguments.sequence,
                "steps": arguments.steps,
                "eval_every": arguments.steps,
                "eval_batches": 8,
                "profile_every": 0,
            },
        }
    )


def run(name: str, arguments: argparse.Namespace, home: Home, found: dict[str, dict[str, Any]]) -> None:
    """Fills `found[name]`, and writes it down as it goes."""
    losses: list[float] = []
    curve: dict[int, float] = {}
    begin = time.perf_counter()

    def note(**more: Any) -> None:
        last = losses[-LAST:]
        curve[len(losses)] = sum(last) / len(last)
        found[name] = {
            "steps": len(losses),
            "loss": curve[len(losses)],
            "first": losses[0],
            "curve": curve,
            "seconds": round(time.perf_counter() - begin, 1),
        } | more
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))

    def watch(report: StepReport) -> None:
        losses.append(report.gauges["loss"])
        if len(losses) % EVERY == 0:
            note()

    done = train_recipe(recipe_of(name, arguments), home=home, device=arguments.device, run=name, watch=watch)
    note(val_loss=done.val_loss)


def table(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| format | steps | loss | against fp32 | held out | against fp32 |", "|---|---:|---:|---:|---:|---:|"]
    plain = found.get("fp32", {})
    for name, row in found.items():
        cells = [str(row["steps"])]
        for key in ("loss", "val_loss"):
            mine, right = row.get(key), plain.get(key)
            cells += [
                "-" if mine is None else f"{mine:.4f}",
                f"{100 * (mine / right - 1):+.2f} %" if mine and right and name != "fp32" else "",
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["fp32", "bf16", "fp8-token", "fp8-tensor", "fp8-row"])
    parser.add_argument("--model", default="armillary-25m")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="sequences of a step")
    parser.add_argument("--data", default="stdlib", help="where the text is, as in a recipe")
    parser.add_argument("--device")
    parser.add_argument("--home", type=Path, help="where data and kernels are kept between runs")
    parser.add_argument("--json", type=Path, help="where to write what is measured, as it goes")
    arguments = parser.parse_args()
    home = Home.at(arguments.home or tempfile.mkdtemp())
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.formats:
        run(name, arguments, home, found)
        print(name, json.dumps({key: value for key, value in found[name].items() if key != "curve"}), flush=True)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
