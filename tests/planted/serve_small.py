"""Small engine runs: requests come by the clock, the engine writes its gauges, and the folder is a run like any other.

Rates are set against what the engine bears on this machine at this moment, so that a load is moderate or too much
wherever it is run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.engine.bench.measure import fixed
from armillary.engine.build import make_engine
from armillary.engine.engine import Engine
from armillary.engine.request.request import Request
from armillary.kernels.core.dtype import DTYPES
from armillary.machine.machine import here
from armillary.model.device import pick_device
from armillary.model.transformer import Transformer, build
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, recipe_from_dict, to_dict
from armillary.spec.toml.fields import to_plain
from armillary.store.gauges import GaugeWriter
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from tests.planted.problem import Wish
from tests.planted.train_small import free_name

_NAP_S = 0.0005
VOCAB = 1024


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request and when it comes, in seconds from the beginning."""

    request: Request
    at_s: float = 0.0


def serving_recipe(wish: Wish, tables: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """A small model, 256 wide at size 1, served as the tables say."""
    heads = max(2, 2 * round(4 * wish.size))
    base: dict[str, dict[str, Any]] = {
        "model": {
            "name": "armillary-2m",
            "num_layers": 4,
            "hidden": 32 * heads,
            "heads": heads,
            "head_dim": 32,
            "kv_heads": heads // 2,
            "ffn": 96 * heads,
            "vocab": VOCAB,
            "context": 4096,
        },
        "layout": {"precision": "bf16"},
        "serve": {"max_model_len": 2048, "max_running": 16, "prefill_tokens": 256},
    }
    return recipe_from_dict({name: base.get(name, {}) | dict(tables.get(name, {})) for name in base | dict(tables)})


def serve_small(
    wish: Wish, home: Home, arrivals: Sequence[Arrival], *, device: str = "cpu", **tables: Mapping[str, Any]
) -> Path:
    """Serve what arrives and leave a run folder."""
    return serve_recipe(serving_recipe(wish, tables), home, arrivals, seed=wish.seed, device=device).folder


def serve_recipe(
    recipe: Recipe,
    home: Home,
    arrivals: Sequence[Arrival],
    *,
    seed: int = 0,
    device: str = "cpu",
    model: Transformer | None = None,
) -> Run:
    """As `serve_small`, of a whole recipe; a `model` of its shape that is there already need not be made again."""
    model = model or model_of(recipe, seed, device)
    plan = Plan(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=to_dict(recipe),
        model=model.config,
        cluster=recipe.cluster(here()),
        layout=recipe.layout,
        serve=recipe.serve,
    )
    run = create_run(home, to_dict(recipe), plan=to_plain(plan), model=model.config.name, name=free_name(home))
    with GaugeWriter(run.gauges) as writer:
        engine, _ = make_engine(model, None, recipe.serve, seed=seed, record=writer.write)
        drive(engine, arrivals)
    run.update(state="finished")
    return run


def model_of(recipe: Recipe, seed: int, device: str) -> Transformer:
    """With random weights; what is measured does not depend on their values."""
    return build(recipe.model_config(), dtype=DTYPES[recipe.layout.precision], device=pick_device(device), seed=seed)


def drive(engine: Engine, arrivals: Sequence[Arrival]) -> float:
    """Submit each request when it is due and step until all are answered; the seconds that took."""
    due = sorted(arrivals, key=lambda one: one.at_s)
    begin, sent = engine.loop.clock(), 0
    while sent < len(due) or engine.busy:
        while sent < len(due) and begin + due[sent].at_s <= engine.loop.clock():
            engine.scheduler.submit(due[sent].request, begin + due[sent].at_s)
            sent += 1
        if not engine.busy or (not engine.step() and not engine.scheduler.under_way):
            time.sleep(_NAP_S)
    return engine.loop.clock() - begin


def warm(recipe: Recipe, *, seed: int = 0, device: str = "cpu", model: Transformer | None = None) -> None:
    """Whatever a process does only once, so that it is in no recorded step."""
    engine, _ = make_engine(model or model_of(recipe, seed, device), None, recipe.serve, seed=seed)
    drive(engine, [Arrival(request=one) for one in fixed(4, tokens_in=64, tokens_out=8, vocab=VOCAB, name="warm")])


def bearable(recipe: Recipe, requests: Sequence[Request], *, seed: int = 0, device: str = "cpu") -> float:
    """Requests a second that an engine of this recipe answers when it always has enough of them."""
    return max(rates(recipe, requests, seed=seed, device=device, times=1))


def rates(
    recipe: Recipe, requests: Sequence[Request], *, seed: int = 0, device: str = "cpu", times: int = 3
) -> list[float]:
    """The same at several moments: a machine that others use bears less at some of them. Too much is too much for the
    best, and a load that is borne is borne at the worst."""
    warm(recipe, seed=seed, device=device)
    model, found = model_of(recipe, seed, device), list[float]()
    for _ in range(times):
        engine, _ = make_engine(model, None, recipe.serve, seed=seed)
        found.append(len(requests) / drive(engine, [Arrival(request=one) for one in requests]))
    return found
