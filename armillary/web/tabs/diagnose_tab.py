"""The tab Diagnose: which loop limits a run, on what evidence, what each lever would gain, and the changed recipe."""

from __future__ import annotations

from html import escape
from urllib.parse import urlencode

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import evidence_text
from armillary.diagnosis.levers.apply import changed_recipe
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.outcome.track_record import read_record
from armillary.diagnosis.readings.run_folder import read_run
from armillary.errors import ArmillaryError, BadInput
from armillary.report.page import items, section, table
from armillary.store.home import Home
from armillary.store.runs import Run, find_run, list_runs
from armillary.web.form import Field, Query, View, value_of
from armillary.web.tabs.runs_tab import NO_RUNS

RUN = Field(name="run", label="Run", hint="the newest")


def fields(query: Query) -> list[Field]:
    return [RUN]


def view(query: Query, home: Home) -> View:
    known = list_runs(home)
    if not known:
        return View(html=section("Diagnose", NO_RUNS))
    try:
        run = _run(query, home)
        diagnosis = diagnose(read_run(run, home), home)
    except ArmillaryError as error:
        return View(errors={"run": str(error)})
    return View(html=_verdict(run, diagnosis) + _levers(run, diagnosis) + _record(home))


def _run(query: Query, home: Home) -> Run:
    name = value_of(query, RUN)
    if name:
        return find_run(home, name)
    known = list_runs(home)
    if not known:
        raise BadInput("there is no run; armillary train starts one")
    return known[0]


def _verdict(run: Run, diagnosis: Diagnosis) -> str:
    causes = [f"{finding.loop} loop: {finding.says}" for finding in diagnosis.findings]
    evidence = [evidence_text(each) for finding in diagnosis.findings[:1] for each in finding.evidence]
    budget = [f"{part.replace('_', ' ')} {share:.0%}" for part, share in diagnosis.budget.items() if share >= 0.01]
    inside = f"<p><b>{escape(diagnosis.headline)}</b></p>"
    for title, texts in (("Findings", causes), ("Evidence", evidence), ("Time", budget), ("Notes", diagnosis.notes)):
        inside += f"<h3>{title}</h3>{items(texts)}" if texts else ""
    return section(f"Run {run.id}", inside)


def _levers(run: Run, diagnosis: Diagnosis) -> str:
    heads = "".join(f"<th>{head}</th>" for head in ("", "lever", "predicted", "risk", "change", "recipe"))
    rows = []
    for number, lever in enumerate(diagnosis.levers, 1):
        cells = (str(number), lever.title, lever.gain_text, lever.risk, lever.sets or lever.action)
        link = "–"
        if lever.change:
            query = urlencode({"run": run.id, "lever": number})
            link = f"<a class='button' download href='recipe?{escape(query)}'>changed recipe</a>"
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f"<td>{link}</td></tr>")
    if not rows:
        return ""
    return section("Levers", f"<div class='scroll'><table class='wide'><tr>{heads}</tr>{''.join(rows)}</table></div>")


def _record(home: Home) -> str:
    record = read_record(home)
    rows = [
        [
            line.run,
            line.title,
            f"{line.predicted:.2f} ×",
            f"{line.obtained:.2f} ×" if line.obtained is not None else "–",
        ]
        for line in record.levers
    ]
    return section("Track record", table(("run", "lever", "predicted", "obtained"), rows, wide=True) if rows else "")


def recipe(query: Query, home: Home) -> tuple[str, bytes]:
    """(file name, bytes) of a run's recipe with one lever applied."""
    run = _run(query, home)
    diagnosis = diagnose(read_run(run, home), home)
    try:
        number = int(query.get("lever", ""))
    except ValueError:
        raise BadInput("lever is a number; the page shows them") from None
    return f"{run.name}.lever{number}.toml", changed_recipe(run, diagnosis.lever(number), diagnosis.kind).encode()
