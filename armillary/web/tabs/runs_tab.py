"""The tab Runs: live and past runs of training and of servers, one or two side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from urllib.parse import urlencode

from armillary.errors import ArmillaryError
from armillary.report.bars import shares
from armillary.report.charts import lines
from armillary.report.page import scrolling, section, side_by_side, table
from armillary.store.gauges import columns
from armillary.store.goodput import account_of_run
from armillary.store.home import Home
from armillary.store.runs import Run, find_run, list_runs
from armillary.units import ago_text, bytes_text, scaled, seconds_text
from armillary.web.form import Field, Query, View

NO_RUNS = "<p>There is no run yet: <code>armillary train recipes/tour.toml</code> starts one.</p>"
REFRESH_S, IDLE_REFRESH_S = 2.0, 5.0
"""seconds between looks at a live run, and at finished ones: another may begin"""
SHOWN_RUNS = 50
CHARTS: Sequence[tuple[str, str, Callable[[float], str]]] = (
    ("loss", "Loss", lambda value: f"{value:.3g}"),
    ("tokens_per_s", "Tokens per second", scaled),
    ("mfu", "MFU", lambda value: f"{value:.1%}"),
    ("memory_bytes", "Device memory", bytes_text),
    ("expert_load_max_over_mean", "Busiest expert over the mean", lambda value: f"{value:.2f}"),
    ("running", "Running requests", lambda value: f"{value:g}"),
    ("waiting", "Waiting requests", lambda value: f"{value:g}"),
    ("kv_used_fraction", "KV cache in use", lambda value: f"{value:.1%}"),
    ("engine_step_s", "Engine step", seconds_text),
)
"""of training runs, and of servers"""
PARTS = ("compute_s", "comm_exposed_s", "bubble_s", "data_wait_s", "overhead_s")
COLOURS = ("useful", "comm_exposed", "inefficiency", "launch_gap", "idle")
RECENT = 20
"""steps whose mean is the step budget"""


def run_names(home: Home) -> list[str]:
    return [run.id for run in list_runs(home)[:SHOWN_RUNS]]


def newest(known: Sequence[Run]) -> Run:
    """The newest run that goes on or measured something; one that failed before it began shows nothing."""
    return next((run for run in known if run.progress.is_running or run.gauges.is_file()), known[0])


def fields(query: Query, home: Home) -> list[Field]:
    names = run_names(home)
    return [
        Field(name="run", label="Run", hint="the newest", suggestions=names, wide=True),
        Field(name="other", label="Compared with", hint="another run", suggestions=names, wide=True),
    ]


def view(query: Query, home: Home) -> View:
    known = list_runs(home)
    if not known:
        return View(html=section("Runs", NO_RUNS), refresh_s=IDLE_REFRESH_S)
    errors: dict[str, str] = {}
    picked = [run for name in ("run", "other") if (run := _picked(query, name, home, known, errors))]
    if errors:
        return View(errors=errors)
    facts = side_by_side(*(_facts(run) for run in picked))
    html = _charts(picked) + facts + section("All runs", _list(known, picked))
    live = any(run.state.is_running for run in picked)
    return View(html=html, refresh_s=REFRESH_S if live else IDLE_REFRESH_S)


def _picked(query: Query, name: str, home: Home, known: Sequence[Run], errors: dict[str, str]) -> Run | None:
    text = query.get(name, "").strip()
    if not text:
        return newest(known) if name == "run" else None
    try:
        return find_run(home, text)
    except ArmillaryError as error:
        errors[name] = str(error)
        return None


def _list(known: Sequence[Run], picked: Sequence[Run]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("run", "model", "state", "step", "loss", "started", "compare"))
    rows = []
    for run in known[:SHOWN_RUNS]:
        state = run.progress
        loss = f"{state.loss:.3f}" if state.loss is not None else "–"
        compare = urlencode({"tab": "runs", "run": picked[0].id if picked else run.id, "other": run.id})
        started = ago_text(state.started, time.time()) if state.started else "–"
        texts = (state.model, state.state, state.step_text(), loss, started)
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        rows.append(
            f"<tr><td><a href='?{escape(urlencode({'tab': 'runs', 'run': run.id}))}'>{escape(run.id)}</a></td>{cells}"
            f"<td><a href='?{escape(compare)}' aria-label='compare with {escape(run.name)}'>compare</a></td></tr>"
        )
    return scrolling(f"<table><tr>{heads}</tr>{''.join(rows)}</table>")


def _charts(picked: Sequence[Run]) -> str:
    parts = []
    for gauge, title, text in CHARTS:
        series = [(run.name, points) for run in picked if (points := _points(run, gauge))]
        chart = lines(series, label=f"{title} over steps", x_name="steps", y_text=text)
        parts.append(section(title, chart))
    return "".join(parts)


def _points(run: Run, gauge: str) -> list[tuple[float, float]]:
    if not run.gauges.is_file():
        return []
    read = columns(run.gauges, ("step", gauge))
    points = zip(read["step"], read[gauge], strict=True)
    return [(float(step), float(value)) for step, value in points if step is not None and _is_number(value)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")


def _facts(run: Run) -> str:
    state = run.progress
    rows = [
        ("model", state.model),
        ("state", state.state + (f": {state.error}" if state.error else "")),
        ("step", state.step_text(" of ")),
    ]
    account = account_of_run(run, now=time.time())
    if account is not None and account.total_s:
        rows.append(("goodput", f"{account.goodput_fraction:.0%}"))
        rows += [(name, f"{seconds_text(seconds)} ({share:.1%})") for name, seconds, share in account.rows() if seconds]
    return section(f"Run {run.id}", _budget(run) + table(("", ""), rows, wide=True))


def _budget(run: Run) -> str:
    """Where the time of the last steps went; empty where no step was split into parts. Waiting for data is measured in
    every step, computing only in those that were profiled: these are taken where there are any."""
    if not run.gauges.is_file():
        return ""
    read = columns(run.gauges, ("step_s", *PARTS))
    split = [
        dict(zip(read, row, strict=True))
        for row in zip(*read.values(), strict=True)
        if _is_number(row[0]) and any(_is_number(part) for part in row[1:])
    ]
    split = ([row for row in split if _is_number(row["compute_s"])] or split)[-RECENT:]
    if not split:
        return ""
    total = sum(row["step_s"] for row in split)
    seconds = {name: sum(row[name] for row in split if _is_number(row[name])) for name in PARTS}
    rest = max(0.0, total - sum(seconds.values()))
    parts = [*zip(seconds.items(), COLOURS, strict=True), (("rest", rest), "unknown")]
    return shares([_share(*part, total, len(split), colour) for part, colour in parts if part[1] > 0])


def _share(gauge: str, seconds: float, total: float, steps: int, colour: str) -> tuple[str, float, str, str, str]:
    name, each = gauge.removesuffix("_s").replace("_", " "), seconds_text(seconds / steps)
    return name, seconds / total, f"var(--{colour})", each, each
