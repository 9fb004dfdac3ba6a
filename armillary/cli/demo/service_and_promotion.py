"""Stage 8 of the demo: the trained model as a service, from the registry, behind a gateway, on two replicas; another
release is promoted while requests arrive."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

from armillary.cli.demo.serve_and_load import load, running
from armillary.cli.demo.state import DemoState
from armillary.cli.up import ALIAS
from armillary.diagnosis.report.demo_report import Service
from armillary.errors import ArmillaryError
from armillary.fleet.autoscale.replica_metrics import ReplicaMetrics, quantile
from armillary.fleet.gateway.keys import KeyFile
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.atomic import write_text
from armillary.store.home import Home
from armillary.store.registry.open_registry import open_registry
from armillary.store.registry.release import Release
from armillary.store.runs import Run
from armillary.units import seconds_text

NAME, REPLICAS = "demo", 2
LOAD_S, PROMOTED_AT = 12.0, 0.25
"""duration of the load, and the share of it after which the other release is promoted"""
START_S, PROMOTION_S = 90.0, 60.0
"""how long replicas may take to start, and to load another release"""
_POLL_S = 0.2
_ADDED = "armillary_gateway_added_seconds"


def serve(state: DemoState, trained: Run) -> None:
    """Two releases of the trained model, a service of the first, and a promotion of the second under load."""
    about = f"armillary up: registry, gateway, {REPLICAS} replicas; a promotion under load"
    with state.stage("service", about) as say, _key(state.home) as key:
        first, second = _releases(state, trained)
        file = trained.folder / "service.toml"
        write_text(file, to_toml(recipe_of(state)))
        with running(state.home, "up", str(file), "--port", "0", show=state.out) as (url, _):
            _until(lambda: _ready(url, key) == REPLICAS, START_S, "its replicas were not ready")
            service = _under_load(state, url, key, first, second)
        state.update(service=service)
        counts = " and ".join(f"{requests}" for _, requests in service.replicas)
        text = (
            f"{counts} requests on {REPLICAS} replicas, {service.load.last.failed} failed while {second.text} took over"
        )
        if service.added_p50_s is not None:
            text += f"; {seconds_text(service.added_p50_s)} in the gateway"
        state.out.say(text)
        say(text)


def recipe_of(state: DemoState) -> Recipe:
    """The demo's recipe with the server's lever applied, for two replicas. What the first server found out (dtype,
    threads) is not probed again by each of them; they share the cores."""
    served = state.report.served
    plan = served.reading.plan if served is not None else None
    known: dict[str, Any] = {}
    if plan is not None and plan.serve is not None:
        known = {"dtype": plan.layout.precision}
        if plan.serve.threads:
            known["threads"] = max(1, plan.serve.threads // REPLICAS)
    recipe = state.recipe
    return replace(
        recipe,
        model=replace(recipe.model, name="", path=f"registry:{NAME}@{ALIAS}"),
        serve=replace(recipe.serve, name=NAME, prefix_cache=True, registry_poll_s=0.5, **known),
        fleet=replace(recipe.fleet, replicas=REPLICAS),
    )


def _releases(state: DemoState, trained: Run) -> tuple[Release, Release]:
    """The same weights twice: the second notes their held-out loss, as after an evaluation."""
    store, folder = open_registry(state.home), trained.latest_export()
    if folder is None:
        raise ArmillaryError(f"run {trained.name} has no export; try armillary convert {trained.name} FOLDER")
    losses = [record["val_loss"] for record in state.report.records if "val_loss" in record]
    first = store.push(NAME, folder, run=trained.id, note="by armillary demo")
    store.promote(first.text, ALIAS)
    evals = {"held_out_loss": float(losses[-1])} if losses else {}
    return first, store.push(NAME, folder, run=trained.id, note="by armillary demo, evaluated", evals=evals)


def _under_load(state: DemoState, url: str, key: str, first: Release, second: Release) -> Service:
    began: list[float] = []

    def promote() -> None:
        began.append(time.monotonic())
        open_registry(state.home).promote(second.text, ALIAS)

    traffic = replace(state.recipe.traffic, duration_s=min(LOAD_S, state.recipe.traffic.duration_s))
    timer = Timer(PROMOTED_AT * traffic.duration_s, promote)
    timer.start()
    try:
        report = load(state, url, traffic, key=key)
    finally:
        timer.join()
    logs = state.home.work / "services" / NAME / "replicas"
    _until(lambda: _serving(logs, second) == REPLICAS, PROMOTION_S, f"{second.text} was not loaded by all replicas")
    promoted_s = time.monotonic() - began[0]
    added = ReplicaMetrics(_get(f"{url}/metrics", key)).buckets.get(_ADDED, {})
    replicas = json.loads(_get(f"{url}/service.json", key))["replicas"]
    return Service(
        replicas=tuple((str(each["name"]), int(each["requests"])) for each in replicas),
        releases=(first.text, second.text),
        promoted_s=promoted_s,
        added_p50_s=quantile([added], 0.5),
        added_p99_s=quantile([added], 0.99),
        load=report,
    )


def _ready(url: str, key: str) -> int:
    replicas = json.loads(_get(f"{url}/service.json", key))["replicas"]
    return sum(each["healthy"] and each["state"] == "ready" for each in replicas)


def _serving(logs: Path, release: Release) -> int:
    """Replicas whose log says that they serve a release."""
    present = [path for path in logs.glob("*.json") if path.stem.startswith("replica-")]
    return sum(f"serving {release.text}" in path.with_suffix(".log").read_text(errors="replace") for path in present)


def _until(check: Callable[[], bool], seconds: float, problem: str) -> None:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            raise ArmillaryError(f"{problem} after {seconds:g} s; the logs are in services/{NAME}/replicas")
        time.sleep(_POLL_S)


def _get(url: str, key: str) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
        return str(answer.read().decode())


@contextmanager
def _key(home: Home) -> Iterator[str]:
    """A key for the stage, where this home's gateways need one."""
    keys = KeyFile(home.work / "gateway" / "keys.json")
    if not keys.read():
        yield ""
        return
    key, secret = keys.add("demo", scopes=("inference", "metrics"))
    try:
        yield secret
    finally:
        keys.revoke(key.id)
