"""armillary diagnose: the verdict as people and programs read it, levers applied, runs compared."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.cli.diagnose import _flags, _run_of, follow
from armillary.cli.output import Output
from armillary.diagnosis.outcome.diagnosis import read_diagnosis
from armillary.diagnosis.outcome.track_record import path_of
from armillary.diagnosis.readings.reading import Reading
from armillary.machine.machine import here
from armillary.spec.recipe import load_recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import list_runs
from tests.diagnosis.served import requests, served, served_run, write_served
from tests.diagnosis.trained import plan_of, run_of

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def a_run(home: Home) -> None:
    run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)


def after(home: Home) -> None:
    run_of(home, plan_of("data.workers=3"), name="bold-heron", step_s=0.55)


def test_the_verdict_in_words(cli: Cli, home: Home) -> None:
    said = cli("diagnose", "quiet-otter").out
    assert said.startswith("inner loop limits this run · every step waits 500 ms of 1 s for its batch")
    assert "  evidence    data wait 50%" in said
    assert "loader workers 0 → 3" in said and "predicted 2.00 ×" in said and "--set data.workers=3" in said
    assert said.rstrip().endswith("apply: armillary diagnose quiet-otter --apply 1")
    assert read_diagnosis(next(home.runs.glob("*quiet-otter"))).cause == "data_starvation"


def test_the_verdict_for_programs(cli: Cli, home: Home) -> None:
    after(home)
    answer = cli("diagnose", "quiet-otter", "--json").json
    assert (answer["loop"], answer["cause"]) == ("inner", "data_starvation")
    assert answer["levers"][0]["change"] == {"data.workers": 3}
    assert cli("diagnose", "quiet-otter", "--quiet").out == "inner data_starvation\n"
    assert cli("diagnose", "bold-heron", "--quiet").out == "healthy\n"


def test_gauges_alone_are_judged_and_nothing_is_offered_to_apply(cli: Cli, home: Home, tmp_path: Path) -> None:
    alone = tmp_path / "gauges.jsonl"
    alone.write_bytes(next(home.runs.glob("*quiet-otter")).joinpath("gauges.jsonl").read_bytes())
    said = cli("diagnose", str(alone)).out
    assert said.startswith("inner loop limits this run") and "apply:" not in said and "num_workers" in said


def test_too_little_is_not_called_healthy(cli: Cli, tmp_path: Path) -> None:
    few = tmp_path / "gauges.jsonl"
    few.write_text('{"time":1,"step":0,"step_s":1.0}\n')
    assert cli("diagnose", str(few)).out.startswith("cannot be judged: ")
    assert cli("diagnose", str(few), "--quiet").out == "cannot be judged\n"


def test_a_lever_is_applied_and_held_to_its_word(cli: Cli, home: Home, tmp_path: Path) -> None:
    said = cli("diagnose", "quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml")).out
    assert "predicted 2.00 ×" in said
    words = command(said)
    assert words[0] == "train" and load_recipe(recipe_of(words)).data.workers == 3
    after(home)
    said = cli("diagnose", "compare", "quiet-otter", "bold-heron").out
    assert "step 1 s → 550 ms   obtained 1.82 ×   predicted 2.00 ×   (track record: 1 lever, median error 9%)" in said
    assert "changed: data.workers=3" in said
    said = cli("diagnose", "--track-record").out
    assert "loader workers 0 → 3" in said and "1 lever, median error 9%" in said
    kept = cli("diagnose", "--track-record", "--json").json
    assert kept["levers"][0]["obtained"] == pytest.approx(1 / 0.55)
    assert kept["median_error"] == pytest.approx(1 - 1 / 1.1)


def command(said: str) -> list[str]:
    """The words of the command that is printed to be typed next."""
    *_, first, then = said.splitlines()
    assert then.startswith("then: armillary diagnose compare ") and " NEW_RUN --home " in then
    assert first.startswith("next: armillary ")
    return shlex.split(first.removeprefix("next: armillary "))


def recipe_of(words: list[str]) -> Path:
    """The recipe that the train verb's parser finds in them."""
    from armillary.cli.train.train import train

    return Path(train.make_context("train", words[1:]).params["recipe"])


def stored_model(folder: Path) -> Path:
    """As much of a Hugging Face folder as is looked at before weights are read: fp32, and one file of weights."""
    folder.mkdir()
    shape = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 2048,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.mark.parametrize(
    ("precision", "dtype", "flags"),
    [
        ("fp32", "auto", ["--set", "serve.dtype=fp32"]),  # of fp32 files, too: auto may take bf16 where it is faster
        ("bf16", "fp32", []),  # what a lever sets is not undone
        ("fp8", "auto", []),
    ],
)
def test_a_changed_server_keeps_the_dtype_that_auto_found(precision: str, dtype: str, flags: list[str]) -> None:
    recipe = {"model": {"name": "gpt2"}, "layout": {"precision": precision}, "serve": {"dtype": dtype}}
    assert _flags(recipe_from_dict(recipe)) == flags


def test_a_lever_of_a_server_is_applied_by_the_command_that_is_printed(
    cli: Cli, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of `armillary serve` but the server itself: its recipe is read, its model found, its run begun."""
    monkeypatch.chdir(tmp_path)
    folder, slow = stored_model(tmp_path / "a model"), served(requests(40), max_running=4)
    assert slow.plan is not None
    slow = replace(slow, plan=replace(slow.plan, cluster=here()))  # both on this machine
    served_run(home, slow, name="slow-server", path=str(folder))
    said = cli("diagnose", "slow-server", "--apply", "1").out
    words = command(said)
    assert words[:4] == ["serve", "a model", "--recipe", "slow-server.lever1.toml"]
    assert words[4:6] == ["--set", "serve.dtype=bf16"], "auto may find another one"
    started: list[tuple[Any, Any]] = []
    monkeypatch.setattr("armillary.serving.openai.run_server.serve", lambda *args, **_: started.append(args[:2]))
    monkeypatch.setattr("armillary.profiling.dtypes.choice.check_asked", lambda *_: "")  # however slow bf16 is here
    ran = cli(*words)
    assert ran.code == 0, ran.err
    ((source, orders),) = started
    assert source.folder == folder and orders.serve.max_running > 4 and orders.serve.dtype == "bf16"
    (new,) = [run for run in list_runs(home) if run.name not in ("slow-server", "quiet-otter")]
    write_served(new, served(requests(40), max_running=orders.serve.max_running))
    cli("diagnose", new.name)
    ran = cli("diagnose", "compare", "slow-server", new.name)
    assert f"changed: serve.max_running={orders.serve.max_running}" in ran.out
    assert "(track record: 1 lever, median error " in ran.out and "note:" not in ran.out


def test_a_server_of_made_up_weights_has_no_model_to_name(cli: Cli, home: Home, tmp_path: Path) -> None:
    served_run(home, served(requests(40), max_running=4), name="slow-server")
    said = cli("diagnose", "slow-server", "--apply", "1", "--to", str(tmp_path / "next.toml")).out
    assert command(said)[1] == "MODEL" and "MODEL is the folder with the weights: the run names none" in said


def test_the_gauges_of_a_run_stand_for_it(cli: Cli, home: Home, tmp_path: Path) -> None:
    gauges = next(home.runs.glob("*quiet-otter")) / "gauges.jsonl"
    said = cli("diagnose", str(gauges)).out
    assert said.rstrip().endswith(f"apply: armillary diagnose {gauges} --apply 1")
    assert cli("diagnose", str(gauges), "--apply", "1", "--to", str(tmp_path / "next.toml")).code == 0
    assert load_recipe(tmp_path / "next.toml").data.workers == 3


def test_the_page_of_a_server_stands_for_its_run(home: Home) -> None:
    run = served_run(home, served(requests(8)), name="there")
    page = Reading(source="page", kind="serving", settings={"run": run.id})
    assert _run_of("http://127.0.0.1:1", page, home) == run
    assert _run_of("http://127.0.0.1:1", replace(page, settings={"run": "elsewhere"}), home) is None


def test_a_second_apply_keeps_the_first_prediction(cli: Cli, home: Home, tmp_path: Path) -> None:
    cli("diagnose", "quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml"))
    line = path_of(home).read_text()
    path_of(home).write_text(line.replace('"predicted":2.0', '"predicted":1.5'))
    said = cli("diagnose", "quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml")).out
    assert "1.50 × was predicted before: the outcome is compared with that" in said
    assert len(path_of(home).read_text().splitlines()) == 1


def test_what_else_differs_is_said_and_nothing_is_booked(cli: Cli, home: Home, tmp_path: Path) -> None:
    cli("diagnose", "quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml"))
    run_of(home, plan_of("data.workers=3", "layout.micro_batch=4"), name="both", step_s=0.25)
    said = cli("diagnose", "compare", "quiet-otter", "both").out
    assert "obtained 4.00 ×   nothing is logged   (track record: no lever was measured yet)" in said
    assert "note: loader workers 0 → 3 was predicted to bring 2.00 ×, but more differs than that: layout.mi" in said
    answer = cli("diagnose", "compare", "quiet-otter", "both", "--json").json
    assert answer["predicted"] is None and len(answer["notes"]) == 1


def test_a_broken_line_of_the_track_record_stops_nothing(cli: Cli, home: Home, tmp_path: Path) -> None:
    path_of(home).write_text("{broken\n")
    after(home)
    for words in (
        ["--track-record"],
        ["quiet-otter", "--apply", "1", "--to", str(tmp_path / "next.toml")],
        ["compare", "quiet-otter", "bold-heron"],
        ["quiet-otter"],
    ):
        ran = cli("diagnose", *words)
        assert ran.code == 0 and "Traceback" not in ran.err, words
    said = cli("diagnose", "--track-record").err
    assert said == f"warning: line 1 of {path_of(home)} is broken and left out; delete it\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["quiet-oter"], "no run 'quiet-oter'; did you mean quiet-otter?"),
        (["no/such.json"], "no file or run 'no/such.json'; give a run, gauges.jsonl, a trace, a log or a URL"),
        (["quiet-otter", "--apply", "9"], "no lever 9; levers are 1 to"),
        (["quiet-otter", "--apply", "0"], "0 is not in the range x>=1"),
        (["quiet-otter", "--apply", "first"], "'first' is not a valid integer range"),
        (["compare", "quiet-otter", "quiet-otter"], "run quiet-otter cannot be compared with itself; name the run"),
        (["compare", "quiet-otter"], "missing argument 'B'"),
        (["quiet-otter", "--to", "x.toml"], "--to x.toml says where a changed recipe goes; add --apply N"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, words: list[str], line: str) -> None:
    ran = cli("diagnose", *words)
    assert ran.code == 2 and line in ran.err and "Traceback" not in ran.err


def test_a_plan_from_a_diagnosis(cli: Cli, home: Home) -> None:
    """The last step of the cycle: what a run's diagnosis asks for is planned, without a recipe to write."""
    run_of(home, plan_of("layout.recompute=full"), name="warm-lynx")
    assert "no diagnosis in" in cli("plan", "--from", "warm-lynx").err
    cli("diagnose", "warm-lynx")
    said = cli("plan", "--from", "warm-lynx").out
    assert said.startswith("warm-lynx with lever 1 applied: recompute full → none (--set layout.recompute=none)")
    assert "recompute none" in " ".join(said.split()) and "armillary diagnose warm-lynx --apply 1" in said
    answer = cli("plan", "--from", "warm-lynx", "--set", "layout.micro_batch=1", "--json").json
    assert answer["plan"]["layout"]["recompute"] == "none" and answer["plan"]["layout"]["micro_batch"] == 1
    assert "brings its own recipe" in cli("plan", "--model", "gpt2", "--from", "warm-lynx").err


def test_a_plan_from_a_healthy_run_is_its_own(cli: Cli, home: Home) -> None:
    after(home)
    cli("diagnose", "bold-heron")
    assert cli("plan", "--from", "bold-heron").out.startswith("bold-heron as it is: healthy")


def test_runs_of_several_sizes_are_compared(cli: Cli, home: Home) -> None:
    wide = plan_of("hardware.on=h100x16", "layout.dp=16", "train.batch_tokens=262144")
    run_of(home, wide, name="wide-crane", step_s=1.5, data_wait_s=0.5, comm_exposed_s=0.5)
    said = cli("diagnose", "quiet-otter", "wide-crane").out
    assert "from 8 to 16 devices tokens/s per device drop by 33%" in said and "wide-crane" in said
    answer = cli("diagnose", "quiet-otter", "wide-crane", "--json").json
    assert answer["boundary"]["part"] == "comm_exposed"
    assert cli("diagnose", "quiet-otter", "wide-crane", "--quiet").out == "16 comm_exposed\n"
    assert "name one" in cli("diagnose", "quiet-otter", "wide-crane", "--apply", "1").err


def test_alerts_are_written_beside_the_verdict(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "alerts.yml"
    assert "rule_files of Prometheus" in cli("diagnose", "quiet-otter", "--alerts", str(file)).out
    assert "armillary_data_wait" in file.read_text()


def test_a_live_run_is_followed_until_it_is_interrupted(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    follow(Output(), home, "quiet-otter", 5.0, wait)
    said = capsys.readouterr().out
    assert waits == [5.0, 5.0, 5.0] and said.count("inner loop limits this run") == 3
    assert said.count("lever 1") == 1, "what stays the same is said in one line"
