"""What the planner says after a change of inputs: the functions of planning/cost, without any formula of a report."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Figures
from armillary.planning.cost.cost import device_hour, training_cost
from armillary.planning.cost.failures import Failures, expected_goodput
from armillary.planning.cost.ownership import owned
from armillary.planning.serving.capacity import capacity
from armillary.spec.tables.traffic import Cost

CHANGED = ("rent_hour", "devices", "steps", "utilisation", "capex", "kwh", "pue", "years", "staff", "requests_per_s")
"""inputs that are changed at random"""
MONEY = ("run_cost", "step_cost", "owned_hour", "serving_month", "serving_year", "running_year")
"""figures that are compared to the cent"""


def random_changes(figures: Figures, seed: int) -> dict[str, float]:
    """Each input by up to a half; counts stay whole."""
    choose = random.Random(seed)
    changes = {key: figures[key].value * choose.uniform(0.6, 1.5) for key in CHANGED}
    changes |= {key: float(round(changes[key])) for key in ("devices", "steps")}
    changes["devices"] = float(max(8, round(changes["devices"] / 8) * 8))
    changes["utilisation"] = min(1.0, changes["utilisation"])
    changes["pue"] = max(1.0, changes["pue"])
    return changes


def planned(facts: PlanFacts, figures: Figures, changes: Mapping[str, float]) -> dict[str, float]:
    """The planner's figures with these inputs."""
    value = {figure.key: figure.value for figure in figures} | dict(changes)
    cost = Cost(
        usd_per_device_hour=value["rent_hour"],
        usd_per_device=value["capex"],
        years=value["years"],
        utilisation=value["utilisation"],
        usd_per_kwh=value["kwh"],
        pue=value["pue"],
        staff_usd_per_year=value["staff"],
    )
    return _training(facts, cost, value) | _serving(facts, cost, value)


def _training(facts: PlanFacts, cost: Cost, value: Mapping[str, float]) -> dict[str, float]:
    assert facts.training is not None
    devices, job = round(value["devices"]), facts.training.problem.recipe.train
    failures: Failures = replace(facts.training.goodput.failures, num_devices=devices)
    done = training_cost(
        step_s=job.batch_tokens / (value["device_tokens_per_s"] * devices),
        batch_tokens=job.batch_tokens,
        steps=round(value["steps"]),
        num_devices=devices,
        usd_per_device_hour=device_hour(cost, facts.cluster).usd_per_hour,
        goodput=expected_goodput(failures).goodput_fraction,
    )
    device = owned(cost, facts.cluster, devices)
    return {
        "run_cost": done.run_usd,
        "step_cost": done.step_usd,
        "owned_hour": device.usd_per_hour(cost.utilisation),
        "running_year": device.running_usd_per_year(cost.utilisation),
        "break_even": device.break_even_month(cost.utilisation, value["rent_hour"]) or 0.0,
        "break_even_use": device.break_even_utilisation(value["rent_hour"]) or 0.0,
        "goodput": expected_goodput(failures).goodput_fraction,
    }


def _serving(facts: PlanFacts, cost: Cost, value: Mapping[str, float]) -> dict[str, float]:
    assert facts.serving is not None
    server = facts.serving.capacity.server
    traffic = replace(server.traffic, requests_per_s=value["requests_per_s"])
    needed = capacity(replace(server, traffic=traffic), facts.serving.request.objective)
    month = needed.devices * device_hour(cost, facts.cluster, needed.devices).usd_per_hour * 730
    return {"replicas": float(needed.replicas), "serving_month": month, "serving_year": month * 12}
