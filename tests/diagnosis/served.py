"""Readings of servers that were never there: the real scheduler and cache on a virtual clock, set well or badly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from armillary.diagnosis.readings.reading import Reading
from armillary.engine.cache.layer_groups import layer_groups
from armillary.engine.scheduler.settings import settings_for
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.planning.simulation.simulated_engine import System, simulate
from armillary.planning.simulation.step_cost import StepCost
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster
from armillary.spec.layout import Layout
from armillary.spec.plan import Plan
from armillary.spec.tables.serve import Serve
from armillary.spec.toml.fields import to_plain
from armillary.store.gauges import KEYS, GaugeWriter, Record
from armillary.store.home import Home
from armillary.store.runs import Run, create_run

COST = StepCost(base_s=0.008, prefill_s=1.0e-4, decode_s=2.0e-4, context_s=2.0e-7, pair_s=1.0e-8)
"""about a small model on two cores"""
CORES = Cluster(name="here", chip=Chip(name="cpu-core", title="a core", vendor="", kind="cpu", memory_bytes=8e9))
MODEL = catalogue.model("armillary-25m").config


def requests(
    count: int,
    *,
    rate: float | None = None,
    tokens_in: int = 64,
    tokens_out: int = 32,
    shared: int = 0,
    prefixes: int = 1,
    seed: int = 0,
) -> list[Arrival]:
    """`count` requests, all at once or `rate` a second, whose prompts begin with one of `prefixes` texts in turn."""
    dice, now, made = Random(seed), 0.0, []
    for number in range(1, count + 1):
        out = dice.randint(max(1, tokens_out // 2), 2 * tokens_out)
        inside = shared + dice.randint(max(1, tokens_in // 2), tokens_in)
        before = number - prefixes
        known = shared // 16 * 16 if before > 0 else 0
        made.append(
            Arrival(
                number=number,
                at_s=now,
                tokens_in=inside,
                tokens_out=out,
                limit=out,
                shared_prefix=known,
                prefix_source=before if known else 0,
            )
        )
        now += dice.expovariate(rate) if rate else 0.0
    return made


def served(
    arrivals: Sequence[Arrival],
    *,
    kv_tokens: int = 16_384,
    cost: StepCost = COST,
    chip: str = "",
    objective: dict[str, float] | None = None,
    noise: float = 0.1,
    **serve: Any,
) -> Reading:
    """The run of an engine set like that; steps differ by `noise` from the line that they follow."""
    given = Serve(**{"max_model_len": 2048, "max_running": 32, **serve})
    groups = layer_groups(MODEL)
    system = System(
        settings=settings_for(MODEL, given),
        num_blocks=kv_tokens // 16 * len(groups),
        groups=groups,
        prefix=given.prefix_cache,
        overlap=given.overlap and bool(chip),
    )  # none is decided ahead on cores
    found, dice = simulate(arrivals, system, cost), Random(1)
    steps = tuple(
        {**one, "step": i, "engine_step_s": one["engine_step_s"] * dice.uniform(1 - noise, 1 + noise)}
        for i, one in enumerate(found.steps)
    )
    cluster = catalogue.cluster(chip) if chip else CORES
    layout = Layout(precision="bf16")  # what auto came to
    recipe = {
        "model": {"name": MODEL.name},
        "serve": to_plain(given),
        "objective": objective or {},
        "layout": {"precision": layout.precision},
    }
    plan = Plan(created="2026-11-15T09:30:00Z", recipe=recipe, model=MODEL, cluster=cluster, layout=layout, serve=given)
    return Reading(
        source="a test", kind="serving", steps=steps, requests=tuple(found.requests), values=found.gauges, plan=plan
    )


def served_run(home: Home, reading: Reading, *, name: str, **model: str) -> Run:
    """A reading as the run folder that a server leaves; `model` replaces its [model] table."""
    assert reading.plan is not None
    recipe = dict(reading.plan.recipe) | ({"model": model} if model else {})
    run = create_run(home, recipe, plan=to_plain(replace(reading.plan, recipe=recipe)), name=name)
    write_served(run, reading)
    return run


def write_served(run: Run, reading: Reading) -> None:
    """What was measured, into the gauges of a run that is there."""
    with GaugeWriter(run.gauges) as writer:
        for one in reading.steps:
            writer.write(_gauges(one), step=one["step"])
        for number, one in enumerate(reading.requests):
            writer.write(_gauges(one), request=str(number))


def _gauges(record: Record) -> Record:
    return {name: value for name, value in record.items() if name not in KEYS}
