"""The demo's page: complete, alone, every figure on it, and safe with odd names."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from armillary.diagnosis.outcome.prediction_errors import Predicted, predicted_of
from armillary.diagnosis.report.demo_page import page
from armillary.diagnosis.report.demo_report import DemoReport
from tests.diagnosis.demo_reports import made_report
from tests.profiling.report.test_profile_page import Tags


def test_it_is_whole_and_loads_nothing() -> None:
    text = page(made_report())
    tags = Tags(text)
    assert tags.open == [] and "$" not in re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert tags.seen.count("section") == 10


def test_every_plot_is_there() -> None:
    text = page(made_report())
    for label in ("Loss over steps", "Roofline: FLOP/s", "Time to first token", "Inter-token latency", "Levers"):
        assert f"aria-label='{label}" in text, label
    assert "interrupted after step 80, resumed" in text and "class='mark'" in text
    assert "validation <b>3.0%</b>" in text and "together 100.0 %" in text
    assert "lever applied: 4 requests/s offered" in text


def test_every_prediction_is_there() -> None:
    report = made_report()
    text = page(report)
    rows = report.predicted
    assert len(rows) == 9 + 2 + 2 + 2
    for one in rows:
        assert all(f">{cell}<" in text for cell in one.cells()), one
    cells = {one.cells()[1]: one.cells()[2:] for one in rows}
    assert cells["step_s"] == ["190 ms", "200 ms", "−5.0 %"]
    assert cells["tokens_per_s"][1] == "not measured" and cells["model_flops_per_token"][1] == "a count by definition"
    assert cells["bubble_s"][1] == "0 s"  # without a pipeline
    assert cells["batch_tokens"] == ["65,536", "65,536", "exact"] and cells["micro_batches"][2] == "exact"
    assert cells["run_s"][1] == "49 s"  # the pause while it was interrupted counts
    assert cells["mfu"] == ["6.6 %", "6.27 %", "+5.3 %"]  # of the peak that the plan divided by
    assert cells["speed-up of step_s"] == ["1.22 ×", "1.21 ×", "+0.8 %"]
    assert cells["ttft_p50_s"][1] != "not measured"  # the clients measured it


def test_the_service_is_shown_with_its_promotion() -> None:
    text = page(made_report())
    for said in (
        "23 requests",
        "17 requests",
        "demo:2 was promoted over demo:1",
        "40 requests, 0 failed",
        "3.1 ms (p99)",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    "found",
    [
        DemoReport(title="x", created="now"),
        made_report(profile=None, served_after=None, pulled=(), service=None),
        made_report(diagnoses=(), pulled=(), served=None, served_after=None),
        made_report(training=None, records=(), stops=()),
    ],
)
def test_a_turn_that_was_cut_short_has_a_page(found: DemoReport) -> None:
    assert Tags(page(found)).open == []


def test_without_a_diagnosis_the_profile_tells_the_budget() -> None:
    text = page(made_report(diagnoses=()))
    assert "in one process" in text and "launch gaps <b>26.0%</b>" in text


def test_names_cannot_break_out() -> None:
    nasty = "<script>alert(1)</script>'\"&"
    first, *others = made_report().diagnoses
    report = made_report(title=nasty, notes=(nasty,), diagnoses=(replace(first, headline=nasty), *others))
    assert "<script>" not in page(report) and Tags(page(report)).open == []


def test_a_figure_beside_its_prediction() -> None:
    assert Predicted(of="t", gauge="step_s", predicted=0.0, measured=0.0).error == 0
    assert Predicted(of="t", gauge="step_s", predicted=0.1).error is None
    assert Predicted(of="t", gauge="comm_s", predicted=2e-5, measured=1e-5).cells()[-1] == "–"  # too short to judge
    counted = Predicted(of="t", gauge="batch_tokens", predicted=2048, measured=2048)
    assert counted.cells()[2:] == ["2,048", "2,048", "exact"]
    training = made_report().training
    assert training is not None and predicted_of(replace(training, plan=None), "training") == ()
