"""`armillary train --parity`: every strategy against one process, on ranks of this machine, as a table and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.main import BUG
from armillary.cli.output import Output, path_text
from armillary.errors import BadInput
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.recipe import Recipe, load_recipe
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model

if TYPE_CHECKING:
    from armillary.training.parity.matrix import Row

RANKS, MOST_RANKS = 2, 16
PAGE = "parallel_agreement.md"
_A_LAUNCH = 6
"""strategies of a launch: process groups of each stay to its end, with threads of their own"""


def parity(
    out: Output, home: Home, words: Sequence[str], overrides: Sequence[str], *, devices: int | None, dry_run: bool
) -> None:
    """Run what was chosen and say which rows hold; ends with exit code 1 where one does not. With a recipe, its layout
    is the one row."""
    from armillary.parallel.world import is_launched

    if is_launched():
        raise BadInput("--parity starts its own ranks; run it without torchrun or srun")
    file, page, only = _told_apart(words)
    if overrides and file is None:
        raise BadInput(f"--set {overrides[0]} changes a recipe and --parity was given none; add its file to the line")
    recipe = load_recipe(file, overrides) if file else None
    orders = _of_recipe(recipe, home, devices, only) if recipe else _of_matrix(devices, only)
    if dry_run:
        out.table("parity", ["strategy", "ranks"], [[name, orders["world"]] for name in orders["strategies"]])
        out.result(orders, quiet=orders["strategies"])
        return
    rows = _launched(out, home, orders)
    _show(out, rows, page or (None if recipe else home.work / PAGE))


def the_recipe(words: Sequence[str]) -> Path:
    """What a training without --parity cannot do without."""
    if not words:
        raise BadInput("armillary train needs a recipe; give its file, like recipes/tour.toml, or --parity")
    if len(words) > 1:
        raise BadInput(
            f"armillary train takes one recipe and got {len(words)} ({', '.join(words[:3])}); give one, or "
            "add --parity to name strategies"
        )
    return Path(words[0])


def _told_apart(words: Sequence[str]) -> tuple[Path | None, Path | None, list[str]]:
    """The words after --parity: a recipe and a page by their suffixes, all others choose strategies."""
    files: dict[str, Path | None] = {".toml": None, ".md": None}
    only = []
    for word in words:
        kind = Path(word).suffix
        if kind not in files:
            only.append(word)
        elif files[kind] is not None:
            raise BadInput(f"--parity takes one *{kind} file and got {files[kind]} and {word}; leave one out")
        else:
            files[kind] = Path(word)
    return files[".toml"], files[".md"], only


def _of_matrix(devices: int | None, only: Sequence[str]) -> dict[str, Any]:
    """Orders for the ranks: the strategies that can use this many of them."""
    from armillary.training.parity.matrix import FORMATS
    from armillary.training.parity.strategies import chosen, layout_of

    world = RANKS if devices is None else devices
    if not 2 <= world <= MOST_RANKS:
        raise BadInput(f"--devices {world} cannot be compared with one process here; give 2, 4 or 8")
    formats = [name for name in FORMATS if name in only]
    asked = chosen([word for word in only if word not in FORMATS])
    names = [name for name in asked if layout_of(name, world) is not None]
    if not names:
        enough = next((n for n in (2, 4, 8) if any(layout_of(name, n) for name in asked)), 8)
        raise BadInput(f"{', '.join(asked[:3])} has no use for {world} ranks; try --devices {enough}")
    return {"world": world, "strategies": names, "formats": formats or list(FORMATS)}


def _of_recipe(recipe: Recipe, home: Home, devices: int | None, only: Sequence[str]) -> dict[str, Any]:
    """The same for the layout of a recipe, which is checked as it will be run: on a tiny model."""
    from armillary.training.parity.matrix import FORMATS, cases_of_layout

    layout = recipe.layout if devices is None else recipe.layout.on_devices(devices)
    if not 2 <= layout.num_devices <= MOST_RANKS:
        raise BadInput(
            f"{layout.text()} is {layout.num_devices} ranks and --parity runs 2 to {MOST_RANKS} on this "
            "machine; try fewer with --devices or --set layout.dp=2"
        )
    if unknown := [word for word in only if word not in FORMATS]:
        raise BadInput(f"{unknown[0]} chooses among strategies and a recipe is one; leave it or the recipe out")
    source = resolve_model(recipe.model.source, home, need_weights=False)
    experts = recipe.model_config(source.config).num_moe_layers > 0
    case = cases_of_layout(layout, experts=experts)[0]
    check_layout(case.layout, case.config, num_devices=layout.num_devices)
    formats = [name for name in FORMATS if name in only] or list(FORMATS)
    name = f"recipe: {layout.text('dp', 'tp', 'pp', 'cp', 'ep')}" + f", zero {layout.zero}" * (layout.zero > 0)
    return {
        "world": layout.num_devices,
        "strategies": [name],
        "experts": experts,
        "layout": asdict(layout),
        "formats": formats,
    }


def layout_in(orders: dict[str, Any]) -> Layout | None:
    """The layout in the orders of the ranks, where it is a recipe's."""
    return Layout(**orders["layout"]) if "layout" in orders else None


def _launched(out: Output, home: Home, orders: dict[str, Any]) -> list[Row]:
    """All strategies, a few in each launch."""
    names, world = orders["strategies"], orders["world"]
    out.say(
        f"{len(names)} strateg{'ies' if len(names) > 1 else 'y'} on {world} ranks against one process, "
        f"{' and '.join(orders['formats'])}"
    )
    rows: list[Row] = []
    for at in range(0, len(names), _A_LAUNCH):
        some = {"strategies": names[at : at + _A_LAUNCH], "done": at, "total": len(names)}
        rows += _launched_some(out, home, {**orders, **some})
    return rows


def _launched_some(out: Output, home: Home, orders: dict[str, Any]) -> list[Row]:
    from armillary.cli.train.launch import launch
    from armillary.machine.cores import compute_threads
    from armillary.training.parity.matrix import Row

    world = orders["world"]
    threads = compute_threads(world)
    ended = launch(
        "armillary.cli.train.parity_rank",
        {**orders, "mode": out.mode},
        num_ranks=world,
        logs=home.cache / "parity",
        threads=threads,
        then="run it again",
    )
    if ended.interrupted or not ended.outcome:
        raise KeyboardInterrupt
    return [
        Row(
            row["strategy"],
            row["world"],
            row["variants"],
            {kind: {name: float(value) for name, value in errors.items()} for kind, errors in row["errors"].items()},
        )
        for row in ended.outcome["rows"]
    ]


def _show(out: Output, rows: list[Row], page: Path | None) -> None:
    from armillary.store.atomic import write_text
    from armillary.training.parity.matrix import cells, columns, with_rows

    shown = list(rows[0].errors), ("loss", "weights")  # the page has norms too
    out.table("agreement with one process", columns(*shown), (cells(row, *shown) for row in rows))
    failed = [row for row in rows if row.over]
    for row in failed:
        out.say(f"{row.strategy} on {row.world} ranks does not hold: {', '.join(row.over)}")
    if not failed:
        out.say(f"{'all ' if len(rows) > 1 else ''}{len(rows)} hold{'s' * (len(rows) == 1)}")
    if page is not None:
        write_text(page, with_rows(page.read_text() if page.is_file() else "", rows))
        out.say(f"written to {path_text(page)}")
    answer = {"rows": [asdict(row) | {"holds": not row.over} for row in rows], "page": page, "holds": not failed}
    out.result(answer, quiet=[f"{row.strategy}\t{row.world}\t{'no' if row.over else 'yes'}" for row in rows])
    if failed:
        click.get_current_context().exit(BUG)
