"""`armillary simulate --sweep`: a recipe with several values of its keys, in parallel processes or on Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from armillary.cli.output import Output
from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.units import seconds_text

Gauges = Mapping[str, float]
Column = tuple[str, str, Callable[[float], str]]
"""head, gauge, its text"""
_SERVED: tuple[Column, ...] = (
    ("TTFT p50", "ttft_p50_s", seconds_text),
    ("p99", "ttft_p99_s", seconds_text),
    ("ITL p50", "itl_p50_s", seconds_text),
    ("p99", "itl_p99_s", seconds_text),
    ("tokens/s", "tokens_out_per_s", "{:,.0f}".format),
    ("objectives met", "slo_met_fraction", "{:.2%}".format),
    ("$/M tokens", "usd_per_million_tokens_out", "{:.3g}".format),
)
_TRAINED: tuple[Column, ...] = (
    ("step", "step_s", seconds_text),
    ("idle stages", "bubble_fraction", "{:.1%}".format),
    ("tokens/s", "tokens_per_s", "{:,.0f}".format),
    ("goodput", "goodput_fraction", "{:.2%}".format),
    ("failures", "failures", "{:.0f}".format),
    ("cost", "usd", "${:,.0f}".format),
)


def sweep(
    out: Output,
    home: Home,
    recipe: Path | None,
    run: str | None,
    purpose: str,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    ray: str | None,
) -> None:
    """A row per setting."""
    from armillary.planning.simulation.sweep import settings_of, swept

    settings = settings_of(sweeps)
    run_setting = partial(simulate_setting, home, recipe, run, purpose, overrides)
    columns = _SERVED if purpose == "serve" else _TRAINED
    rows: list[list[str | None]] = []
    answers: list[dict[str, Any]] = []
    with out.progress("simulating", total=len(settings), unit="setting") as bar:
        if ray is not None:
            from armillary.cluster.ray.ordered_map import RayMap

            answered = zip(settings, RayMap("" if ray == "auto" else ray)(run_setting, settings), strict=True)
        else:
            answered = swept(run_setting, settings)  # type: ignore[assignment]
        for setting, answer in answered:
            bar.update()
            gauges = answer["gauges"]
            answers.append({"set": list(setting), **answer})
            cells = [text(gauges[name]) if name in gauges else None for _, name, text in columns]
            rows.append([" ".join(setting), *cells])
    out.table("", ["setting", *(head for head, _, _ in columns)], rows)
    judged = 6 if purpose == "serve" else 4
    out.result(answers, quiet=[f"{row[0]} {row[judged]}" for row in rows])


def simulate_setting(
    home: Home, recipe: Path | None, run: str | None, purpose: str, overrides: tuple[str, ...], setting: tuple[str, ...]
) -> dict[str, Any]:
    """One setting of a sweep, in a process of its own."""
    changed = (*overrides, *setting)
    if purpose == "train":
        from armillary.cli.simulate.training_side import simulated_training

        if recipe is None:
            raise BadInput("a training run is simulated from a recipe; give one")
        return {"gauges": dict(simulated_training(home, recipe, changed).gauges)}
    from armillary.cli.simulate.simulate import fleet_case_of
    from armillary.planning.simulation.curve_outcome import outcome_of

    case, _, _ = fleet_case_of(home, recipe, run, changed)
    return outcome_of(case).plain()
