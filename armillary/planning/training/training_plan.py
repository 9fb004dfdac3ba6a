"""A training plan: one layout priced in time, memory, dollars and failures, as a Plan that every rank can read."""

from __future__ import annotations

import time
from dataclasses import dataclass

from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import TrainingCost, device_hour, training_cost
from armillary.planning.cost.failures import Goodput, expected_goodput, of_cluster
from armillary.planning.cost.storage import checkpoint_bytes
from armillary.planning.training.offload import host_room
from armillary.planning.training.prediction import Prediction
from armillary.planning.training.remedies import remedy_text
from armillary.planning.training.resolve import Question
from armillary.spec import catalogue
from armillary.spec.fp8 import fp8_rule
from armillary.spec.hardware import Cluster
from armillary.spec.layout_rules.placement import experts_apart
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.plan import Plan
from armillary.spec.recipe import to_dict
from armillary.units import bytes_text

UNKNOWN_STORAGE_BYTES_PER_S = 1e9
"""what a node writes where its storage is not known"""
KEPT_BYTES = 4.0
"""of a weight in our checkpoints: the fp32 one, and not what it is rounded to"""
_DOLLARS = ("step_usd", "run_usd", "million_trained_tokens_usd")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A plan with everything a person asks about it."""

    question: Question
    """what was asked"""
    found: Prediction
    """the layout, an array of one"""
    goodput: Goodput
    """what failures leave"""
    cost: TrainingCost | None
    """what it costs; none where no price is known"""
    price_source: str
    """where the price is from, or why there is none"""
    remedy: str
    """the smallest change with which it fits; empty where it does"""

    @property
    def fits(self) -> bool:
        return bool(self.found.fits[0])

    @property
    def shortage(self) -> str:
        """What is needed and how much there is of it, where it does not fit."""
        need, room = float(self.found.memory.total[0]), self.found.room
        if need > room:
            return f"it needs {bytes_text(need)} on each device and there are {bytes_text(room)}"
        place = "disks have" if self.found.layout().offload == "nvme" else "memory has"
        have = float(host_room(self.question.case, self.found.layouts)[0])
        return (
            f"it keeps {bytes_text(float(self.found.memory.host[0]))} a device elsewhere and the host's {place} "
            f"{bytes_text(have)} for each"
        )

    def plan(self) -> Plan:
        """The record that ranks and other verbs read."""
        recipe = self.question.recipe
        predicted = self.found.gauges() | {
            "goodput_fraction": self.goodput.goodput_fraction,
            "checkpoint_bytes": checkpoint_bytes(self.question.model, weight_bytes=KEPT_BYTES),
            "run_s": self.run_s,
        }
        if self.cost is not None:
            predicted |= {name: getattr(self.cost, name) for name in _DOLLARS}
        return Plan(
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            recipe=to_dict(self.question.asked),
            chosen=self.question.chosen,
            model=self.question.model,
            cluster=self.question.case.cluster,
            layout=self.found.layout(),
            train=recipe.train,
            predicted=predicted,
            notes=self.notes(),
        )

    @property
    def run_s(self) -> float:
        """Wall time of all steps, time lost to failures included."""
        steps = self.question.recipe.train.steps
        return float(self.found.time.total[0]) * steps / self.goodput.goodput_fraction

    def notes(self) -> tuple[str, ...]:
        said = list(self.question.notes)
        if self.found.layout().precision == "fp8":
            said.append(fp8_rule(self.question.model, self.found.layout(), self.question.recipe.train))
        used, there = self.found.layout().num_devices, self.question.case.cluster.num_devices
        if used < there:
            said.append(f"{there - used} of {there} devices stay idle: the layout uses {used}")
        if apart := experts_apart(self.found.layout(), self.question.case.cluster):
            said.append(apart)
        if self.remedy:
            said.append(f"does not fit: {self.shortage}; {self.remedy}")
        return tuple(said)


def training_plan(question: Question, found: Prediction) -> TrainingPlan:
    """The first layout of a prediction with its goodput, its price and, where it does not fit, what would."""
    case, recipe = question.case, question.recipe
    stall = checkpoint_bytes(question.model) / _write_rate(case.cluster)
    goodput = expected_goodput(of_cluster(case.cluster, stall))
    cost, source = _price(question, found, goodput)
    fits = bool(found.fits[0])
    remedy = "" if fits else remedy_text(case, found.layout(), found.precision())
    check_layout(
        found.layout(),
        question.model,
        num_devices=case.cluster.num_devices,
        sequence=recipe.train.sequence,
        batch_tokens=recipe.train.batch_tokens,
        by_trainer=True,
        compiled=recipe.train.compiled,
    )
    return TrainingPlan(question=question, found=found, goodput=goodput, cost=cost, price_source=source, remedy=remedy)


def _price(question: Question, found: Prediction, goodput: Goodput) -> tuple[TrainingCost | None, str]:
    cluster, job = question.case.cluster, question.recipe.train
    try:
        offer = device_hour(question.recipe.cost, cluster)
    except ArmillaryError as error:
        return None, str(error)
    cost = training_cost(
        step_s=float(found.time.total[0]),
        batch_tokens=job.batch_tokens,
        steps=job.steps,
        num_devices=found.layout().num_devices,
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
