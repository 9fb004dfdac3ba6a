"""What a report is about: the plans of one recipe, the layouts that were considered, and what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING

from armillary.documents.user_files import check_user_files
from armillary.documents.values import clean
from armillary.errors import ArmillaryError
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.past_prediction_errors import confidence
from armillary.planning.serving.serving_plan import ServingPlan, serving_plan
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.other_sizes import Resized, check_trainable, other_sizes
from armillary.planning.training.resolve_recipe import TrainingProblem, resolve
from armillary.planning.training.search import SearchResult, search
from armillary.planning.training.training_plan import TrainingPlan, training_plan
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe, check_recipe
from armillary.spec.tables.report import ReportTable
from armillary.store.home import Home

if TYPE_CHECKING:  # only a report on a run reads one
    from armillary.diagnosis.outcome.prediction_errors import Predicted

AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """One subject of a report; training and serving are None where the recipe has nothing of them."""

    recipe: Recipe
    model: ModelConfig
    cluster: Cluster
    created: date
    training: TrainingPlan | None = None
    layouts: SearchResult | None = None
    resized: tuple[Resized, ...] = ()
    serving: ServingPlan | None = None
    run: str = ""
    measured: tuple[Predicted, ...] = ()
    confidence: str = ""
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> ReportTable:
        return self.recipe.report

    @property
    def model_name(self) -> str:
        return clean(self.model.name) or "the model"


def purposes(tables: Mapping[str, object]) -> tuple[str, ...]:
    """What a recipe is for, by the tables that it has: train, serve or both; train where it says nothing."""
    serves = any(name in tables for name in ("traffic", "objective"))
    trains = "train" in tables or not serves
    return (*(["train"] if trains else []), *(["serve"] if serves else []))


def gather(
    recipe: Recipe, model: ModelConfig, cluster: Cluster, home: Home, wanted: tuple[str, ...], *, is_run: bool = False
) -> PlanFacts:
    """Plan the recipe for every purpose that is wanted."""
    check_user_files(recipe.report)
    known = confidence(home, cluster.chip)
    facts = PlanFacts(
        recipe=recipe,
        model=model,
        cluster=cluster,
        created=date.today(),
        confidence=str(known) if known else "",
    )
    if "train" in wanted:
        facts = _with_training(facts, home, is_run)
    if "serve" in wanted:
        check_recipe(recipe, model, for_training=False)
        # the layout of a recipe for both is that of its training
        planned = serving_plan(recipe, model, cluster, home, search="train" in wanted)
        facts = replace(facts, serving=planned)
    return facts


def _with_training(facts: PlanFacts, home: Home, is_run: bool) -> PlanFacts:
    check_recipe(facts.recipe, facts.model)
    problem = resolve(facts.recipe, facts.model, facts.cluster, home, is_run=is_run)
    searched = _search(problem)
    notes: tuple[str, ...] = ()
    if searched is not None and not _is_given(problem.layout) and problem.case.cluster.num_devices > 1:
        layout = searched.best.layout()
        problem = replace(problem, recipe=replace(problem.recipe, layout=layout))
        notes = (f"the recipe sets no layout: the fastest of {searched.num_fitting:,} that fit was taken",)
    check_trainable(problem, problem.layout, problem.case.cluster)
    planned = training_plan(problem, predict(problem.case, as_arrays([problem.layout])))
    return replace(
        facts,
        training=planned,
        layouts=searched,
        cluster=problem.case.cluster,
        resized=tuple(other_sizes(planned)),
        notes=notes,
    )


def _search(problem: TrainingProblem) -> SearchResult | None:
    fixed = {name: getattr(problem.layout, name) for name in ("precision", "fp8_scaling", "offload")}
    try:
        return search(problem.case, fixed=fixed)
    except ArmillaryError:  # nothing fits: the plan says by how much
        return None


def _is_given(layout: Layout) -> bool:
    return any(getattr(layout, axis) != 1 for axis in AXES)
