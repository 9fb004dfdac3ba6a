"""`armillary report`: documents of a recipe, a plan and a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.store.gauges import GaugeWriter
from armillary.store.home import Home
from armillary.store.runs import create_run

Cli = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nname = "llama-3-8b"\n[hardware]\non = "h100x8"\n[layout]\ndp = 8\nzero = 3\n'
        '[train]\nsequence = 4096\nbatch_tokens = 1_048_576\nsteps = 500\n[report]\ncompany = "<b>ACME</b>"\n'
    )
    return path


def test_a_recipe_in_two_formats(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    asked = ("report", str(recipe), "--to", "md,html", "--out", str(tmp_path / "out"), "--json")
    answer = cli(*asked).json
    assert [Path(path).suffix for path in answer["files"]] == [".md", ".html"]
    planned = cli("plan", str(recipe), "--json").json["plan"]["predicted"]
    assert answer["figures"]["run_cost"]["value"] == pytest.approx(planned["run_usd"])
    text = Path(answer["files"][0]).read_text()
    assert text.startswith("# Infrastructure plan: training llama-3-8b") and "&lt;b&gt;ACME&lt;/b&gt;" in text
    cheaper = cli(*asked, "--set", "cost.usd_per_device_hour=1").json
    assert cheaper["figures"]["run_cost"]["value"] < answer["figures"]["run_cost"]["value"]


def test_a_model_on_devices_is_what_plan_plans(cli: Cli, tmp_path: Path) -> None:
    asked = ("--model", "llama-3-8b", "--on", "h100x8")
    out = ("--to", "md", "--out", str(tmp_path), "--json")
    trained = cli("report", *asked, *out).json
    planned = cli("plan", *asked, "--json").json["plan"]["predicted"]
    assert trained["figures"]["run_cost"]["value"] == pytest.approx(planned["run_usd"])
    served = cli("report", *asked, "--for", "serve", *out).json
    serving = cli("plan", *asked, "--for", "serve", "--json").json["predicted"]
    assert served["figures"]["serving_devices"]["value"] == serving["devices"]


@pytest.mark.parametrize("args", [(), ("job.toml", "--model", "gpt2"), ("job.toml", "--on", "h100x8")])
def test_a_report_is_of_one_thing(cli: Cli, args: tuple[str, ...]) -> None:
    ran = cli("report", *args)
    assert ran.code == 2 and "--model" in ran.err and ran.err.count("\n") == 1


def test_a_plan_and_a_run(cli: Cli, home: Home, recipe: Path, tmp_path: Path) -> None:
    printed = cli("plan", str(recipe), "--json")
    (tmp_path / "plan.json").write_text(printed.out)
    out = ("--to", "md", "--out", str(tmp_path / "out"))
    answer = cli("report", str(tmp_path / "plan.json"), *out, "--set", "report.company=Example", "--json").json
    assert answer["figures"]["run_cost"]["value"] == pytest.approx(printed.json["plan"]["predicted"]["run_usd"])
    plan = printed.json["plan"]
    run = create_run(home, plan["recipe"], model="llama-3-8b", steps=500)
    run.plan.write_text(json.dumps(plan))
    step_s = plan["predicted"]["step_s"]
    with GaugeWriter(run.gauges) as writer:
        for step in range(8):
            writer.write({"step_s": step_s * 1.25, "loss": 2.0, "tokens_total": step * 1_048_576}, step=step)
    done = cli("report", run.name, *out)
    assert done.code == 0, done.err
    text = next(path for path in (tmp_path / "out").glob("*run*.md")).read_text()
    assert ("Measured next to planned" in text and "−20.0 %" in text) or "-20.0 %" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--to", "odt"), "no format 'odt'; it takes docx"),
        (("--to", "md", "--set", "report.logo=missing.png", "--to", "docx"), "no logo 'missing.png'"),
        (("--to", "pptx", "--set", "report.template=house.doc"), "report.template takes .docx, .pptx, .typ"),
        (("--to", "docx", "--set", "report.template=no.docx"), "no template 'no.docx'"),
        (("--to", "md", "--set", "report.curency=EUR"), "did you mean currency"),
    ],
)
def test_bad_options_are_one_line(cli: Cli, recipe: Path, tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    ran = cli("report", str(recipe), "--out", str(tmp_path / "out"), *args)
    assert ran.code == 2 and says in ran.err.splitlines()[-1] and "Traceback" not in ran.err


def test_a_plan_is_not_changed(cli: Cli, tmp_path: Path) -> None:
    ran = cli("report", str(tmp_path / "plan.json"), "--set", "layout.tp=2")
    assert ran.code == 2 and "would make another plan" in ran.err
    assert "no run" in cli("report", "quiet-otter").err
