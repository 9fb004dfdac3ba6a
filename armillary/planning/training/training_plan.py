"""Training plan: the time, memory, cost and goodput of one layout, as a Plan that every rank can read."""

import time
from dataclasses import dataclass

from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import TrainingCost, device_hour, training_cost
from armillary.planning.cost.failures import Goodput, expected_goodput, of_cluster
from armillary.planning.cost.storage import RunStorage, checkpoint_bytes, run_storage
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.offload import host_capacity
from armillary.planning.training.remedies import remedy_text
from armillary.planning.training.resolve_recipe import TrainingProblem
from armillary.spec import catalogue
from armillary.spec.fp8 import fp8_rule
from armillary.spec.hardware import Cluster
from armillary.spec.layout_rules.placement import experts_apart
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.plan import Plan
from armillary.spec.recipe import to_dict
from armillary.units import bytes_text

UNKNOWN_STORAGE_BYTES_PER_S = 1e9
"""write rate of a node whose storage is unknown"""
CHECKPOINT_WEIGHT_BYTES = 4.0
"""bytes per weight in our checkpoints: only the fp32 master weight"""
SHORTEST_INTERVAL_S = 1.0
"""between checkpoints that cost nothing"""
_DOLLARS = ("step_usd", "run_usd", "million_trained_tokens_usd")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A plan with everything that a user asks about it."""

    problem: TrainingProblem
    prediction: Prediction
    """time and memory of the layout, arrays of length one"""
    goodput: Goodput
    cost: TrainingCost | None
    """cost in dollars; None where no price is known"""
    price_source: str
    """source of the price, or why there is none"""
    remedy: str
    """the smallest change with which the model fits; empty where it fits"""

    @property
    def fits(self) -> bool:
        return bool(self.prediction.fits[0])

    @property
    def shortage(self) -> str:
        """What is needed and what is available, where the model does not fit."""
        need, limit = float(self.prediction.memory.total[0]), self.prediction.memory_limit
        if need > limit:
            return f"it needs {bytes_text(need)} on each device and there are {bytes_text(limit)}"
        place = "disks have" if self.prediction.layout().offload == "nvme" else "memory has"
        have = float(host_capacity(self.problem.case, self.prediction.layouts)[0])
        return (
            f"it offloads {bytes_text(float(self.prediction.memory.host[0]))} per device and the host's {place} "
            f"{bytes_text(have)} per device"
        )

    def plan(self) -> Plan:
        """The record that ranks and other verbs read."""
        recipe = self.problem.recipe
        predicted = self.prediction.gauges() | {
            "goodput_fraction": self.goodput.goodput_fraction,
            "checkpoint_bytes": checkpoint_bytes(self.problem.model, weight_bytes=CHECKPOINT_WEIGHT_BYTES),
            "run_s": self.run_s,
        }
        if self.cost is not None:
            predicted |= {name: getattr(self.cost, name) for name in _DOLLARS}
        return Plan(
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            recipe=to_dict(self.problem.requested),
            chosen=self.problem.chosen,
            model=self.problem.model,
            cluster=self.problem.case.cluster,
            layout=self.prediction.layout(),
            train=recipe.train,
            predicted=predicted,
            notes=self.notes(),
        )

    @property
    def run_s(self) -> float:
        """Wall time of all steps, time lost to failures included."""
        useful_s = float(self.prediction.time.total[0]) * self.problem.recipe.train.steps
        return useful_s / self.goodput.goodput_fraction

    def storage(self) -> RunStorage:
        """What the run asks of storage: checkpoints written beside training, read by one copy of the model."""
        job, seconds = self.problem.recipe.train, float(self.prediction.time.total[0])
        return run_storage(
            self.problem.model,
            tokens_per_s=job.batch_tokens / seconds,
            total_tokens=job.total_tokens,
            interval_s=max(SHORTEST_INTERVAL_S, self.goodput.interval_s),
            steps=job.steps,
        )

    def notes(self) -> tuple[str, ...]:
        notes = list(self.problem.notes)
        layout, cluster = self.prediction.layout(), self.problem.case.cluster
        if layout.precision == "fp8":
            notes.append(fp8_rule(self.problem.model, layout, self.problem.recipe.train))
        if (idle := cluster.num_devices - layout.num_devices) > 0:
            notes.append(f"{idle} of {cluster.num_devices} devices stay idle: the layout uses {layout.num_devices}")
        if note := experts_apart(layout, cluster):
            notes.append(note)
        if self.remedy:
            notes.append(f"does not fit: {self.shortage}; {self.remedy}")
        return tuple(notes)


def training_plan(problem: TrainingProblem, prediction: Prediction) -> TrainingPlan:
    """The first layout of a prediction with its goodput, its price and, where it does not fit, a remedy."""
    case, recipe = problem.case, problem.recipe
    stall = checkpoint_bytes(problem.model) / _write_rate(case.cluster)
    goodput = expected_goodput(of_cluster(case.cluster, stall))
    cost, source = _price(problem, prediction, goodput)
    remedy = "" if prediction.fits[0] else remedy_text(case, prediction.layout(), prediction.precision())
    check_layout(
        prediction.layout(),
        problem.model,
        num_devices=case.cluster.num_devices,
        sequence=recipe.train.sequence,
        batch_tokens=recipe.train.batch_tokens,
        by_trainer=True,
        compiled=recipe.train.compiled,
    )
    return TrainingPlan(
        problem=problem, prediction=prediction, goodput=goodput, cost=cost, price_source=source, remedy=remedy
    )


def _price(problem: TrainingProblem, prediction: Prediction, goodput: Goodput) -> tuple[TrainingCost | None, str]:
    cluster, job = problem.case.cluster, problem.recipe.train
    try:
        offer = device_hour(problem.recipe.cost, cluster)
    except ArmillaryError as error:
        return None, str(error)
    cost = training_cost(
        step_s=float(prediction.time.total[0]),
        batch_tokens=job.batch_tokens,
        steps=job.steps,
        num_devices=prediction.layout().num_devices,
        usd_per_device_hour=offer.usd_per_hour,
        goodput=goodput.goodput_fraction * offer.useful,
    )
    return cost, offer.source


def _write_rate(cluster: Cluster) -> float:
    """Bytes/s that all nodes write together."""
    node = cluster.node
    tier = catalogue.storage(node.storage) if node and node.storage else None
    each = tier.write_bytes_per_s * (node.num_drives if node else 1) if tier else UNKNOWN_STORAGE_BYTES_PER_S
    nodes = max(1, cluster.num_devices // node.num_chips) if node else 1
    return each * nodes
