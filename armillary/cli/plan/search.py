"""`plan search`: the best layouts, why the first wins, what limits it next; or the catalogue's nodes ranked."""

from __future__ import annotations

from typing import Any

from armillary.cli.output import Output
from armillary.cli.plan.plan_text import GLUE, limit_text
from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import device_hour, training_cost
from armillary.planning.training.node_ranking import Ranked
from armillary.planning.training.prediction import Prediction
from armillary.planning.training.resolve import TrainingProblem
from armillary.planning.training.search import SearchResult, why
from armillary.spec.toml.fields import to_plain
from armillary.units import bytes_text, dollars_text, scaled, seconds_text

COLUMNS = [
    "",
    "tp",
    "pp",
    "×v",
    "cp",
    "ep",
    "dp",
    "zero",
    "micro",
    "redo",
    "in",
    "memory",
    "step",
    "tok/s/dev",
    "MFU",
    "$/1T tok",
]

_SHORT = {"none": "–", "selective": "some", "full": "all"}


def say_search(out: Output, problem: TrainingProblem, found: SearchResult) -> None:
    price = _price(problem)
    out.say(
        f"{problem.model.name} on {problem.case.cluster.text()}, {problem.case.batch_tokens:,} tokens a step of "
        f"sequences of {problem.case.sequence:,}"
    )
    out.table("", COLUMNS, [_cells(problem, found.best, i, price) for i in range(len(found.best.layouts))])
    out.say(
        "×v: chunks a stage; redo: what the backward pass makes again (some: selective, all: full); in: format of "
        "the products"
    )
    out.say(f"{found.num_valid:,} valid layouts, {found.num_fitting:,} fit, {found.seconds:.1f} s")
    for line in why(found):
        out.say(f"why: {line}")
    out.say(f"limit next: {limit_text(found.best)}".replace(GLUE, " "))
    front = [_cells(problem, found.front, i, price) for i in range(min(8, len(found.front.layouts)))]
    out.table(f"Pareto front of time and memory ({len(found.front.layouts)} layouts)", COLUMNS, front)
    for note in problem.notes:
        out.say(f"note: {note}")
    out.result(search_answer(problem, found, price), quiet=_sets(found.best))


def search_answer(problem: TrainingProblem, found: SearchResult, price: float | None) -> dict[str, Any]:
    return {
        "valid": found.num_valid,
        "fitting": found.num_fitting,
        "seconds": found.seconds,
        "why": why(found),
        "best": [_answer(problem, found.best, i, price) for i in range(len(found.best.layouts))],
        "front": [_answer(problem, found.front, i, price) for i in range(len(found.front.layouts))],
        "notes": list(problem.notes),
    }


def _answer(problem: TrainingProblem, found: Prediction, i: int, price: float | None) -> dict[str, Any]:
    dollars = _trillion(problem, found, i, price)
    return {"layout": to_plain(found.layout(i)), "predicted": found.gauges(i), "trillion_tokens_usd": dollars}


def _cells(problem: TrainingProblem, found: Prediction, i: int, price: float | None) -> list[object]:
    layout = found.layout(i)
    each = float(found.tokens_per_s[i]) / layout.num_devices
    dollars = _trillion(problem, found, i, price)
    return [
        i + 1,
        layout.tp,
        layout.pp,
        f"×{layout.interleave}",
        layout.cp,
        layout.ep,
        layout.dp,
        f"{layout.zero}" + (f"/{layout.shard}" if layout.shard else ""),
        layout.micro_batch,
        _SHORT[layout.recompute],
        found.precision(i),
        bytes_text(float(found.memory.total[i])),
        seconds_text(float(found.time.total[i])),
        scaled(each),
        f"{found.mfu[i] * 100:.0f} %",
        dollars_text(dollars) if dollars is not None else None,
    ]


def _price(problem: TrainingProblem) -> float | None:
    try:
        return device_hour(problem.recipe.cost, problem.case.cluster).usd_per_useful_hour
    except ArmillaryError:
        return None


def _trillion(problem: TrainingProblem, found: Prediction, i: int, price: float | None) -> float | None:
    """Dollars for a trillion tokens."""
    if price is None:
        return None
    cost = training_cost(
        step_s=float(found.time.total[i]),
        batch_tokens=problem.case.batch_tokens,
        steps=1,
        num_devices=found.layout(i).num_devices,
        usd_per_device_hour=price,
    )
    return cost.million_trained_tokens_usd * 1e6


def _sets(found: Prediction) -> str:
    """The best layout as --set flags."""
    layout = to_plain(found.layout())
    keys = ("dp", "zero", "tp", "pp", "interleave", "schedule", "cp", "ep", "micro_batch", "recompute", "precision")
    return " ".join(f"--set layout.{key}={layout[key]}" for key in keys)


# --- nodes


def say_ranking(out: Output, ranked: list[Ranked]) -> None:
    cells = [_node_cells(one) for one in ranked if one.best is not None]
    out.table("", ["node", "devices", "layout", "memory", "step", "MFU", "run", "cost", "software"], cells[:20])
    refused = [one for one in ranked if one.best is None]
    for one in refused[:5]:
        out.say(f"not {one.node.name}: {one.reason}")
    if len(refused) > 5:
        out.say(f"and {len(refused) - 5} more that will not do")
    out.result([_node_answer(one) for one in ranked], quiet=[one.node.name for one in ranked if one.best is not None])


def _node_cells(one: Ranked) -> list[object]:
    assert one.best is not None and one.cluster is not None
    layout = one.best.layout()
    return [
        one.node.name,
        one.cluster.num_devices,
        layout.text("tp", "pp", "cp", "ep", "dp").replace(" × ", " "),
        bytes_text(float(one.best.memory.total[0])),
        seconds_text(float(one.best.time.total[0])),
        f"{one.best.mfu[0] * 100:.0f} %",
        seconds_text(one.run_s or 0.0),
        dollars_text(one.run_usd) if one.run_usd is not None else None,
        ", ".join(one.frameworks[:2]),
    ]


def _node_answer(one: Ranked) -> dict[str, Any]:
    return {
        "node": one.node.name,
        "devices": one.cluster.num_devices if one.cluster else None,
        "fits": one.best is not None,
        "layout": to_plain(one.best.layout()) if one.best else None,
        "predicted": one.best.gauges() if one.best else {},
        "run_s": one.run_s,
        "run_usd": one.run_usd,
        "software": list(one.frameworks),
        "reason": one.reason or None,
    }
