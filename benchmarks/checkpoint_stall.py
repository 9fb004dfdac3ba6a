"""What an asynchronous checkpoint costs training on this machine, and what deltas save on a real AdamW run.

    python benchmarks/checkpoint_stall.py [--saves 4] [--every 40] [--model armillary-25m] [--deltas]

Trains twice, with blocking and with asynchronous saves, and compares their `checkpoint_stall_s`; with --deltas once
more. Saves must be so far apart that none waits for the one before: the tables say how many did. Prints the tables of
checkpoint_stall.md.
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

TERMS = ("checkpoint_s", "checkpoint_stall_s", "checkpoint_wait_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--saves", type=int, default=4, help="that count; one before makes the buffer")
    parser.add_argument("--every", type=int, default=40, help="steps between saves")
    parser.add_argument("--model", default="armillary-25m")
    parser.add_argument("--deltas", action="store_true")
    options = parser.parse_args()
    options.steps = options.every * (options.saves + 2) - 1
    print(here().text())
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        home = Home.at(folder)
        blocking = run(home, options, "train.checkpoint_async=false")
        beside = run(home, options)
        stalls(blocking, beside, options.every)
        if options.deltas:
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
    columns = [[record for record in records[:-1] if "checkpoint_s" in record][1:] for records in (blocking, beside)]
    print(
        "\n| noted at step | blocking: whole | stall | asynchronous: whole | stall | of it, wait for the save before |"
    )
    print("|---|---|---|---|---|---|")
    for one, other in zip(*columns, strict=False):
        cells = [one["checkpoint_s"], one["checkpoint_stall_s"], *(other[name] for name in TERMS)]
        print(f"| {other['step']} | " + " | ".join(map(seconds_text, cells)) + " |")
    slower = [step_cost(records, every) for records in (blocking, beside)]
    print(f"\nstep after a save, over the median step: {' and '.join(map(seconds_text, slower))}")
    waited = sum(record["checkpoint_wait_s"] > 0.001 for record in columns[1])
    blocked, stalled = (statistics.median(record["checkpoint_stall_s"] for record in column) for column in columns)
    print(
        f"{bytes_text(columns[0][0]['checkpoint_bytes'])} per checkpoint; {waited} of {len(columns[1])} saves waited "
        f"for the one before; the median stall is {seconds_text(stalled)} of {seconds_text(blocked)}: "
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
