"""Up-and-down days of a service, for autoscaler_service.py and autoscaler_days.py; see simulator.md.

Llama 3 8B on an L4, emulated: a step takes the time that the planner predicts. Requests have the lengths of a public
trace, in its order, at a Poisson rate that goes up and down.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import cos, pi
from pathlib import Path
from random import Random

from armillary.cli.output import Output
from armillary.cli.plan.options import find_cluster, model_config
from armillary.planning.simulation.fleet_case import FleetCase, fleet_case
from armillary.serving.load.trace import read_trace
from armillary.spec.hf.config import to_hf
from armillary.spec.recipe import Recipe, load_service_recipe, recipe_from_dict
from armillary.spec.tables.fleet import Autoscale
from armillary.store.home import Home


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A sort of day."""

    seconds: float
    low: float
    """requests per second, at night"""
    peak: float
    """the same at noon"""
    start_s: float
    """how long a replica takes to start"""
    window_s: float
    """stable window and cooldown; a third of it: panic window"""
    interval_s: float
    """between decisions"""
    warm_s: float
    """beginning that is left out"""
    cycles: int = 1


SHORT = Kind(seconds=270.0, low=1.0, peak=6.0, start_s=4.0, window_s=15.0, interval_s=1.0, warm_s=30.0)
LONG = Kind(seconds=1200.0, low=2.0, peak=14.0, start_s=20.0, window_s=40.0, interval_s=2.0, warm_s=60.0)
KINDS = {"short": SHORT, "long": LONG}

RECIPE = """
[model]
path = "bot"

[hardware]
on = "l4"

[serve]
emulate = true
max_running = 16
max_model_len = 2048

[traffic]
duration_s = {seconds}

[load]
api = "completions"
trace = "day.jsonl"

[objective]
ttft_p99_s = 2.0
itl_p99_s = 0.3

[fleet]
replicas = 2
start_s = {start_s}
policy = "least-load"

[autoscale]
max_replicas = 32
target = {target}
interval_s = {interval_s}
stable_window_s = {window_s}
panic_window_s = {panic_window_s}
cooldown_s = {window_s}

[gateway]
retries = 2
"""


def write_service(kind: Kind, folder: Path, trace: Path, seed: int, *, target: float = Autoscale.target) -> int:
    """Model, requests and recipe of a day; how many requests."""
    write_model(folder / "bot")
    count = write_day(folder / "day.jsonl", trace, kind, seed)
    text = RECIPE.format(
        seconds=kind.seconds,
        start_s=kind.start_s,
        interval_s=kind.interval_s,
        window_s=kind.window_s,
        panic_window_s=kind.window_s / 3,
        target=target,
    )
    (folder / "service.toml").write_text(text)
    return count


def write_model(folder: Path) -> None:
    """A folder with a config, a tokenizer of a few words, and no weights."""
    from armillary.model.text.train_tokenizer import train_tokenizer

    config = recipe_from_dict({"model": {"name": "llama-3-8b"}}).model_config()
    train_tokenizer(["def main():\n    return 0\n"] * 20, 300).save(folder)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))


def write_day(path: Path, trace: Path, kind: Kind, seed: int) -> int:
    """Requests of the trace at a Poisson rate from low to peak and back, `cycles` times; how many."""
    rng, rows, now, lines = Random(seed), iter(read_trace(trace)), 0.0, list[str]()
    while (now := now + rng.expovariate(kind.peak)) < kind.seconds:
        rate = kind.low + (kind.peak - kind.low) * (1 - cos(2 * pi * kind.cycles * now / kind.seconds)) / 2
        if rng.random() < rate / kind.peak:
            row = next(rows)
            lengths = {"input_length": min(row.tokens_in, 1500), "output_length": min(row.tokens_out, 150)}
            lines.append(json.dumps({"timestamp": round(1000 * now), **lengths}))
    path.write_text("\n".join(lines) + "\n")
    return len(lines)


def case_of(folder: Path) -> FleetCase:
    """What the simulator plays of a day that is written."""
    recipe, home = recipe_of(folder), Home.at(folder / "home")
    return fleet_case(recipe, model_config(Output("quiet"), home, recipe), find_cluster(recipe), home)


def recipe_of(folder: Path) -> Recipe:
    recipe = load_service_recipe(folder / "service.toml")
    model = replace(recipe.model, path=str(folder / "bot"))
    return replace(recipe, model=model, load=replace(recipe.load, trace=str(folder / "day.jsonl")))
