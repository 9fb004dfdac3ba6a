"""`armillary simulate`: a recipe, a sweep, a page, a trace; a service's file with [gateway] is taken too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from armillary.cli.simulate.simulate import simulate
from armillary.errors import BadInput
from armillary.fleet.autoscale.decision_log import AutoscalerStart, Logged, append
from armillary.fleet.autoscale.policy import Autoscaler
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.fleet.autoscale.signals import Signals
from armillary.spec.tables.fleet import Autoscale

RECIPE = """
[model]
name = "qwen3-0.6b"
[hardware]
on = "h200"
[traffic]
requests_per_s = 6
tokens_in = 200
tokens_out = 20
duration_s = 4
[objective]
ttft_p99_s = 1.0
[gateway]
retries = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "service.toml"
    file.write_text(RECIPE)
    return file


def run(tmp_path: Path, *args: str) -> dict[str, object]:
    result = CliRunner().invoke(simulate, [*args, "--json", "--home", str(tmp_path / "home")])
    assert result.exit_code == 0, result.output
    answer: dict[str, object] = json.loads(result.stdout[result.stdout.index("{") :])
    return answer


def test_a_recipe(tmp_path: Path, recipe: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    answer = run(tmp_path, str(recipe), "--set", "fleet.replicas=2", "--page", str(page), "--trace", str(trace))
    gauges = answer["gauges"]
    assert isinstance(gauges, dict) and gauges["slo_met_fraction"] == 1.0 and 0 < gauges["ttft_p50_s"] < 0.2
    assert gauges["replicas"] == pytest.approx(2.0) and gauges["usd"] > 0
    assert "Latency" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    begins = [event for event in events if event["ph"] == "b"]
    assert len(begins) == 3 * answer["requests"] and {event["pid"] for event in begins} == {1, 2}  # type: ignore[operator]


def test_a_sweep_is_the_same_as_its_parts(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.planning.simulation.sweep.usable_cores", lambda: 1)
    result = CliRunner().invoke(simulate, [str(recipe), "--sweep", "serve.max_running=1,64", "--json"])
    assert result.exit_code == 0, result.output
    few, many = json.loads(result.stdout[result.stdout.index("[") :])
    assert few["set"] == ["serve.max_running=1"] and few["gauges"]["ttft_p99_s"] > many["gauges"]["ttft_p99_s"]
    alone = run(tmp_path, str(recipe), "--set", "serve.max_running=64")
    assert alone["gauges"] == many["gauges"]


def test_what_cannot_be_simulated_is_said_in_a_line(recipe: Path) -> None:
    for args, words in ((["--sweep", "serve.max_running=4"], "two values"), ([], "give a recipe")):
        result = CliRunner().invoke(simulate, [*([str(recipe)] if args else []), *args])
        assert result.exit_code != 0 and words in str(result.exception)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("traffic.duration_s=0.01", "no request to simulate; raise traffic.duration_s"),
        ("traffic.long_requests_per_s=1 fleet.prefill_replicas=1 fleet.replicas=0", "needs replicas that decode"),
        ("traffic.long_requests_per_s=1 load.trace=azure.csv", "load.trace or traffic.long_requests_per_s out"),
        ("traffic.long_requests_per_s=1 traffic.long_tokens_in=50000", "shorten traffic.long_tokens_in"),
    ],
)
def test_settings_that_cannot_be_simulated(tmp_path: Path, recipe: Path, setting: str, words: str) -> None:
    overrides = [part for each in setting.split() for part in ("--set", each)]
    result = CliRunner().invoke(simulate, [str(recipe), *overrides, "--home", str(tmp_path / "home")])
    assert isinstance(result.exception, BadInput) and words in str(result.exception)


def test_an_autoscalers_log_is_decided_again(tmp_path: Path) -> None:
    log, limits = tmp_path / "decisions.jsonl", Limits(requests_per_s=10.0, in_flight=8.0)
    settings = Autoscale(max_replicas=8, cooldown_s=10.0, stable_window_s=10.0)
    scaler, replicas = Autoscaler(settings, limits, start_s=0.0), 1
    append(log, AutoscalerStart(settings=settings, limits=limits, start_s=0.0))
    for second in range(0, 200, 5):
        signals = Signals(now=float(second), ready=replicas, arrived_per_s=30.0 if second < 100 else 5.0)
        decision = scaler.decide(signals)
        append(log, Logged(signals=signals, decision=decision))
        replicas = decision.replicas
    assert replicas == 1
    same = run(tmp_path, "--replay", str(log))
    assert same["different"] == 0 and len(same["decisions"]) == 40  # type: ignore[arg-type]
    fewer = run(tmp_path, "--replay", str(log), "--set", "autoscale.max_replicas=2")
    assert fewer["different"] > 10  # type: ignore[operator]
    refused = CliRunner().invoke(simulate, ["--replay", str(log), "--set", "serve.max_running=4"])
    assert "other keys of [autoscale]" in str(refused.exception)


@pytest.mark.slow
def test_a_large_fleet_comes_from_curves(tmp_path: Path, recipe: Path) -> None:
    few = ("--set", "fleet.simulate=curve", "--set", "fleet.replicas=40", "--set", "traffic.requests_per_s=200")
    page = tmp_path / "page.html"
    answer = run(tmp_path, str(recipe), *few, "--page", str(page))
    assert answer["gauges"]["replicas"] == pytest.approx(40.0)  # type: ignore[index]
    assert "Distribution of TTFT" in page.read_text()
    refused = CliRunner().invoke(simulate, [str(recipe), *few, "--trace", str(tmp_path / "trace.json")])
    assert "leave --trace out" in str(refused.exception)
