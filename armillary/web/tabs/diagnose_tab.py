"""The tab Diagnose: which loop limits a run, on what evidence, what each lever would gain, and the changed recipe: to
download, and where the page may write, as a file."""

from __future__ import annotations

from html import escape
from pathlib import Path
from urllib.parse import urlencode

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import evidence_text
from armillary.diagnosis.levers.apply import changed_recipe
from armillary.diagnosis.outcome.apply_lever import apply_lever, recipe_name
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.outcome.track_record import read_record
from armillary.diagnosis.readings.run_folder import read_run
from armillary.errors import ArmillaryError, BadInput
from armillary.report.page import items, scrolling, section, table
from armillary.store.home import Home
from armillary.store.runs import Run, find_run, list_runs
from armillary.web.form import Field, Query, View
from armillary.web.tabs.runs_tab import NO_RUNS, newest, run_names


class DiagnoseTab:
    """Diagnoses runs; `folder` is where changed recipes are written, None where the page is read-only."""

    def __init__(self, *, folder: Path | None = None, csrf: str = "") -> None:
        self.folder, self.csrf = folder, csrf

    def fields(self, query: Query, home: Home) -> list[Field]:
        return [Field(name="run", label="Run", hint="the newest", suggestions=run_names(home), wide=True)]

    def view(self, query: Query, home: Home) -> View:
        if not list_runs(home):
            return View(html=section("Diagnose", NO_RUNS))
        try:
            run = _run(query, home)
            diagnosis = diagnose(read_run(run, home), home)
        except ArmillaryError as error:
            return View(errors={"run": str(error)})
        return View(html=_verdict(run, diagnosis) + self._levers(run, diagnosis) + _record(home))

    def _levers(self, run: Run, diagnosis: Diagnosis) -> str:
        heads = "".join(f"<th>{head}</th>" for head in ("lever", "predicted", "risk", "change", "recipe"))
        rows = []
        for number, lever in enumerate(diagnosis.levers, 1):
            cells = (f"{number}. {lever.title}", lever.gain_text, lever.risk, lever.sets or lever.action)
            recipe = self._recipe(run, number) if lever.change else "–"
            rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + f"<td>{recipe}</td></tr>")
        return (
            section("Levers", scrolling(f"<table class='wide'><tr>{heads}</tr>{''.join(rows)}</table>")) if rows else ""
        )

    def _recipe(self, run: Run, number: int) -> str:
        """The changed recipe: a link, and a button that writes it where the page may."""
        query = urlencode({"run": run.id, "lever": number})
        name = f"changed recipe of lever {number}"
        link = f"<a class='button' download aria-label='{name}' href='recipe?{escape(query)}'>download</a>"
        if self.folder is None:
            return link
        path = self.folder / recipe_name(run, number)
        if path.is_file():
            return f"{link} <span class='note'>written: {escape(path.name)}</span>"
        hidden = "".join(
            f"<input type='hidden' name='{key}' value='{escape(value, quote=True)}'>"
            for key, value in (("csrf", self.csrf), ("run", run.id), ("lever", str(number)))
        )
        button = f"<button aria-label='Write the {name}'>write</button>"
        return f"{link} <form class='inline' method='post' action='recipe'>{hidden}{button}</form>"

    def write(self, query: Query, home: Home) -> str:
        """Write a changed recipe into the folder; the run's id."""
        if self.folder is None:
            raise BadInput("this page is read-only; start it with armillary web --write")
        run = _run(query, home)
        diagnosis, number = diagnose(read_run(run, home), home), _number(query)
        path = self.folder / recipe_name(run, number)
        if path.exists():
            raise BadInput(f"{path.name} exists; move it away first")
        apply_lever(home, diagnosis, run, number, path)
        return run.id


def _run(query: Query, home: Home) -> Run:
    if name := query.get("run", "").strip():
        return find_run(home, name)
    known = list_runs(home)
    if not known:
        raise BadInput("there is no run; armillary train starts one")
    return newest(known)


def _verdict(run: Run, diagnosis: Diagnosis) -> str:
    causes = [f"{finding.loop} loop: {finding.says}" for finding in diagnosis.findings]
    evidence = [evidence_text(each) for finding in diagnosis.findings[:1] for each in finding.evidence]
    budget = [f"{part.replace('_', ' ')} {share:.0%}" for part, share in diagnosis.budget.items() if share >= 0.01]
    inside = f"<p><b>{escape(diagnosis.headline)}</b></p>"
    for title, texts in (("Findings", causes), ("Evidence", evidence), ("Time", budget), ("Notes", diagnosis.notes)):
        inside += f"<h3>{title}</h3>{items(texts)}" if texts else ""
    return section(f"Run {run.id}", inside)


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
    run, number = _run(query, home), _number(query)
    diagnosis = diagnose(read_run(run, home), home)
    return recipe_name(run, number), changed_recipe(run, diagnosis.lever(number), diagnosis.kind).encode()


def _number(query: Query) -> int:
    try:
        return int(query.get("lever", ""))
    except ValueError:
        raise BadInput("lever is a number; the page shows them") from None
