"""`armillary parity`: every strategy against one process, on ranks of this machine, as a table and a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.main import BUG
from armillary.cli.open_model import need_torch
from armillary.cli.output import Output, path_text
from armillary.cli.train.rank import run_as_rank
from armillary.cli.verb_decorator import set_option, verb
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
_PER_LAUNCH = 6
"""strategies per launch: process groups of each stay to its end, with threads of their own"""


@verb
@click.argument("words", nargs=-1, metavar="[STRATEGY]... [RECIPE] [PAGE]")
@set_option
@click.option("--devices", type=int, metavar="N", help="Ranks: 2, 4 or 8.  [default: 2, or the recipe's]")
@click.option("--dry-run", is_flag=True, help="List what would be compared.")
def parity(
    out: Output, home: Home, words: tuple[str, ...], overrides: tuple[str, ...], devices: int | None, dry_run: bool
) -> None:
    """Train a tiny model by every parallel strategy, on ranks of this machine, and in one process, and write how far
    losses, gradient norms and weights differ to a page (PAGE.md, or parallel_agreement.md).

    STRATEGY is a name or a part of one; dense, experts, fp32 and fp64 select, too. With RECIPE.toml its layout is the
    only row. Exit code 1 where a row does not hold.
    """
    need_torch("parity")
    from armillary.parallel.world import is_launched

    if is_launched():
        raise BadInput("armillary parity starts its own ranks; run it without torchrun or srun")
    file, page, only = _told_apart(words)
    if overrides and file is None:
        raise BadInput(f"--set {overrides[0]} changes a recipe and there is none; add its file to the line")
    recipe = load_recipe(file, overrides) if file else None
    task = _of_recipe(recipe, home, devices, only) if recipe else _of_matrix(devices, only)
    if dry_run:
        out.table("parity", ["strategy", "ranks"], [[name, task["world"]] for name in task["strategies"]])
        out.result(task, quiet=task["strategies"])
        return
    _show(out, _launched(out, home, task), page or (None if recipe else home.work / PAGE))


def _told_apart(words: Sequence[str]) -> tuple[Path | None, Path | None, list[str]]:
    """What was named: a recipe and a page by their suffixes, all others choose strategies."""
    files: dict[str, Path | None] = {".toml": None, ".md": None}
    only = []
    for word in words:
        kind = Path(word).suffix
        if kind not in files:
            only.append(word)
        elif files[kind] is not None:
            raise BadInput(f"armillary parity takes one *{kind} file and got {files[kind]} and {word}; leave one out")
        else:
            files[kind] = Path(word)
    return files[".toml"], files[".md"], only


def _of_matrix(devices: int | None, only: Sequence[str]) -> dict[str, Any]:
    """The task of the ranks: the strategies that can use this many of them."""
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
            f"{layout.text()} is {layout.num_devices} ranks and parity runs 2 to {MOST_RANKS} on this "
            "machine; try fewer with --devices or --set layout.dp=2"
        )
    if unknown := [word for word in only if word not in FORMATS]:
        raise BadInput(f"{unknown[0]} chooses among strategies and a recipe is one; leave it or the recipe out")
    recipe.model.load_code()
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


def _launched(out: Output, home: Home, task: dict[str, Any]) -> list[Row]:
    names, world = task["strategies"], task["world"]
    out.say(
        f"{len(names)} strateg{'ies' if len(names) > 1 else 'y'} on {world} ranks against one process, "
        f"{' and '.join(task['formats'])}"
    )
    rows: list[Row] = []
    for at in range(0, len(names), _PER_LAUNCH):
        some = {"strategies": names[at : at + _PER_LAUNCH], "done": at, "total": len(names)}
        rows += _launch(out, home, {**task, **some})
    return rows


def _launch(out: Output, home: Home, task: dict[str, Any]) -> list[Row]:
    from armillary.cli.train.launch import launch
    from armillary.machine.cores import compute_threads
    from armillary.training.parity.matrix import Row

    world = task["world"]
    ended = launch(
        "armillary.cli.train.parity",
        {**task, "mode": out.mode},
        num_ranks=world,
        logs=home.cache / "parity",
        threads=compute_threads(world),
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


# --- one rank: `python -m armillary.cli.train.parity TASK`


def measure_rows(task: dict[str, Any], out: Output) -> dict[str, Any]:
    """Every strategy that was asked for, one after the other; the main rank shows how far it is."""
    from armillary.parallel.world import join_world
    from armillary.training.parity.matrix import cases_of, cases_of_layout, measure

    layout = Layout(**task["layout"]) if "layout" in task else None
    world, formats, rows = task["world"], task["formats"], []
    with join_world("cpu"), out.progress("parity", total=task["total"], unit="row") as bar:
        bar.update(task["done"])
        for name in task["strategies"]:
            cases = (
                cases_of(name, world, formats)
                if layout is None
                else cases_of_layout(layout, formats, experts=task["experts"])
            )
            rows.append(measure(name, world, cases))
            bar.update(1, row=f"{name}: {'does not hold' if rows[-1].over else 'holds'}")
    return {"rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    run_as_rank(measure_rows)
