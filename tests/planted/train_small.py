"""Small training runs, through the same functions as `armillary train`: seconds on two cores.

With several ranks they are started by the command line's launcher; a fault goes into every rank.
"""

from __future__ import annotations

import email
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from armillary.cli.output import Output
from armillary.cli.train import launch as launching
from armillary.cli.train.launch import Launched
from armillary.cli.train.planning import begin
from armillary.cli.train.train import run_training
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run
from tests.planted.faults import Fault, planted
from tests.planted.problem import Wish

_SILENT = Output("silent")
LIBRARY = Path(email.__file__).parent
"""a package of Python's own library: half a megabyte of text that is there on every machine"""
_FEW = 8
_STEP = 32
"""hidden sizes are multiples of it: heads have 32 values each"""


def model_of(size: float, **more: Any) -> dict[str, Any]:
    """A small shape: 128 wide at size 1. KV heads are even, so that two tensor-parallel ranks share them."""
    heads = max(2, 2 * round(2 * size))
    kv_heads = heads // 2 if heads % 4 == 0 else heads
    return {
        "name": "armillary-2m",
        "num_layers": 4,
        "hidden": _STEP * heads,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _STEP,
        "ffn": 3 * _STEP * heads,
        "vocab": 1024,
        "context": 1024,
    } | more


def recipe_of(wish: Wish, tables: Mapping[str, Mapping[str, Any]], home: Home) -> Recipe:
    """The small recipe with what a problem changes of it."""
    base: dict[str, dict[str, Any]] = {
        "model": model_of(wish.size),
        "hardware": {"on": "here"},
        "data": {"source": str(one_text(home)), "held_out": 0.0, "seed": wish.seed},
        "layout": {"precision": "auto", "micro_batch": 16},
        "train": {
            "sequence": 128,
            "batch_tokens": 4096,
            "steps": 16,
            "eval_every": 0,
            "eval_batches": 2,
            "seed": wish.seed,
        },
    }
    return recipe_from_dict({name: base.get(name, {}) | dict(tables.get(name, {})) for name in base | dict(tables)})


def train_small(
    wish: Wish,
    home: Home,
    *,
    fault: Fault | None = None,
    device: str | None = "cpu",
    **tables: Mapping[str, Any],
) -> Path:
    """Train, with a fault where one is given; the run's folder."""
    return train_recipe(recipe_of(wish, tables, home), home, fault=fault, device=device).folder


def one_text(home: Home) -> Path:
    """LIBRARY as a single document: no row holds the end of one, which would need a mask in some steps and not in
    others."""
    path = home.work / "library.jsonl"
    if not path.is_file():
        home.work.mkdir(parents=True, exist_ok=True)
        text = "\n".join(file.read_text() for file in sorted(LIBRARY.rglob("*.py")))
        path.write_text(json.dumps({"text": text}) + "\n")
    return path


def step_s(wish: Wish, home: Home, **tables: Mapping[str, Any]) -> float:
    """How long a step takes on this machine at this moment, from a few of them."""
    short = {"steps": _FEW, "profile_every": 0}
    folder = train_small(wish, home, **tables | {"train": {**tables.get("train", {}), **short}})
    return median(record["step_s"] for record in list(read_gauges(folder / "gauges.jsonl"))[2:])


def train_recipe(recipe: Recipe, home: Home, *, fault: Fault | None = None, device: str | None = "cpu") -> Run:
    """Plan and train a recipe from its beginning."""
    begun = begin(_SILENT, home, recipe, device=device, devices=recipe.layout.num_devices)
    with planted(fault), mock.patch.object(launching, "launch", partial(_launch, launching.launch, fault)):
        done = run_training(_SILENT, begun, text="", overrides=(), device=device, name=free_name(home))
    return Run(folder=home.runs / done["run"])


def _launch(
    launch: Callable[..., Launched], fault: Fault | None, program: str, task: Mapping[str, Any], **settings: Any
) -> Launched:
    """Ranks that put the fault into themselves, in place of the command line's own."""
    told = None if fault is None else [fault.kind, fault.amount]
    return launch("tests.planted.rank", {**task, "fault": told}, **settings)


def free_name(home: Home) -> str:
    """Of a new run: one that no run of this home has, so that none goes on with another's checkpoints."""
    taken = len(list(home.runs.iterdir())) if home.runs.is_dir() else 0
    return f"planted-{taken + 1}"
