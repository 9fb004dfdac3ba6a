"""`plan search`: the best layouts, why the first wins, what limits it next; or the catalogue's nodes ranked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.cli.plan.plan_text import GLUE, limit_text
from armillary.errors import ArmillaryError
from armillary.planning.cost.cost import device_hour, training_cost
from armillary.planning.training.layout_prediction import Prediction
from armillary.planning.training.resolve_recipe import TrainingProblem
from armillary.planning.training.search import SearchResult, why
from armillary.spec.toml.fields import to_plain
from armillary.units import bytes_text, dollars_text, scaled, seconds_text

if TYPE_CHECKING:  # it prices serving too
    from armillary.planning.node_ranking import Ranked

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


def say_search(out: Output, problem: TrainingProblem, result: SearchResult) -> None:
    price = _price(problem)
    out.say(
        f"{problem.model.name} on {problem.case.cluster.text()}, {problem.case.batch_tokens:,} tokens per step of "
        f"sequences of {problem.case.sequence:,}"
    )
    out.table("", COLUMNS, [_cells(problem, result.best, i, price) for i in range(len(result.best.layouts))])
    out.say(
        "×v: chunks per stage; redo: what the backward pass recomputes (some: selective, all: full); in: dtype of "
        "the GEMMs"
    )
    out.say(f"{result.num_valid:,} valid layouts, {result.num_fitting:,} fit, {result.seconds:.1f} s")
    for line in why(result):
        out.say(f"why: {line}")
    out.say(f"limit next: {limit_text(result.best)}".replace(GLUE, " "))
    front = [_cells(problem, result.front, i, price) for i in range(min(8, len(result.front.layouts)))]
    out.table(f"Pareto front of time and memory ({len(result.front.layouts)} layouts)", COLUMNS, front)
    for note in problem.notes:
        out.say(f"note: {note}")
    answer = {
        "valid": result.num_valid,
        "fitting": result.num_fitting,
        "seconds": result.seconds,
        "why": why(result),
        "best": [_answer(problem, result.best, i, price) for i in range(len(result.best.layouts))],
        "front": [_answer(problem, result.front, i, price) for i in range(len(result.front.layouts))],
        "notes": list(problem.notes),
    }
    out.result(answer, quiet=_as_set_flags(result.best))


def _answer(problem: TrainingProblem, prediction: Prediction, i: int, price: float | None) -> dict[str, Any]:
    return {
        "layout": to_plain(prediction.layout(i)),
        "predicted": prediction.gauges(i),
        "trillion_tokens_usd": _trillion_tokens_usd(problem, prediction, i, price),
    }


def _cells(problem: TrainingProblem, prediction: Prediction, i: int, price: float | None) -> list[object]:
    layout = prediction.layout(i)
    each = float(prediction.tokens_per_s[i]) / layout.num_devices
    dollars = _trillion_tokens_usd(problem, prediction, i, price)
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
        prediction.precision(i),
        bytes_text(float(prediction.memory.total[i])),
        seconds_text(float(prediction.time.total[i])),
        scaled(each),
        f"{prediction.mfu[i] * 100:.0f} %",
        dollars_text(dollars) if dollars is not None else None,
    ]


def _price(problem: TrainingProblem) -> float | None:
    try:
        return device_hour(problem.recipe.cost, problem.case.cluster).usd_per_useful_hour
    except ArmillaryError:
        return None


def _trillion_tokens_usd(problem: TrainingProblem, prediction: Prediction, i: int, price: float | None) -> float | None:
    if price is None:
        return None
    cost = training_cost(
        step_s=float(prediction.time.total[i]),
        batch_tokens=problem.case.batch_tokens,
        steps=1,
        num_devices=prediction.layout(i).num_devices,
        usd_per_device_hour=price,
    )
    return cost.million_trained_tokens_usd * 1e6


def _as_set_flags(prediction: Prediction) -> str:
    layout = to_plain(prediction.layout())
    keys = ("dp", "zero", "tp", "pp", "interleave", "schedule", "cp", "ep", "micro_batch", "recompute", "precision")
    return " ".join(f"--set layout.{key}={layout[key]}" for key in keys)


# --- nodes


def say_ranking(out: Output, ranked: list[Ranked]) -> None:
    cells = [_node_cells(node) for node in ranked if node.best is not None]
    out.table("", ["node", "devices", "layout", "memory", "step", "MFU", "run", "cost", "software"], cells[:20])
    refused = [node for node in ranked if node.best is None]
    for node in refused[:5]:
        out.say(f"not {node.node.name}: {node.reason}")
    if len(refused) > 5:
        out.say(f"and {len(refused) - 5} more that will not do")
    out.result(
        [_node_answer(node) for node in ranked], quiet=[node.node.name for node in ranked if node.best is not None]
    )


def _node_cells(node: Ranked) -> list[object]:
    assert node.best is not None and node.cluster is not None
    return [
        node.node.name,
        node.cluster.num_devices,
        node.best.layout().text("tp", "pp", "cp", "ep", "dp").replace(" × ", " "),
        bytes_text(float(node.best.memory.total[0])),
        seconds_text(float(node.best.time.total[0])),
        f"{node.best.mfu[0] * 100:.0f} %",
        seconds_text(node.run_s or 0.0),
        dollars_text(node.run_usd) if node.run_usd is not None else None,
        ", ".join(node.frameworks[:2]),
    ]


def _node_answer(node: Ranked) -> dict[str, Any]:
    return {
        "node": node.node.name,
        "devices": node.cluster.num_devices if node.cluster else None,
        "fits": node.best is not None,
        "layout": to_plain(node.best.layout()) if node.best else None,
        "predicted": node.best.gauges() if node.best else {},
        "run_s": node.run_s,
        "run_usd": node.run_usd,
        "software": list(node.frameworks),
        "reason": node.reason or None,
    }
