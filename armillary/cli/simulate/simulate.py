"""`armillary simulate`: a service on a virtual clock, with the real scheduler, router and autoscaler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli import completion
from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import moved, set_option, verb
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import seconds_text

if TYPE_CHECKING:
    from armillary.planning.simulation.against_colocated import AgainstColocated
    from armillary.planning.simulation.curve_outcome import Outcome
    from armillary.planning.simulation.fleet_case import FleetCase


@verb
@click.argument("recipe", type=click.Path(path_type=Path), required=False)
@click.option(
    "--from",
    "run",
    metavar="RUN",
    help="Step times, KV cache and settings that a run measured.",
    shell_complete=completion.runs,
)
@click.option(
    "--for", "purpose", type=click.Choice(["serve", "train"]), default="serve", help="What.  [default: serve]"
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="LOG",
    help="An autoscaler's decisions.jsonl, decided again with the recipe's [autoscale].",
)
@click.option("--sweep", "sweeps", multiple=True, metavar="A.B=1,2,4", help="Try several values; repeat to combine.")
@click.option("--ray", metavar="ADDRESS", help="Run a sweep on this Ray cluster; auto for the one that runs here.")
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write a report with plots there (HTML).")
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a Chrome trace there (JSON).")
@set_option
@moved("--replicas", "try --set fleet.replicas=4")
def simulate(
    out: Output,
    home: Home,
    recipe: Path | None,
    run: str | None,
    purpose: str,
    replay: Path | None,
    sweeps: tuple[str, ...],
    ray: str | None,
    page: Path | None,
    trace: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Predict TTFT, ITL, goodput and cost of a service, many times as fast as real time.

    The engine's own scheduler and KV cache decide each step, the gateway's router picks replicas, and with [autoscale]
    the autoscaler its number; only the time of a step is predicted: by the planner, or as --from RUN measured it.
    RECIPE has [traffic] or load.trace (Azure's CSV, Mooncake's JSONL), [fleet], [autoscale], [objective] and [cost].
    With --from alone, the run's own requests are served again, beside what was measured.

    --for train plays a training run through: the passes of its pipeline, and weeks with the failures and slow devices
    of [faults], checkpoints and restarts. --replay decides again what an autoscaler has logged, to try another policy
    on the same signals.
    """
    if replay is not None:
        from armillary.cli.simulate.decision_replay import replay_log

        return replay_log(out, replay, recipe, overrides)
    if sweeps:
        from armillary.cli.simulate.sweep_table import sweep

        return sweep(out, home, recipe, run, purpose, overrides, sweeps, ray)
    if purpose == "train":
        from armillary.cli.simulate.training_side import simulate_training

        return simulate_training(out, home, _given(recipe), overrides, page, trace)
    case, title, measured = fleet_case_of(home, recipe, run, overrides)
    from armillary.planning.simulation.curve_outcome import outcome_of

    if trace is not None and case.fleet.simulate == "curve":
        raise BadInput("a fleet that is computed from curves has no single requests to trace; leave --trace out")
    with out.progress("simulating"):
        outcome = outcome_of(case)
        against = _against(outcome)
    _say(out, outcome, title, measured)
    if against is not None:
        out.table("\npredicted, with as many replicas", ["", "disaggregated", "colocated"], against.rows())
        out.fields("", [("disaggregation", against.verdict)])
    _write(out, outcome, title, page, trace)
    answer = {**outcome.plain(), "measured": measured}
    if against is not None:
        answer |= {"colocated": against.colocated.plain(), "disaggregation": against.verdict}
    out.result(answer, quiet=f"{outcome.slo_fraction:.4f}")


def _against(outcome: Outcome) -> AgainstColocated | None:
    """A disaggregated fleet's replicas without pools."""
    from armillary.planning.simulation.against_colocated import against_colocated
    from armillary.planning.simulation.fleet_outcome import FleetOutcome

    if isinstance(outcome, FleetOutcome) and outcome.case.fleet.prefill_replicas:
        return against_colocated(outcome)
    return None


def fleet_case_of(
    home: Home, recipe: Path | None, run: str | None, overrides: tuple[str, ...]
) -> tuple[FleetCase, str, dict[str, float]]:
    """The case, its title, and measured gauges where a run is served again."""
    from armillary.cli.plan.options import find_cluster, model_config
    from armillary.planning.simulation.fleet_case import fleet_case
    from armillary.spec.recipe import load_service_recipe

    if run is not None:
        return _case_of_run(home, recipe, run, overrides)
    asked = load_service_recipe(_given(recipe), overrides)
    config = model_config(Output("quiet"), home, asked)
    return fleet_case(asked, config, find_cluster(asked), home), config.name, {}


def _given(recipe: Path | None) -> Path:
    if recipe is None:
        raise BadInput("give a recipe, or --from RUN; armillary simulate recipes/service.toml is an example")
    return recipe


def _case_of_run(
    home: Home, file: Path | None, name: str, overrides: tuple[str, ...]
) -> tuple[FleetCase, str, dict[str, float]]:
    """Step times and KV cache of a run; its requests too, where there is no recipe."""
    from armillary.diagnosis.readings.run_folder import read_run
    from armillary.planning.simulation.fleet_case import fleet_case
    from armillary.planning.simulation.replayed_requests import recorded
    from armillary.spec.recipe import read_tables, recipe_from_dict
    from armillary.store.runs import find_run

    reading = read_run(find_run(home, name), home)
    plan, cost, kv_tokens = reading.plan, reading.step_cost, reading.get("kv_capacity_tokens")
    if plan is None or cost is None or reading.kind != "serving":
        raise BadInput(f"run {name} has no step times of a server; name one of armillary serve with more requests")
    tables = dict(plan.recipe) if file is None else read_tables(file)
    asked = recipe_from_dict({key: table for key, table in tables.items() if key != "gateway"}, overrides)
    if file is None and plan.serve is not None and not any(text.startswith("serve.") for text in overrides):
        asked = replace(asked, serve=plan.serve)
    arrivals = recorded(reading.requests) if file is None else None
    case = fleet_case(asked, plan.model, plan.cluster, home, cost=cost, kv_tokens=kv_tokens, arrivals=arrivals)
    return case, plan.model.name, {} if file is not None else dict(reading.values)


_COMPARED = (
    "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "tpot_p50_s", "e2e_p50_s", "e2e_p99_s", "tokens_out_per_s",
)  # fmt: skip


def _say(out: Output, outcome: Outcome, title: str, measured: dict[str, float]) -> None:
    from armillary.planning.simulation.simulation_page import latency_rows, rate_rows

    case, run = outcome.case, outcome.run
    out.say(f"{title} · {outcome.requests:,} requests · {case.fleet.policy} · step times: {case.cost.basis}")
    out.table("", ["predicted", "p50", "p90", "p99"], latency_rows(outcome))
    out.fields("", rate_rows(outcome))
    changes = [decision for _, decision in run.decisions if decision.change]
    if changes:
        rows = [[seconds_text(each.now), each.before, each.replicas, each.reason] for each in changes]
        out.table("scaling", ["at", "before", "replicas", "reason"], rows[:20])
    rows = [
        [
            name,
            f"{measured[name]:.4g}",
            f"{outcome.gauges[name]:.4g}",
            f"{outcome.gauges[name] / measured[name] - 1:+.1%}",
        ]
        for name in _COMPARED
        if measured.get(name) and name in outcome.gauges
    ]
    if rows:
        out.table("beside the run", ["gauge", "measured", "simulated", "error"], rows)


def _write(out: Output, outcome: Outcome, title: str, page: Path | None, trace: Path | None) -> None:
    from armillary.planning.simulation.chrome_trace import chrome_trace
    from armillary.planning.simulation.fleet_outcome import FleetOutcome
    from armillary.planning.simulation.simulation_page import page as document
    from armillary.store.atomic import write_text

    if page is not None:
        write_text(page, document(outcome, title))
        out.say(f"wrote {path_text(page)}")
    if trace is not None:
        assert isinstance(outcome, FleetOutcome), "curves have none"
        write_text(trace, json.dumps(chrome_trace(outcome.run)))
        out.say(f"wrote {path_text(trace)}: open it in https://ui.perfetto.dev")
