"""The plan's layout on other numbers of devices: what half, twice or four times as many would take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import TrainingCost
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.layout_prediction import Prediction, predict
from armillary.planning.training.resolve_recipe import TrainingProblem
from armillary.planning.training.training_plan import TrainingPlan, training_plan
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout

RESIZED = (0.5, 2.0, 4.0)
"""numbers of devices, over the plan's, at which the layout is planned again"""


@dataclass(frozen=True, kw_only=True)
class Resized:
    """The plan's layout with another dp, on more or fewer devices."""

    devices: int
    step_s: float = 0.0
    goodput: float = 1.0
    cost: TrainingCost | None = None
    reason: str = ""
    """why it does not do"""


def other_sizes(plan: TrainingPlan) -> Iterator[Resized]:
    """The layout with the dp that fills other numbers of devices; this machine's CPU has no others."""
    cluster = plan.problem.case.cluster
    if cluster.name == "here" or cluster.num_devices == 1:
        return
    for factor in RESIZED:
        devices = round(cluster.num_devices * factor)
        try:
            yield _on_devices(plan, devices)
        except ArmillaryError as error:
            yield Resized(devices=devices, reason=str(error).partition(";")[0])


def _on_devices(plan: TrainingPlan, devices: int) -> Resized:
    problem, layout = plan.problem, plan.prediction.layout().on_devices(devices)
    cluster = with_devices(problem.case.cluster, devices)
    check_trainable(problem, layout, cluster)
    case = replace(problem.case, cluster=cluster)
    prediction: Prediction = predict(case, as_arrays([layout]))
    if not prediction.fits[0]:
        return Resized(devices=devices, reason="does not fit into memory")
    resized = training_plan(replace(problem, case=case, recipe=replace(problem.recipe, layout=layout)), prediction)
    return Resized(
        devices=devices,
        step_s=float(prediction.time.total[0]),
        goodput=resized.goodput.goodput_fraction,
        cost=resized.cost,
    )


def with_devices(cluster: Cluster, devices: int) -> Cluster:
    """The same cluster with more or fewer units in its outermost tier."""
    *inner, outer = cluster.tiers
    inside = cluster.num_devices // outer.count
    if devices < inside or devices % inside:  # a part of one node
        return replace(cluster, tiers=(replace(inner[0] if inner else outer, count=devices),))
    return replace(cluster, tiers=(*inner, replace(outer, count=devices // inside)))


def check_trainable(problem: TrainingProblem, layout: Layout, cluster: Cluster) -> None:
    """BadLayout where the trainer could not run it."""
    job = problem.recipe.train
    devices = max(cluster.num_devices, layout.num_devices if cluster.chip.kind == "cpu" else 1)
    check_layout(
        layout,
        problem.model,
        num_devices=devices,
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        by_trainer=True,
        compiled=job.compiled,
    )
