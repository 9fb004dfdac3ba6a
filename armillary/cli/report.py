"""`armillary report`: documents for engineering leadership and finance, from a plan, a recipe or a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.plan.options import find_cluster, model_config
from armillary.cli.verb_decorator import set_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.documents.facts import PlanFacts
    from armillary.spec.hardware import Cluster
    from armillary.spec.plan import Plan
    from armillary.store.runs import Run

FREE_TABLES = ("report.", "cost.", "traffic.", "objective.")
"""what --set may change of a plan that exists"""


@verb
@click.argument("subject", metavar="PLAN|RECIPE|RUN", required=False, shell_complete=completion.runs)
@click.option("--model", metavar="M", help="Instead of a plan: a model, on --on.", shell_complete=completion.models)
@click.option("--on", metavar="HARDWARE", help="Devices for --model, like h100x64 or dgx-h200x8.")
@click.option("--to", default="docx,xlsx,pdf,pptx,html,md", show_default=True, help="Formats, separated by commas.")
@click.option("--out", "folder", type=click.Path(path_type=Path), help="Folder of the documents.  [default: report]")
@click.option("--for", "purpose", type=click.Choice(["train", "serve", "both"]), help="What the plan is for.")
@set_option
def report(
    out: Output,
    home: Home,
    subject: str | None,
    model: str | None,
    on: str | None,
    to: str,
    folder: Path | None,
    purpose: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Write a plan as Word, Excel, PDF, PowerPoint, HTML and Markdown.

    PLAN is a plan.json, RECIPE a .toml file, RUN a run, whose measurements are shown next to the plan; --model M --on
    HARDWARE plans as `armillary plan` does. Company, logo, currency, date format and templates are keys of [report]:
    --set report.company=ACME.
    """
    from armillary.documents.plan_report import build_report
    from armillary.documents.write import read_formats, write_documents

    formats = read_formats(to)
    if (subject is None) == (model is None):
        raise BadInput("give a recipe, a plan or a run, or --model with --on, like --model llama-3-8b --on h100x8")
    if subject is not None and on is not None:
        raise BadInput("--on is for --model; change the devices of a recipe by --set hardware.on=h100x8")
    with out.progress("report", total=len(formats) + 1, unit="file") as bar:
        if model is not None:
            facts = _of_model(out, home, model, on, purpose, overrides)
        else:
            facts = _facts(out, home, str(subject), purpose, overrides)
        built = build_report(facts)
        bar.update(1)
        paths = write_documents(built, formats, folder or Path("report"), lambda name: bar.update(1))
    for path in paths:
        out.say(path_text(path))
    answer = {
        "title": built.title,
        "files": paths,
        "figures": {figure.key: {"value": figure.value, "unit": figure.unit} for figure in built.figures},
    }
    out.result(answer, quiet=[str(path) for path in paths])


def _facts(out: Output, home: Home, subject: str, purpose: str | None, overrides: tuple[str, ...]) -> PlanFacts:
    path = Path(subject)
    if path.suffix == ".toml":
        return _of_recipe(out, home, path, purpose, overrides)
    for text in overrides:
        if not text.startswith(FREE_TABLES):
            raise BadInput(f"--set {text} would make another plan; give a recipe, or set {', '.join(FREE_TABLES)}…")
    if path.is_file():
        return _of_plan(out, home, _read_plan(path), purpose, overrides)
    from armillary.store.runs import find_run

    return _of_run(out, home, find_run(home, subject), purpose, overrides)


def _of_model(
    out: Output, home: Home, model: str, on: str | None, purpose: str | None, overrides: tuple[str, ...]
) -> PlanFacts:
    """What `armillary plan --model --on` plans; to train, with the layout that it finds."""
    from armillary.cli.plan.options import read_recipe
    from armillary.cli.plan.plan import priced
    from armillary.documents.facts import gather

    wanted = _wanted(purpose) or ("train",)
    recipe = read_recipe(None, model, on, None, None, overrides)
    if "train" in wanted:
        flags = {"sequence": None, "batch_tokens": None, "lora": None, "overrides": overrides}
        problem, _, _ = priced(out, home, {"recipe": None, "model": model, "on": on, **flags})
        recipe = problem.recipe
    return gather(recipe, model_config(out, home, recipe), find_cluster(recipe), home, wanted)


def _of_recipe(out: Output, home: Home, path: Path, purpose: str | None, overrides: tuple[str, ...]) -> PlanFacts:
    from armillary.documents.facts import gather, purposes
    from armillary.spec.recipe import load_recipe, to_dict

    recipe = load_recipe(path, overrides)
    wanted = _wanted(purpose) or purposes(to_dict(recipe))
    return gather(recipe, model_config(out, home, recipe), find_cluster(recipe), home, wanted)


def _wanted(purpose: str | None) -> tuple[str, ...]:
    return {"both": ("train", "serve"), None: ()}.get(purpose, (str(purpose),))


def _read_plan(path: Path) -> Plan:
    """A plan.json, or what `armillary plan --json` printed."""
    from armillary.spec.plan import Plan
    from armillary.store import nan_safe_json

    values = nan_safe_json.read_table(path)
    return Plan.from_dict(values.get("plan", values), str(path))


def _of_plan(
    out: Output, home: Home, plan: Plan, purpose: str | None, overrides: tuple[str, ...], cluster: Cluster | None = None
) -> PlanFacts:
    """The plan's recipe with everything that it resolved; one for this machine's CPU is for its cores as they are."""
    from armillary.documents.facts import gather
    from armillary.spec.recipe import recipe_from_dict

    recipe = replace(recipe_from_dict(plan.recipe, overrides), layout=plan.layout)
    recipe = replace(recipe, train=plan.train) if plan.train else replace(recipe, serve=plan.serve or recipe.serve)
    wanted = _wanted(purpose) or ("train" if plan.train else "serve",)
    if cluster is None:
        is_here = plan.cluster.name == "here" and plan.cluster.chip.kind == "cpu"
        cluster = find_cluster(recipe) if is_here else plan.cluster
    return gather(recipe, plan.model, cluster, home, wanted, is_run=True)


def _of_run(out: Output, home: Home, run: Run, purpose: str | None, overrides: tuple[str, ...]) -> PlanFacts:
    from armillary.diagnosis.outcome.prediction_errors import predicted_of
    from armillary.diagnosis.readings.run_folder import read_run

    plan = _read_plan(run.plan)
    facts = _of_plan(out, home, plan, purpose, overrides, plan.cluster)
    reading = read_run(run, home)
    return replace(facts, run=run.name, measured=predicted_of(reading, reading.kind))
