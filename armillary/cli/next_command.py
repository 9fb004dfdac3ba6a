"""The command that runs a changed recipe: `armillary train FILE`, or `armillary serve MODEL --recipe FILE`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.output import path_text
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.hf_folder import stored_dtype
from armillary.store.home import Home
from armillary.store.runs import Run

if TYPE_CHECKING:
    from armillary.diagnosis.evidence.finding import Lever
    from armillary.diagnosis.readings.reading import Kind

MODEL = "MODEL"
"""what is printed where a run was not of stored weights"""


def next_command(run: Run, lever: Lever, kind: Kind, recipe: Path, home: Home) -> str:
    """As a person would type it."""
    from armillary.diagnosis.levers.apply import overrides_of

    words = ["train", path_text(recipe)]
    if kind == "serving":
        asked = recipe_from_dict(run.recipe, overrides_of(lever.change))
        words = ["serve", served_model(asked), "--recipe", path_text(recipe), *_flags(asked)]
    return f"armillary {shlex.join([*words, *place(home)])}"


def place(home: Home) -> list[str]:
    """--home, where somebody gave one."""
    return ["--home", path_text(home.work)] if home.work == home.cache else []


def served_model(asked: Recipe) -> str:
    """What `armillary serve` takes for the model of a run: its folder, its Hub id, or MODEL."""
    path = Path(asked.model.path).expanduser()
    if asked.model.path and (path / "config.json").is_file():
        return path_text(path)
    return asked.model.name if "/" in asked.model.name else MODEL


def _flags(asked: Recipe) -> list[str]:
    """What is said on the command line and not in [serve]."""
    folder, layout = Path(asked.model.path).expanduser(), asked.layout
    there = folder if asked.model.path and (folder / "config.json").is_file() else None
    cut = ["--tp", str(layout.tp)] if layout.tp > 1 else []
    as_stored = there is None or layout.precision == stored_dtype(there)
    said = as_stored or layout.precision not in ("fp32", "bf16", "fp16") or layout.precision == asked.serve.dtype
    return cut if said else [*cut, "--set", f"serve.dtype={layout.precision}"]
