"""The plan of a training run, before anything is written: find the model, check the recipe, predict, and show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli.open_model import find_model, need_torch
from armillary.cli.output import Output, path_text
from armillary.errors import BadInput, BadLayout
from armillary.spec.network_domains import Domain, with_domains
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.remote import is_url
from armillary.units import count_text, seconds_text

if TYPE_CHECKING:
    from armillary.planning.training.resolve_recipe import TrainingProblem
    from armillary.planning.training.training_plan import TrainingPlan
    from armillary.store.runs import Run
    from armillary.training.prepare_run import ResolvedRun
    from armillary.training.stopping import Until

DAY_S = 86_400.0


def begin(
    out: Output,
    home: Home,
    recipe: Recipe,
    *,
    device: str | None = None,
    devices: int | None = None,
    fills: int | None = None,
    until: Until | None = None,
    domains: Sequence[Domain] = (),
) -> ResolvedRun:
    """Find the model, fetching its weights if necessary, check everything, plan it, and show the plan; `domains` are
    those of the nodes in their network."""
    need_torch("training")
    from armillary.model.device import pick_device
    from armillary.training.prepare_run import model_source, resolve_run

    recipe.model.load_code()
    source = find_model(out, home, recipe.model.source, need_weights=False)
    if source.origin == "hub" and not recipe.train.from_scratch:
        find_model(out, home, recipe.model.source, need_weights=True)
    source = model_source(recipe, home)
    pick_device(device)
    begun = _with_compile(
        resolve_run(recipe, home, source, cpu_ranks=devices or 0, fills=fills, until=until, device=device)
    )
    begun, predicted = planned(_with_domains(begun, domains))
    say_start(out, begun, predicted)
    for note in begun.plan.notes:
        out.warn(note)
    return begun


def _with_domains(begun: ResolvedRun, domains: Sequence[Domain]) -> ResolvedRun:
    cluster = with_domains(begun.plan.cluster, domains)
    return begun if cluster == begun.plan.cluster else replace(begun, plan=replace(begun.plan, cluster=cluster))


def planned(begun: ResolvedRun) -> tuple[ResolvedRun, TrainingPlan]:
    """The start with the planner's predictions in its plan, and the training plan itself."""
    predicted = plan_of(begun)
    plan = predicted.plan()
    notes = tuple(dict.fromkeys((*begun.plan.notes, *plan.notes)))
    return replace(begun, plan=replace(begun.plan, predicted=plan.predicted, notes=notes)), predicted


def _problem(begun: ResolvedRun) -> TrainingProblem:
    """The planner's problem, from the recipe with every `auto` resolved by its plan."""
    from armillary.planning.training.resolve_recipe import resolve

    assert begun.plan.train is not None
    recipe = replace(begun.recipe, layout=begun.plan.layout, train=begun.plan.train)
    return resolve(recipe, begun.plan.model, begun.plan.cluster, begun.home, is_run=True)


def _with_compile(begun: ResolvedRun) -> ResolvedRun:
    """train.compile = "auto" resolved by the planner's estimate of what compiling saves."""
    if begun.recipe.train.compile != "auto":
        return begun
    from armillary.planning.training.compile_choice import compile_choice

    reason = compile_choice(_problem(begun))
    if not reason:
        return begun
    assert begun.plan.train is not None
    plan = replace(
        begun.plan, train=replace(begun.plan.train, compile=True), chosen={**begun.plan.chosen, "train.compile": reason}
    )
    return replace(begun, plan=plan)


def plan_of(begun: ResolvedRun) -> TrainingPlan:
    """The planner's prediction; a plan that does not fit is refused with a remedy."""
    from armillary.planning.device_model.vectorised_layouts import as_arrays
    from armillary.planning.training.layout_prediction import predict
    from armillary.planning.training.training_plan import training_plan

    problem = _problem(begun)
    plan = training_plan(problem, predict(problem.case, as_arrays([problem.layout])))
    if not plan.fits:
        said = plan.shortage.replace("it ", f"{begun.plan.model.name} ", 1)
        raise BadLayout(f"{said}; {plan.remedy.replace('--on ', '--set hardware.on=')}")
    return plan


def say_start(out: Output, begun: ResolvedRun, predicted: TrainingPlan) -> None:
    from armillary.cli.plan.plan_text import line_text, memory_text, offload_rows, step_text
    from armillary.spec.arithmetic.params import parameters

    plan = begun.plan
    place = plan.weights if is_url(plan.weights) else path_text(Path(plan.weights))
    origin = f"from the weights in {place}" if plan.weights else "from scratch"
    count = count_text(parameters(plan.model).total)
    out.say(f"{plan.model.name} on {plan.cluster.text()} · {count} parameters · {origin}")
    rows = [
        ("layout", predicted.prediction.layout_text()),
        *[(key.partition(".")[2], why) for key, why in plan.chosen.items()],
        ("memory / device", memory_text(predicted.prediction)),
        *offload_rows(predicted.prediction),
        ("step", step_text(predicted.prediction)),
        ("learning rate", _rate_text(begun)),
    ]
    for name, text in rows:
        out.say(line_text(name, text))


def _rate_text(begun: ResolvedRun) -> str:
    from armillary.spec.arithmetic.params import parameters

    job = begun.recipe.train
    peak = job.peak_lr(parameters(begun.plan.model).total)
    scaled = f" = {peak / job.lr_factor:.3g} × {job.lr_factor:g} for the batch" if job.lr_base_batch else ""
    return f"{peak:.3g}{scaled}, {job.warmup:,} steps of warm-up, then {job.schedule}"


def seconds_left(begun: ResolvedRun, run: Run | None) -> float:
    """Predicted seconds of the remaining steps."""
    from armillary.training.checkpoint.checkpoint import saved_steps

    done = (saved_steps(run) or [0])[-1] if run is not None else 0
    return max(0, begun.recipe.train.steps - done) * begun.plan.predicted["step_s"]


def refuse_days(begun: ResolvedRun, *, yes: bool) -> None:
    """Refuse a plan of more than a day on a CPU without --yes: it is usually a mistake."""
    left = seconds_left(begun, None)
    if yes or begun.plan.cluster.chip.kind != "cpu" or left <= DAY_S:
        return
    raise BadInput(
        f"{begun.recipe.train.steps:,} steps would take {seconds_text(left)} on this CPU; start it all the "
        "same with --yes, or take fewer steps (--set train.steps=…) or a smaller model"
    )
