"""The one sink: for people, as one JSON document, or nearly nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from armillary.cli import progress
from armillary.cli.output import Output, cell_text, json_text

Capture = pytest.CaptureFixture[str]


def speak(out: Output) -> None:
    """What a verb does."""
    out.say("hello")
    out.table("models", ["name", "params"], [["gpt2", 124_439_808], ["llama", None]])
    out.fields("gpt2", [("layers", 12)])
    with out.progress("work", total=2, unit="step") as bar:
        bar.update(1, loss=3.25)
        bar.at(2, 2)
    out.result({"answer": 42}, quiet="42")


def test_people_get_text_and_tables(capsys: Capture) -> None:
    speak(Output("human"))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "hello",
        "models",
        "name        params",
        "gpt2   124,439,808",
        "llama            –",
        "gpt2",
        " layers  12",
    ]


def test_programs_get_exactly_one_json_document(capsys: Capture) -> None:
    speak(Output("json"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"answer": 42}
    assert captured.err == ""


def test_quiet_prints_the_bare_answer(capsys: Capture) -> None:
    speak(Output("quiet"))
    assert capsys.readouterr() == ("42\n", "")


def test_quiet_prints_one_line_an_item(capsys: Capture) -> None:
    Output("quiet").result([1, 2], quiet=["one", "two"])
    assert capsys.readouterr().out == "one\ntwo\n"


@pytest.mark.parametrize("mode", ["human", "json", "quiet"])
def test_warnings_go_to_stderr_in_every_mode(capsys: Capture, mode: str) -> None:
    Output(mode).warn("little memory")  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "warning: little memory\n")


def test_a_verb_answers_once() -> None:
    out = Output("quiet")
    out.result(1)
    with pytest.raises(AssertionError, match="once"):
        out.result(2)


def test_piped_tables_have_no_colour_and_fit_a_hundred_columns(capsys: Capture) -> None:
    Output().table("t", ["name", "text"], [["[red]a[/red]", "word " * 60]])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "[red]a[/red]" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_title_is_not_folded_into_the_width_of_narrow_columns(capsys: Capture) -> None:
    Output().table("starting an operation", ["mode", "time"], [["eager", "3 µs"]])
    Output().fields("what was measured here", [("a", 1)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "starting an operation" and "what was measured here" in lines


def test_text_from_outside_is_not_markup(capsys: Capture) -> None:
    Output().fields("x", [("[bold]", ":smile:")])
    assert "[bold]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (3.14159265, "3.142"),
        (("a", "b"), "a, b"),
        ([], "–"),
    ],
)
def test_cells(value: object, text: str) -> None:
    assert cell_text(value) == text


def test_json_holds_dataclasses_paths_and_nan_as_text() -> None:
    @dataclass
    class Point:
        x: float
        where: Path

    plain = json.loads(json_text([Point(x=float("nan"), where=Path("a/b"))]))
    assert plain == [{"x": "nan", "where": "a/b"}]


# --- progress


def test_a_log_gets_a_line_now_and_then(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Output().progress("train", total=100, unit="step") as bar:
        for _ in range(100):
            now += 0.25
            bar.update(1, loss=2.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "train 8/100 step  loss 2.5  2 s elapsed, about 23 s left",
        "train 48/100 step  loss 2.5  12 s elapsed, about 13 s left",
        "train 88/100 step  loss 2.5  22 s elapsed, about 3 s left",
        "train 100/100 step  loss 2.5  25 s elapsed",
    ]


def test_a_last_line_is_not_said_twice(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Output().progress("train", total=2, unit="step") as bar:
        now += 3
        bar.at(1)
        now += 30
        bar.at(2)
        now += 1
    assert capsys.readouterr().err.splitlines() == ["train 1/2 step  3 s elapsed", "train 2/2 step  33 s elapsed"]


def test_short_work_leaves_no_line_in_a_log(capsys: Capture) -> None:
    with Output().progress("blink", total=1) as bar:
        bar.update()
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_on_stderr_with_live_fields(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    out = Output()
    with out.progress("train", total=10, unit="step") as bar:
        bar.update(4, loss=3.5, speed="11 k tok/s")
        out.say("checkpoint 4 written")
    captured = capsys.readouterr()
    assert captured.out == "checkpoint 4 written\n"
    assert "4/10 step" in captured.err and "loss 3.5  speed 11 k tok/s" in captured.err


@pytest.mark.parametrize(
    ("done", "total", "unit", "text"),
    [
        (3, 10, "step", "3/10 step"),
        (3, None, "", "3"),
        (1.5e9, 3e9, "B", "1.50 GB of 3.00 GB"),
        (2e6, 4e6, "token", "2.00 M/4.00 M token"),
    ],
)
def test_amounts(done: float, total: float | None, unit: str, text: str) -> None:
    assert progress.amount_text(done, total, unit) == text
