"""What an asynchronous checkpoint costs training on this machine, and what deltas save on a real AdamW run.

    python benchmarks/checkpoint_stall.py [--steps 47] [--every 11] [--model armillary-25m]

Trains twice, with blocking and with asynchronous saves, and compares their `checkpoint_stall_s`; then once with deltas.
Prints the tables of checkpoint_stall.md.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError
from armillary.machine.machine import here
from armillary.spec.recipe import recipe_from_dict
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.training.loop import train
from armillary.training.prepare_run import model_source, resolve_run
from armillary.units import bytes_text, seconds_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=47)
    parser.add_argument("--model", default="armillary-25m")
    parser.add_argument("--every", type=int, default=11)
    options = parser.parse_args()
    print(here().text())
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        home = Home.at(folder)
        blocking = run(home, options, "train.checkpoint_async=false")
        beside = run(home, options)
        stalls(blocking, beside, options.every)
        deltas(run(home, options, "train.checkpoint_full_every=4"))


def run(home: Home, options: argparse.Namespace, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": options.model},
        "data": {"source": str(Path(sysconfig.get_path("stdlib")) / "asyncio")},
        "layout": {"micro_batch": 1},
        "train": {
            "sequence": 64,
            "batch_tokens": 64,
            "steps": options.steps,
            "save_every": options.every,
            "eval_every": 0,
            "keep": 2,
            "profile_every": 0,
        },
    }
    recipe = recipe_from_dict(base, overrides)
    resolved = resolve_run(recipe, home, model_source(recipe, home))
    resolved.prepare()
    made = resolved.create_run()
    done = train(resolved.plan, made, say=print)
    if not done.finished:
        raise ArmillaryError("the run did not finish; try again")
    return list(read_gauges(made.gauges))


def stalls(blocking: list[dict[str, Any]], beside: list[dict[str, Any]], every: int) -> None:
    """The last save of a run is waited for in both, and the first one makes the buffer: both are left out."""
    print("\n| | blocking | asynchronous |\n|---|---|---|")
    columns = [[record for record in records[:-1] if "checkpoint_s" in record][1:] for records in (blocking, beside)]
    for name in ("checkpoint_s", "checkpoint_stall_s", "checkpoint_wait_s"):
        cells = [seconds_text(statistics.median(record[name] for record in column)) for column in columns]
        print(f"| {name}, median of {len(columns[0])} and {len(columns[1])} | {cells[0]} | {cells[1]} |")
    slower = [step_cost(records, every) for records in (blocking, beside)]
    print(f"| step after a save, over the median step | {seconds_text(slower[0])} | {seconds_text(slower[1])} |")
    size = bytes_text(columns[0][0]["checkpoint_bytes"])
    blocked, stalled = (
        statistics.median(record["checkpoint_stall_s"] - record["checkpoint_wait_s"] for record in column)
        for column in columns
    )
    print(
        f"\n{size} per checkpoint; without waits for the save before, the stall is {seconds_text(stalled)}: "
        f"{stalled / blocked:.1%} of a blocking save (target: below 5 %)"
    )


def step_cost(records: list[dict[str, Any]], every: int) -> float:
    """How much longer the steps right after a save are than the median step."""
    usual = statistics.median(record["step_s"] for record in records[4:])
    after = [record["step_s"] for record in records[4:] if record["step"] % every == 0]
    return max(0.0, statistics.median(after) - usual)


def deltas(records: list[dict[str, Any]]) -> None:
    saved = [record for record in records if "checkpoint_delta_saved_fraction" in record]
    print("\n| noted at step | checkpoint | bytes saved by the delta |\n|---|---|---|")
    for record in saved:
        size = bytes_text(record["checkpoint_bytes"])
        print(f"| {record['step']} | {size} | {record['checkpoint_delta_saved_fraction']:.1%} |")
    if saved:
        mean = statistics.mean(record["checkpoint_delta_saved_fraction"] for record in saved)
        print(f"\nmean of {len(saved)} deltas: {mean:.1%} of the bytes of a full checkpoint")


if __name__ == "__main__":
    main()
