"""`armillary train` as people run it: it launches ranks, joins those of torchrun, stops on Ctrl-C, goes on, refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.errors import ArmillaryError, BadInput
from armillary.model.layers.attention_forms import plain
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.consensus import AgreedError
from armillary.profiling.profile import BUDGET
from armillary.spec.gauges import GAUGES, budget_gauge
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run, list_runs
from armillary.training.checkpoint.checkpoint import saved_steps
from tests.conftest import Ran
from tests.fork_server import Command, ForkServer
from tests.ranks import Ranks

ROOT = Path(__file__).parents[2]
Cli = Callable[..., Ran]


@pytest.fixture
def file(recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., str]:
    """`file("train.steps=3")`: a recipe file with these overrides."""

    def write(*overrides: str) -> str:
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(recipe(*overrides)))
        return str(path)

    return write


@pytest.fixture
def process(home: Home) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`process("train", …)`: the command line in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*args: str, program: tuple[str, ...] = ("-m", "armillary"), **options: Any) -> subprocess.Popen[str]:
        line = [sys.executable, *program, *args, "--home", str(home.work)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        child = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options
        )
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def start(home: Home, tmp_path: Path, fork_server: ForkServer) -> Callable[..., Command]:
    """`start("train", …)`: the same without the imports, and its ranks, too."""

    def run(*args: str, **options: Any) -> Command:
        log = tmp_path / f"log-{time.monotonic_ns()}"
        return fork_server.start([*args, "--home", str(home.work)], log, **options)

    return run


def wait_for(condition: Callable[[], Any], child: Command, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (found := condition()) or child.poll() is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def steps_written(home: Home) -> int:
    runs = list_runs(home)
    return sum(1 for _ in read_gauges(runs[0].gauges)) if runs and runs[0].gauges.exists() else 0


def newest(home: Home) -> Run:
    return list_runs(home)[0]


def test_two_ranks_from_plan_to_export(
    file: Callable[..., str], start: Callable[..., Command], cli: Cli, home: Home
) -> None:
    path = file("train.steps=8", "train.profile_every=4", "train.save_every=4")
    ran = start("train", path, "--devices", "2", "--json")
    assert ran.wait() == 0, ran.err
    outcome = json.loads(ran.out)
    assert outcome["finished"] and outcome["steps"] == 8 and Path(outcome["export"], "config.json").is_file()
    run = newest(home)
    plan = Plan.from_json(run.plan.read_text())
    assert plan.layout.dp == 2 and plan.predicted["step_s"] > 0 and plan.predicted["memory_peak_bytes"] > 0
    records = list(read_gauges(run.gauges))
    assert [record["step"] for record in records] == list(range(8))
    always = {
        "step_s",
        "data_wait_s",
        "comm_exposed_s",
        "tokens_per_s_per_device",
        "memory_bytes",
        "memory_peak_bytes",
        "loss",
        "grad_norm",
        "lr",
        "tokens_total",
    }
    for record in records:
        assert always <= set(record) and set(record["source"]) == set(record) & set(GAUGES), "measured, and how"
    split = {"compute_s", "comm_s", "comm_exposed_s", "bubble_s", "overhead_s"}
    recorded = [record for record in records if "compute_s" in record]
    assert [record["step"] for record in recorded] == [3, 7]
    assert all(record["source"][name] == "profiler window" for record in recorded for name in split)
    assert all(sum(record[budget_gauge(part)] for part in BUDGET) == pytest.approx(1.0) for record in recorded)
    assert any(record.get("slowest_rank") in (0.0, 1.0) and record["rank_spread_s"] >= 0 for record in records)
    assert all({"optimizer_s", "goodput_fraction"} <= set(record) for record in records)
    memory = {"memory_weights_bytes", "memory_optimizer_bytes", "memory_activations_bytes", "memory_loss_bytes"}
    assert [record["step"] for record in records if memory <= set(record)] == [1]
    assert records[1]["source"]["memory_activations_bytes"] == "tracker"
    listed = cli("runs", "--json").json
    assert (listed[0]["state"], listed[0]["step"]) == ("finished", 8) and listed[0]["checkpoints"] == [4, 8]


def test_a_model_of_pairs_trains_and_its_export_is_served_as_it_answers_itself(
    file: Callable[..., str], cli: Cli, home: Home
) -> None:
    """2-simplicial layers between plain ones, over packed documents; greedy answers of the engine are those of the full
    forward pass over all tokens so far."""
    path = file(
        "model.attention_pattern=2-simplicial,full",
        "model.simplicial.window_1=4",
        "model.simplicial.window_2=12",
        "train.steps=4",
        "train.save_every=2",
    )
    outcome = cli("train", path, "--json").json
    folder = Path(outcome["export"])
    assert json.loads((folder / "config.json").read_text())["simplicial_windows"] == [4, 12]
    assert saved_steps(newest(home)) == [2, 4]
    weights, tokenizer = load_model(folder, dtype="fp32"), Tokenizer.load(folder)
    tokens = tokenizer.encode("import os")
    made = cli(
        "generate", str(folder), "import os", "--max-tokens", "12", "--temperature", "0", "--dtype", "fp32", "--json"
    ).json
    for _ in range(12):
        ids = torch.tensor([tokens])
        hidden = weights(ids, torch.arange(len(tokens))[None], plain)
        tokens = [*tokens, int(weights.head(hidden[0, -1]).argmax())]
    assert tokenizer.decode(tokens[-12:]) in str(made)


def test_ctrl_c_saves_and_the_same_command_goes_on(
    file: Callable[..., str], start: Callable[..., Command], cli: Cli, home: Home
) -> None:
    path = file("train.steps=300", "train.eval_every=0", "layout.dp=2")
    child = start("train", path)
    wait_for(lambda: steps_written(home) >= 3, child)
    child.send_signal(signal.SIGINT)
    assert child.wait(120) == 0, child.err
    run = newest(home)
    (step,) = saved_steps(run)
    assert f"checkpoint {step} written, resume with the same command" in child.out
    assert run.state.state == "interrupted" and run.state.step == step
    changed = cli("train", path, "--devices", "1", "--set", "train.seed=5")
    assert changed.code == 2 and "(train.seed 0 → 5)" in changed.err and "--new" in changed.err
    assert len(list_runs(home)) == 1
    edits = ("--set", "train.until=loss=100", "--set", "train.save_every=7", "--set", "train.lr=0.0002")
    again = cli("train", path, "--devices", "1", *edits)
    assert f"continues run {run.id} from step {step}" in again.out and again.code == 0, again.err
    noted = f"run {run.name} continues with changes: layout.dp 2 → 1, train.lr none → 0.0002"
    assert again.out.count("continues with changes") == 1 and noted in again.out
    assert newest(home).id == run.id and run.state.state == "finished" and run.state.step == step + 1
    other = cli("train", path, "--devices", "1", "--set", "train.until=loss=100", "-q")
    assert other.code == 0 and other.out.strip() != run.id, "a finished run is not touched again"


QUICK = """
import runpy
from dataclasses import replace
from armillary.store.lease import Lease
new = Lease.new.__func__
Lease.new = classmethod(lambda cls: replace(new(cls), beat_s=0.1))
runpy.run_module("armillary", run_name="__main__")
"""
"""the command line, with a lease that is renewed often"""


def test_a_run_that_another_process_has_is_taken_over_only_when_asked(
    file: Callable[..., str], start: Callable[..., Command], cli: Cli, home: Home
) -> None:
    path = file("train.steps=5000", "train.eval_every=0", "train.save_every=1")
    child = start("train", path, program=("-c", QUICK))
    wait_for(lambda: steps_written(home) >= 3, child)
    refused = cli("train", path)
    assert refused.code == 2 and re.search(r"is still running \(process \d+ on .*--take-over, or .*--new", refused.err)
    assert len(list_runs(home)) == 1, "never a silent new run"
    taken = cli("train", path, "--take-over", "--set", "train.until=loss=100")
    assert child.wait(120) == 2 and "was taken over by process" in child.err and "wrote nothing since" in child.err
    assert taken.code == 0, taken.err
    (run,) = list_runs(home)
    assert re.search(rf"continues run {run.id} from step \d+", taken.out) and run.state.state == "finished"


@pytest.mark.parametrize(
    "layout", [["layout.dp=1"], pytest.param(["layout.dp=2", "layout.zero=3"], marks=pytest.mark.slow)]
)
def test_a_full_disk_is_one_line_and_keeps_what_is_whole(
    layout: list[str], file: Callable[..., str], start: Callable[..., Command], cli: Cli, home: Home
) -> None:
    path = file("train.steps=6", "train.save_every=2", *layout)
    done = cli("train", path, "--devices", "1", "--set", "train.until=loss=100")
    assert done.code == 0, "text and a first run are there"
    child = start("train", path, file_bytes=150_000)
    assert child.wait(120) == 2, (child.out, child.err)
    err = child.err
    assert err.count("error:") == 1 and "disk full while writing a checkpoint" in err and "Traceback" not in err
    run = newest(home)
    assert run.state.state == "failed" and not run.checkpoint_steps()
    assert not [p for p in (run.folder / "checkpoints").iterdir()], "nothing half-written is left"


def call_cli(args: tuple[str, ...]) -> tuple[int, str, str]:
    """The command line on one of several ranks: (exit code, stdout, stderr)."""
    from armillary.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(args)
        except SystemExit as left:
            code = int(str(left.code))
    return code, out.getvalue(), err.getvalue()


def test_ranks_that_are_there_already_are_joined(file: Callable[..., str], home: Home, ranks: Ranks) -> None:
    args = ("train", file("train.steps=3", "layout.tp=2"), "--json", "--home", str(home.work))
    main, other = ranks.run(2, call_cli, args)
    assert main[0] == other[0] == 0, (main[2], other[2])
    assert json.loads(main[1])["steps"] == 3 and other[1:] == ("", ""), "the main rank alone speaks"
    assert newest(home).state.state == "finished"
    main, other = ranks.run(2, call_cli, (*args, "--set", "layout.tp=1"))
    assert main[0] == other[0] == 2 and other[1:] == ("", "")
    assert "error: dp=1 needs 1 processes and 2 are running" in main[2]


@pytest.mark.slow
def test_torchrun_s_ranks_are_joined(
    file: Callable[..., str], process: Callable[..., subprocess.Popen[str]], home: Home
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "armillary")
    child = process("train", file("train.steps=3", "layout.tp=2"), "--json", program=torchrun)
    out, err = child.communicate(timeout=180)
    assert child.returncode == 0, err
    assert json.loads(out)["steps"] == 3, "the main rank alone speaks"
    assert newest(home).state.state == "finished"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--set", "layout.tp=3"], "tp=3 does not divide"),
        (["--set", "layout.dp=64", "--set", "train.batch_tokens=8192"], r"cannot hold dp=64: try --set layout.dp=\d"),
        (["--devices", "3"], "is not a multiple of"),
        (["--devices", "0"], "give at least 1"),
        (["--set", "train.sequence=256"], "longer than the context"),
        (["--set", "hardware.on=h100x8"], "h100x8 is not this machine.*--set hardware.on=here"),
        (["--set", "train.until=accuracy=3"], "is no goal; try --set train.until=val_loss=3.2"),
        (["--set", "train.until=val_loss=3", "--set", "data.held_out=0"], "no text is held out .*; try --set data"),
        (["--set", "train.until=val_loss=3", "--set", "train.eval_every=0"], "no validation; try --set train.eval_e"),
        (["--until", "val_loss=3"], "--until is no more; try --set train.until=val_loss=3.2"),
        (["--from", "gpt2"], "--from is no more; try --set model.path=FOLDER"),
        (["--set", "train.min_lr=1"], "must be at most the peak learning rate of 0.003"),
        (["--run", "no such"], "is no name for a run"),
        (
            ["--set", "model.hidden=65536", "--set", "model.ffn=262144", "--set", "model.head_dim=16384"],
            "needs .* on each device and there are .*; ",
        ),
        (["--set", "data.source=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_run_is_one_line(
    args: list[str], expected: str, file: Callable[..., str], cli: Cli, home: Home
) -> None:
    ran = cli("train", file(), *args)
    assert ran.code == 2 and re.search(f"^error: .*{expected}", ran.err, re.MULTILINE), ran.err
    assert "Traceback" not in ran.err and not home.runs.exists()


def test_going_on_without_a_checkpoint_is_said_and_why_it_had_ended(
    file: Callable[..., str], cli: Cli, home: Home
) -> None:
    path = file("train.lr=1e30", "train.warmup_steps=0", "train.clip=0")
    first = cli("train", path)
    assert first.code == 2 and "goes on" not in first.out
    run = newest(home)
    error = run.state.error
    again = cli("train", path)
    assert f"continues run {run.id} from the beginning (no checkpoint yet), which had failed ({error})" in again.out
    assert newest(home).id == run.id
    steps = [record["step"] for record in read_gauges(run.gauges)]
    assert steps == sorted(set(steps)), "records of the first time are gone"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_how_a_joined_rank_ends(rank: int) -> None:
    from armillary.cli.train.train import _as_said
    from armillary.parallel.store_barrier import RankLost

    main_lost, other_lost = RankLost(0, "rank 0 ended"), RankLost(3, "rank 3 ended")
    assert (_as_said(main_lost, rank=rank) is main_lost) == (rank == 1), "the next one speaks"
    assert (_as_said(other_lost, rank=rank) is other_lost) == (rank == 0)

    lost = _as_said(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), rank=rank)
    agreed = _as_said(AgreedError("disk full"), rank=rank)
    own, bug = BadInput("of this rank alone; do this"), ValueError("a bug")
    assert _as_said(own, rank=rank) is own and _as_said(bug, rank=rank) is bug
    if rank == 0:
        assert isinstance(lost, ArmillaryError) and "another rank ended" in str(lost) and str(agreed) == "disk full"
    else:
        assert all(isinstance(each, SystemExit) and each.code == 2 for each in (lost, agreed)), "the main one speaks"


def test_a_dry_run_writes_nothing(file: Callable[..., str], cli: Cli, home: Home) -> None:
    ran = cli("train", file("layout.dp=2"), "--dry-run", "--json")
    assert ran.code == 0 and ran.json["plan"]["predicted"]["step_s"] > 0
    assert not home.runs.exists() and not home.data.exists()


def test_a_missing_shard_is_named(file: Callable[..., str], cli: Cli, home: Home) -> None:
    path = file("train.steps=3", "layout.dp=2")
    assert cli("train", path, "--devices", "1", "--set", "train.until=loss=100").code == 0
    (shard,) = home.data.glob("*/train/*.bin")
    prepared = shard.parents[1]
    shard.unlink()
    ran = cli("train", path, "--set", f"data.path={prepared}", "--set", "train.steps=4")
    assert ran.code == 2 and shard.name in ran.err and ran.err.count("error:") == 1


@pytest.mark.slow  # by default: in test_many_ranks without the launcher, and here the launcher with other errors
def test_nan_on_two_ranks_is_one_line(file: Callable[..., str], cli: Cli, home: Home) -> None:
    path = file("train.lr=1e30", "train.warmup_steps=0", "train.clip=0", "train.save_every=1", "layout.dp=2")
    ran = cli("train", path)
    assert ran.code == 2 and ran.err.count("error:") == 1 and "Traceback" not in ran.err
    assert re.search(r"error: (loss|grad_norm) is (nan|inf) at step \d+.*; the step was not .* train.lr=", ran.err)
    run = newest(home)
    assert run.state.state == "failed" and "train.lr" in run.state.error
    assert all(step < 6 for step in saved_steps(run))


def test_a_run_by_name(file: Callable[..., str], cli: Cli, home: Home) -> None:
    path = file("train.steps=3")
    assert cli("train", path, "--run", "first-try").code == 0
    assert newest(home).name == "first-try"
    assert "is finished; give it more with --set train.steps=…" in cli("train", path, "--run", "first-try").err
    ran = cli("train", file("train.steps=3", "train.lr=0.01"), "--run", "first-try")
    assert ran.code == 2 and "is finished" in ran.err
