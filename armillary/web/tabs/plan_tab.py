"""The tab Plan: a training run or a service, predicted while it is typed, and its documents."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from armillary.errors import ArmillaryError, BadLayout
from armillary.machine.machine import here
from armillary.planning.cost.cost_report import goodput_rows, training_rows
from armillary.planning.serving.serving_plan import ServingPlan, serving_plan
from armillary.planning.serving.serving_report import CHOICE_COLUMNS, choice_cells, plan_rows
from armillary.planning.training.resolve_recipe import dividing_batch, resolve, usual_sequence
from armillary.planning.training.search import SearchResult, search
from armillary.planning.training.training_plan import TrainingPlan, training_plan
from armillary.report.page import section, table
from armillary.spec import catalogue
from armillary.spec.hardware import Cluster
from armillary.spec.model import ModelConfig
from armillary.spec.recipe import Recipe, check_recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.units import bytes_text, dollars_text, parse_count, scaled, seconds_text
from armillary.web.form import Field, Query, View, value_of
from armillary.web.tabs.plan_charts import (
    memory_chart,
    serving_costs,
    serving_memory_chart,
    serving_roofline,
    step_chart,
    training_costs,
    training_roofline,
)

T = TypeVar("T")
HERE = "here"
"""this machine"""
FORMATS = ("docx", "xlsx", "pdf", "pptx", "html", "md")
TRAINING = (
    Field(name="train.sequence", label="Tokens per sequence", group="Training", hint="from the model"),
    Field(name="train.batch_tokens", label="Tokens per step", group="Training", hint="about 4M"),
    Field(name="train.steps", label="Steps", group="Training", default="10000"),
    Field(name="layout.tp", label="Tensor parallel", group="Layout (empty: searched)"),
    Field(name="layout.pp", label="Pipeline stages", group="Layout (empty: searched)"),
    Field(name="layout.cp", label="Context parallel", group="Layout (empty: searched)"),
    Field(name="layout.ep", label="Expert parallel", group="Layout (empty: searched)"),
    Field(name="layout.micro_batch", label="Micro-batch", group="Layout (empty: searched)"),
    Field(name="layout.zero", label="ZeRO stage", group="Layout (empty: searched)"),
    Field(name="layout.recompute", label="Recompute", group="Layout (empty: searched)", hint="none, selective, full"),
    Field(name="layout.precision", label="Precision", group="Layout (empty: searched)", hint="auto, bf16, fp8"),
)
SERVING = (
    Field(name="traffic.requests_per_s", label="Requests per second", group="Traffic", default="10"),
    Field(name="traffic.tokens_in", label="Prompt tokens", group="Traffic", default="512"),
    Field(name="traffic.tokens_out", label="Completion tokens", group="Traffic", default="128"),
    Field(name="objective.ttft_p99_s", label="TTFT p99, seconds", group="Objectives", hint="no objective"),
    Field(name="objective.itl_p99_s", label="ITL p99, seconds", group="Objectives", hint="no objective"),
)
MONEY = (
    Field(name="cost.usd_per_device_hour", label="$ per device-hour", group="Money", hint="from the catalogue"),
    Field(name="report.budget_usd", label="Budget, $", group="Money", hint="none"),
)


def fields(query: Query, home: Home | None = None) -> list[Field]:
    """What the purpose needs is shown; what was typed for the other purpose stays."""
    purpose = Field(name="for", label="For", group="What", default="train", options=("train", "serve"))
    serves = value_of(query, purpose) == "serve"
    models, chips = list(catalogue.models()), [HERE, *(f"{name}x8" for name in catalogue.chips())]
    return [
        purpose,
        Field(name="model.name", label="Model", group="What", default="llama-3-8b", suggestions=models),
        Field(name="hardware.on", label="Devices", group="What", default="h100x8", suggestions=chips),
        *(replace(each, hidden=serves) for each in TRAINING),
        *(replace(each, hidden=not serves) for each in SERVING),
        *MONEY,
    ]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The recipe of a form with its model and devices; `fixed` names what was typed of the layout."""

    recipe: Recipe
    model: ModelConfig
    cluster: Cluster
    purpose: str
    fixed: tuple[str, ...] = ()


class BadField(Exception):
    """A value that cannot be used, and the field it is in."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def view(query: Query, home: Home) -> View:
    try:
        asked = read_form(query)
        planned = serving_view(asked, home, query) if asked.purpose == "serve" else training_view(asked, home, query)
    except BadField as error:
        return View(errors={error.name: str(error)})
    except BadLayout as error:  # nothing fits these devices, or what was typed of the layout
        return View(errors={_field_of(str(error), query) or "hardware.on": str(error)})
    except ArmillaryError as error:
        return View(errors={_field_of(str(error), query): str(error)})
    return View(html=planned)


def _field_of(message: str, query: Query) -> str:
    """The field whose key a message names; "" where it names none that is shown."""
    names = [each.name for each in fields(query) if not each.hidden and each.name in message]
    return names[0] if names else ""


def read_form(query: Query) -> Asked:
    """BadField where a value cannot be used."""
    shown = [each for each in fields(query) if not each.hidden]
    values = {each.name: value_of(query, each) for each in shown}
    purpose, name, on = values.pop("for"), values.pop("model.name"), values.pop("hardware.on")
    model = _checked("model.name", lambda: catalogue.model(name)).config
    cluster = _checked("hardware.on", lambda: here() if on == HERE else catalogue.cluster(on))
    values = {key: text for key, text in values.items() if text}
    tables: dict[str, dict[str, Any]] = {"model": {"name": name}, "hardware": {"on": on}}
    if purpose == "train":
        tables["train"] = _batch(values, model, cluster)
    for key, text in values.items():
        _checked(key, partial(recipe_from_dict, tables, [f"{key}={text}"]))
    recipe = recipe_from_dict(tables, [f"{key}={text}" for key, text in values.items()])
    fixed = tuple(key.removeprefix("layout.") for key in values if key.startswith("layout."))
    return Asked(recipe=recipe, model=model, cluster=cluster, purpose=purpose, fixed=fixed)


def _checked(name: str, read: Callable[[], T]) -> T:
    """What `read` returns; its error belongs to the field."""
    try:
        return read()
    except ArmillaryError as error:
        raise BadField(name, str(error)) from None


def _batch(values: dict[str, str], model: ModelConfig, cluster: Cluster) -> dict[str, int]:
    """Sequence and batch as `armillary plan` derives them."""
    length, batch = values.pop("train.sequence", ""), values.pop("train.batch_tokens", "")
    sequence = _checked("train.sequence", lambda: parse_count(length)) if length else usual_sequence(model)
    wanted = _checked("train.batch_tokens", lambda: parse_count(batch)) if batch else None
    if sequence < 1:
        raise BadField("train.sequence", f"{sequence} tokens are no sequence; give at least 1")
    tokens, _ = _checked("train.batch_tokens", lambda: dividing_batch(wanted, sequence, cluster.num_devices))
    return {"sequence": sequence, "batch_tokens": tokens}


# --- training


def training_view(asked: Asked, home: Home, query: Query) -> str:
    planned, searched = plan_training(asked, home)
    prediction = planned.prediction
    parts = [
        section(f"{asked.model.name} on {asked.cluster.text()}", _training_rows(planned, searched)),
        section("Memory per device", memory_chart(planned)),
        section("Step time", step_chart(prediction)),
        section("Roofline", training_roofline(prediction)),
        section("Layouts", _layouts(searched)),
        training_costs(planned),
        downloads(query),
    ]
    return "".join(parts)


def plan_training(asked: Asked, home: Home) -> tuple[TrainingPlan, SearchResult]:
    """The fastest layout that fits, with what was typed of it."""
    check_recipe(asked.recipe, asked.model)
    problem = resolve(asked.recipe, asked.model, asked.cluster, home)
    fixed = {name: getattr(problem.layout, name) for name in asked.fixed}
    searched = search(problem.case, fixed=fixed)
    problem = replace(problem, recipe=replace(problem.recipe, layout=searched.best.layout()))
    return training_plan(problem, searched.best), searched


def _training_rows(plan: TrainingPlan, searched: SearchResult) -> str:
    prediction, budget = plan.prediction, plan.problem.recipe.report.budget_usd
    speed = float(prediction.tokens_per_s[0])
    rows = [
        ("layout", f"{prediction.layout_text()} (the fastest of {searched.num_fitting:,} that fit)"),
        ("step", seconds_text(float(prediction.time.total[0]))),
        ("throughput", f"{scaled(speed)} tokens/s, MFU {float(prediction.mfu[0]):.1%}"),
        *(training_rows(plan.cost) if plan.cost else [("cost", plan.price_source)]),
        *(goodput_rows(plan.goodput) if plan.problem.case.cluster.num_devices > 8 else []),
    ]
    if plan.cost and budget is not None:
        left = budget - plan.cost.run_usd
        says = f"{dollars_text(left)} below" if left >= 0 else f"{dollars_text(-left)} above"
        rows.append(("budget", f"{says} {dollars_text(budget)}"))
    rows += [("note", note) for note in plan.notes()]
    return table(("", ""), rows, wide=True)


def _layouts(searched: SearchResult) -> str:
    best = searched.best
    rows = [
        [
            best.layout_text(i),
            seconds_text(float(best.time.total[i])),
            f"{scaled(float(best.tokens_per_s[i]))} tokens/s",
            f"{float(best.mfu[i]):.1%}",
            bytes_text(float(best.memory.total[i])),
        ]
        for i in range(len(best.time.total))
    ]
    return table(("layout", "step", "throughput", "MFU", "memory"), rows, wide=True)


# --- serving


def serving_view(asked: Asked, home: Home, query: Query) -> str:
    planned = plan_serving(asked, home)
    rows = plan_rows(planned.request, planned.chosen, planned.pools)
    rows += [("note", note) for note in planned.notes()]
    ways = [choice_cells(option) for option in planned.tried if option.capacity][:10]
    return "".join(
        [
            section(f"Serving {asked.model.name} on {asked.cluster.text()}", table(("", ""), rows, wide=True)),
            section("Memory per device", serving_memory_chart(planned)),
            section("Roofline", serving_roofline(planned)),
            section("Ways to serve", table(CHOICE_COLUMNS, ways)),
            serving_costs(planned),
            downloads(query),
        ]
    )


def plan_serving(asked: Asked, home: Home) -> ServingPlan:
    check_recipe(asked.recipe, asked.model, for_training=False)
    return serving_plan(asked.recipe, asked.model, asked.cluster, home, search=True)


# --- documents


def downloads(query: Query) -> str:
    """Links to the plan as a document of each format."""
    typed = {each.name: query[each.name] for each in fields(query) if each.name in query}
    links = " ".join(
        f"<a class='button' download href='document?{escape(urlencode({**typed, 'to': name}))}'>{name}</a>"
        for name in FORMATS
    )
    return section("Documents", f"<p>The plan as Word, Excel, PDF, PowerPoint, HTML or Markdown:</p><p>{links}</p>")


def document(query: Query, home: Home) -> tuple[str, bytes]:
    """(file name, bytes) of the plan in the format `to`."""
    from armillary.documents.facts import gather
    from armillary.documents.plan_report import build_report
    from armillary.documents.write import read_formats, write_documents

    formats = read_formats(query.get("to", ""))[:1]
    asked = read_form(query)
    recipe = asked.recipe
    if asked.purpose == "train":
        planned, _ = plan_training(asked, home)
        recipe = replace(recipe, layout=planned.prediction.layout())
    report = build_report(gather(recipe, asked.model, asked.cluster, home, (asked.purpose,)))
    with tempfile.TemporaryDirectory() as folder:
        path = write_documents(report, formats, Path(folder))[0]
        return path.name, path.read_bytes()
