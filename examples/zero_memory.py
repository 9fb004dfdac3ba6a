"""ZeRO memory by stage: what each of two ranks holds under DDP and ZeRO-1, 2 and 3, beside what was planned.

    python examples/zero_memory.py             two minutes; writes zero_memory/table.md and plot.svg
    python examples/zero_memory.py --quick     a tiny model, DDP and ZeRO-3

Both ranks train with the product's own trainer, whose tracker sees every tensor that operators make; the planner knows
only the recipe. docs/exercises/zero_memory.md says what to predict first.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exercise import finish, on_ranks, read_options, table

import armillary
from armillary.errors import BadRecipe
from armillary.machine.machine import here
from armillary.parallel.world import World, join_world
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.resolve_recipe import resolve
from armillary.report.bars import series_bars
from armillary.spec.arithmetic.params import parameters
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.training.loop import make_consensus
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.telemetry.step_telemetry import MEASURED_STEP
from armillary.training.trainer import Trainer
from armillary.units import bytes_text, count_text, seconds_text

RANKS, MICRO_BATCHES = 2, 2
STAGES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
STATES = ("weights", "master", "optimizer")
"""what lasts; gradients, their buckets, gathered weights, activations and logits come and go"""
TIMED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A stage of ZeRO in a precision, and the plan of it; without a run where this CPU is too slow in that dtype."""

    zero: int
    precision: str
    run: ResolvedRun | None
    predicted: dict[str, float]

    @property
    def name(self) -> str:
        return f"{STAGES[self.zero]}, {self.precision}"


def recipe(zero: int, precision: str, quick: bool) -> Recipe:
    """Many weights and few tokens, so that the states decide; two micro-batches, between which gradients stay."""
    rows = {"sequence": 16, "batch_tokens": 16 * MICRO_BATCHES * RANKS}
    return recipe_from_dict(
        {
            "model": {"name": "armillary-2m" if quick else "armillary-25m", "vocab": 512},
            "hardware": {"on": "here"},
            "data": {"source": str(Path(armillary.__file__).parent / "spec"), "vocab": 512},
            "layout": {"dp": RANKS, "zero": zero, "precision": precision, "micro_batch": 1},
            "train": rows | {"steps": 100, "eval_every": 0, "profile_every": 0, "compile": False},
        }
    )


# --- predict


def planned(zero: int, precision: str, home: Home, quick: bool) -> Case:
    wanted = recipe(zero, precision, quick)
    run = None
    with suppress(BadRecipe):  # a dtype that is emulated is refused where it takes many times as long
        run = resolve_run(wanted, home, model_source(wanted, home), cpu_ranks=RANKS)
        run.prepare()
    problem = resolve(recipe(zero, "fp32", quick), wanted.model_config(), here(), home)
    parts = memory(problem.case, as_arrays([wanted.layout])).parts()
    parts.pop("other")  # context and fragmentation, which no tracker sees
    return Case(zero=zero, precision=precision, run=run, predicted=parts)


# --- measure


def be_a_rank(job: str) -> None:
    """Every plan in turn: bytes at the peak of a step of each rank, and the median step time."""
    torch.set_num_threads(1)
    plans = [Plan.from_json(plan) for plan in json.loads(job)["plans"]]
    with tempfile.TemporaryDirectory() as folder, join_world("cpu") as world:
        found = [measured(plan, world, Path(folder)) for plan in plans]
    if world.is_main:
        print(json.dumps(found))


def measured(plan: Plan, world: World, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    seconds = []
    with Trainer(plan, world, make_consensus(world), folder=folder) as trainer:
        for step in range(MEASURED_STEP + 1 + TIMED_STEPS):
            begin = time.perf_counter()
            report = trainer.step(step)
            if step > MEASURED_STEP:
                seconds.append(time.perf_counter() - begin)
            elif step == MEASURED_STEP:
                assert report is not None
                mine = {name: size for name, size in report.gauges.items() if report.sources.get(name) == "tracker"}
    sizes: list[Any] = [None] * world.size
    dist.all_gather_object(sizes, {name.removeprefix("memory_").removesuffix("_bytes"): mine[name] for name in mine})
    return {"ranks": sizes, "step_s": statistics.median(seconds)}


# --- tell


def row(case: Case, found: dict[str, Any] | None) -> tuple[str, ...]:
    """Measured and planned, of the states and of all; measured parts are those of the fullest rank."""
    parts = dict.fromkeys(STATES, 0.0) | {part: size for part, size in case.predicted.items() if part in STATES}
    parts["in flight"] = sum(case.predicted.values()) - sum(parts.values())
    total = bytes_text(sum(case.predicted.values()))
    if found is None:
        return (case.name, *(f"– / {bytes_text(size)}" for size in parts.values()), *"–" * RANKS, total, "–", "–")
    totals = [sum(sizes.values()) for sizes in found["ranks"]]
    fullest = max(found["ranks"], key=lambda sizes: sum(sizes.values()))
    seen = {part: fullest.get(part, 0.0) for part in STATES}
    seen["in flight"] = sum(fullest.values()) - sum(seen.values())
    return (
        case.name,
        *(f"{bytes_text(seen[part])} / {bytes_text(size)}" for part, size in parts.items()),
        *(bytes_text(each) for each in totals),
        total,
        f"{sum(case.predicted.values()) / max(totals) - 1:+.1%}",
        seconds_text(found["step_s"]),
    )


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return be_a_rank(sys.argv[2])
    options = read_options("zero_memory", __doc__)
    stages, precisions = ((0, 3), ("fp32",)) if options.quick else (tuple(STAGES), ("fp32", "bf16"))
    with tempfile.TemporaryDirectory() as folder:
        home = Home.at(Path(folder))
        cases = [planned(zero, precision, home, options.quick) for precision in precisions for zero in stages]
        for case in cases:
            print(f"predicted: {case.name} {bytes_text(sum(case.predicted.values()))} per rank", flush=True)
        plans = {case.name: case.run.plan.to_json() for case in cases if case.run is not None}
        measured = on_ranks(__file__, {"plans": list(plans.values())}, RANKS)
    found = dict(zip(plans, measured, strict=True))
    heads = ("on two ranks", *STATES, "gradients and what is in flight")
    heads += (*(f"rank {rank}" for rank in range(RANKS)), "planned", "error", "step")
    size = count_text(parameters(recipe(0, "fp32", options.quick).model_config()).total)
    text = f"{size} parameters, most bytes alive in one step, parts as measured / planned:\n\n"
    text += table(heads, [row(case, found.get(case.name)) for case in cases])
    if len(found) < len(cases):
        text += "\n\nbf16 is planned only: GEMMs in it are emulated on this CPU and take many times as long."
    bars = [
        (case.name, [*(sum(sizes.values()) for sizes in found[case.name]["ranks"]), sum(case.predicted.values())])
        if case.name in found
        else (case.name, [*[None] * RANKS, sum(case.predicted.values())])
        for case in cases
    ]
    names = (*(f"measured, rank {rank}" for rank in range(RANKS)), "planned")
    chart = series_bars(bars, names, label="Most bytes alive in a step", text=bytes_text)
    finish(options, text, chart, "bytes per rank by stage of ZeRO, measured and planned")


if __name__ == "__main__":
    main()
