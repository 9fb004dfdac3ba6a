"""`armillary canary`: a short deterministic run of a recipe, compared with the golden values that are kept beside it.

A change of cluster, driver, versions or code is accepted before a long run, or refused with what differs.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from armillary.cli.main import BUG
from armillary.cli.open_model import need_torch
from armillary.cli.output import Output, path_text
from armillary.cli.train.planning import begin
from armillary.cli.train.rank import run_as_rank
from armillary.cli.verb_decorator import set_option, verb
from armillary.errors import BadInput
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, load_recipe, recipe_changes, recipe_from_dict
from armillary.spec.toml.fields import build, to_plain
from armillary.store.canary import KINDS, CanaryRecord, CanaryVerdict, compare, golden_path, read_golden, write_golden
from armillary.store.home import Home

if TYPE_CHECKING:
    pass

STEPS = 20
"""enough for the averages of AdamW to matter, and a minute at most of a small model"""


@verb
@click.argument("recipe", type=click.Path(path_type=Path))
@set_option
@click.option("--update", is_flag=True, help="Keep the values of this run as the golden ones.")
@click.option("--steps", type=int, metavar="N", help=f"Steps of golden values, with --update.  [default: {STEPS}]")
@click.option("--golden", type=click.Path(path_type=Path), help="Their file.  [default: RECIPE.canary.json]")
@click.option("--devices", type=int, metavar="N", help="Use N devices: dp is as large as fills them.")
@click.option("--device", help="cpu, cuda, cuda:1 …  [default: the best there is]")
def canary(
    out: Output,
    home: Home,
    recipe: Path,
    overrides: tuple[str, ...],
    update: bool,
    steps: int | None,
    golden: Path | None,
    devices: int | None,
    device: str | None,
) -> None:
    """Train RECIPE for a few steps, deterministically, and compare losses, gradient norms, samples and weights with
    golden values: is this machine, driver, version or code as good as the one before?

    Exit code 0: all bits are equal, or code, versions or device differ and values only by rounding. Exit code 1: they
    differ by more, or differ although nothing has changed, which is a fault. --update keeps the values of this run.
    """
    need_torch("training")
    file = golden or golden_path(recipe)
    asked = _asked(load_recipe(recipe, overrides), devices)
    before = None if update else read_golden(file)
    if steps is not None and not update:
        raise BadInput("--steps is for new golden values; add --update, or leave it out")
    if before is not None:
        _refuse_another(before, asked, file)
    count = len(before.steps) if before is not None else steps or STEPS
    if not 1 <= count <= asked.train.steps:
        raise BadInput(
            f"{count} steps are not within the recipe's {asked.train.steps}; try --steps {asked.train.steps}"
        )
    record = _measure(out, home, asked, count, device, devices)
    if before is None:
        write_golden(file, record)
        out.say(f"golden values of {count} steps written to {path_text(file)}; keep the file with the recipe")
        return out.result({"golden": str(file), "record": to_plain(record)}, quiet=str(file))
    _show(out, before, compare(before, record))


def _asked(recipe: Recipe, devices: int | None) -> Recipe:
    """As a canary runs it: deterministic, and compiled only where the recipe says so."""
    job = replace(recipe.train, deterministic=True, compile=recipe.train.compiled, max_restarts=0)
    layout = recipe.layout if devices is None else recipe.layout.on_devices(devices)
    return replace(recipe, train=job, layout=layout)


def _refuse_another(golden: CanaryRecord, recipe: Recipe, file: Path) -> None:
    """A layout may differ, and counts as another device; other keys that change what is computed may not."""
    changes = recipe_changes(recipe_from_dict(golden.recipe), recipe)
    defining = [change.text for change in changes if change.kind != "free" and not change.key.startswith("layout.")]
    if defining:
        raise BadInput(f"{file} is of another recipe ({', '.join(defining[:3])}); restore it, or --update the values")


def _measure(
    out: Output, home: Home, recipe: Recipe, steps: int, device: str | None, devices: int | None
) -> CanaryRecord:
    from armillary.cli.train.launch import launch
    from armillary.machine.cores import compute_threads

    begun = begin(Output("silent"), home, recipe, device=device, devices=devices, fills=devices)
    begun.prepare()
    count = begun.plan.layout.num_devices
    on_cpu = begun.plan.cluster.chip.kind == "cpu" or device == "cpu"
    ended = launch(
        "armillary.cli.train.canary",
        {"plan": begun.plan.to_json(), "steps": steps, "device": device, "mode": out.mode},
        num_ranks=count,
        logs=home.cache / "canary",
        threads=compute_threads(count) if on_cpu else None,
        then="run it again",
    )
    if ended.interrupted or not ended.outcome:
        raise KeyboardInterrupt
    return build(CanaryRecord, ended.outcome, "canary")


def _show(out: Output, golden: CanaryRecord, verdict: CanaryVerdict) -> None:
    for kind in KINDS:
        for text in verdict.changed[kind]:
            out.say(f"{kind}: {text}")
    out.say(f"{verdict.agreement}: {verdict.text}")
    out.result(asdict(verdict) | {"golden": golden.created}, quiet=verdict.agreement)
    if not verdict.holds:
        click.get_current_context().exit(BUG)


# --- one rank: `python -m armillary.cli.train.canary TASK`


def canary_rank(task: dict[str, Any], out: Output) -> dict[str, Any]:
    from armillary.parallel.world import join_world
    from armillary.training.canary import run_canary

    with join_world(task["device"]) as world:
        return dict(to_plain(run_canary(Plan.from_json(task["plan"]), world, task["steps"])))


if __name__ == "__main__":
    run_as_rank(canary_rank)
