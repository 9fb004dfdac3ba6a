"""`armillary demo` once round, very small, as a process of its own; on two ranks and cut short with -m slow."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from armillary.cli.demo.ceilings import ALONE, ceilings_text, is_known, sections
from armillary.cli.demo.service_and_promotion import recipe_of
from armillary.cli.demo.state import RECIPE, STAGES, fitting
from armillary.cli.up import read_service
from armillary.diagnosis.evidence.thresholds import MIN_SPEEDUP
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.machine.device_name import device_name
from armillary.spec.recipe import load_recipe, to_toml
from armillary.spec.toml.fields import build
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, save_peaks
from armillary.store.runs import list_runs
from tests.fork_server import ForkServer

ROOT = Path(__file__).parents[3]
ARMILLARY = (sys.executable, "-m", "armillary")
SMALL = {
    "model.name": "armillary-2m",
    "model.num_layers": 1,
    "model.hidden": 32,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.head_dim": 8,
    "model.ffn": 64,
    "model.vocab": 320,
    "model.context": 256,
    "data.held_out": 0.1,
    "layout.micro_batch": 1,
    "serve.max_running": 8,
    "serve.max_model_len": 128,
    "train.sequence": 32,
    "train.batch_tokens": 256,
    "train.steps": 20,
    "train.eval_every": 10,
    "traffic.duration_s": 1,
    "traffic.tokens_in": 16,
    "traffic.shared_prefix": 8,
    "traffic.tokens_out": 8,
    "load.warmup_s": 0.2,
}


def made_peaks(ranks: int = 2) -> Peaks:
    """Ceilings of this machine as if they had been measured today."""
    peaks = new_peaks(device_name("cpu", threads=1))
    peaks = peaks.with_points(
        "gemm",
        [{"m": 8, "n": 8, "k": 8, "dtype": dtype, "flops": flops} for dtype, flops in (("bf16", 1e9), ("fp32", 3e11))],
    )
    peaks = peaks.with_points("copy", [{"bytes": 1 << 20, "bytes_per_s": 2e10}])
    point = {"keys": 128, "head_dim": 8, "dtype": "bf16", "backward": False, "flops": 1e11}
    peaks = peaks.with_points("attention", [point, {**point, "backward": True}])
    peaks = peaks.with_points("launch", [{"seconds": 5e-6}])
    between = {"op": "all_reduce", "world": ranks, "alpha_s": 1e-4, "bytes_per_s": 1e9}
    return peaks.with_points("collective", [between])


def all_peaks() -> Peaks:
    """Those that `made_peaks` leaves out as well."""
    return made_peaks().with_points("calls", [{"what": "engine", "seconds": 5e-6}])


def command(tmp_path: Path, *more: str, peaks: Peaks, **changes: object) -> list[str]:
    """The demo, tiny, in a home that has these ceilings already."""
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"line one of {i}\nthe quick brown fox number {i} jumps\n" * 6)
    save_peaks(Home.at(tmp_path), peaks)
    sets = SMALL | {"data.source": text} | changes
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return ["demo", "--home", str(tmp_path), *words, *more]


def test_once_round(tmp_path: Path, fork_server: ForkServer) -> None:
    line = command(tmp_path, "--json", "--page", str(tmp_path / "demo.html"), peaks=all_peaks(), **{"layout.dp": 1})
    ran = fork_server.start(line, tmp_path / "log", cwd=tmp_path)
    assert ran.wait(240) == 0, ran.err
    answer = json.loads(ran.out)
    assert [stage["name"] for stage in answer["stages"]] == list(STAGES)
    (stop,) = answer["stops"]
    assert 8 <= stop < 20  # interrupted by a signal, and yet it has all its steps
    home = Home.at(tmp_path)
    runs = {run.id: run for run in list_runs(home)}
    assert runs[answer["run"]].state.step == 20 and runs[answer["run"]].state.state == "finished"
    assert runs[answer["run"]].latest_export() is not None
    kinds = [found["kind"] for found in answer["diagnoses"]]
    assert kinds == ["training", "serving"]
    _every_prediction_is_checked(answer)
    _levers_worth_it_were_pulled(answer)
    page = (tmp_path / "demo.html").read_text()
    assert f"interrupted after step {stop}, resumed" in page and "Time to first token" in page
    _a_promotion_dropped_nothing(answer["service"])
    assert "As a service" in page and "demo:2 was promoted over demo:1" in page


def _a_promotion_dropped_nothing(service: dict[str, Any]) -> None:
    assert service["releases"] == ["demo:1", "demo:2"] and service["failed"] == 0
    assert len(service["replicas"]) == 2 and sum(count for _, count in service["replicas"]) >= service["requests"]
    assert 0 < service["added_p50_s"] <= service["added_p99_s"]


def _every_prediction_is_checked(answer: dict[str, object]) -> None:
    rows = answer["predicted"]
    assert isinstance(rows, list)
    of_training = {row["gauge"]: row for row in rows if row["of"] == "training"}
    assert {"step_s", "memory_peak_bytes", "tokens_per_s", "run_s"} <= {
        gauge for gauge, row in of_training.items() if row["measured"] is not None
    }
    of_serving = {row["gauge"]: row for row in rows if row["of"].startswith("serving")}
    assert of_serving["ttft_p50_s"]["measured"] > 0 and of_serving["kv_capacity_tokens"]["measured"] > 0


def _levers_worth_it_were_pulled(answer: dict[str, object]) -> None:
    diagnoses, pulled = answer["diagnoses"], answer["pulled"]
    assert isinstance(diagnoses, list) and isinstance(pulled, list)
    found = [build(Diagnosis, one, "diagnosis") for one in diagnoses]
    expected = [
        next((lever for lever in one.levers if lever.change and lever.speedup > MIN_SPEEDUP), None)
        for one in found
        if not one.is_healthy
    ]
    assert [one["title"] for one in pulled] == [lever.title for lever in expected if lever is not None]
    assert all(one["obtained"] > 0 and one["predicted"] > MIN_SPEEDUP for one in pulled)


@pytest.mark.slow
def test_on_two_ranks_in_words(tmp_path: Path) -> None:
    line = [*ARMILLARY, *command(tmp_path, peaks=made_peaks())]  # measures what is missing
    ran = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=240, env=_env())
    assert ran.returncode == 0, ran.stderr
    for said in (
        "[1/9] measure",
        "20 steps on 2 ranks",
        "Ctrl-C after step 8",
        "stopped after",
        "continues run",
        "finished after 20 steps",
        "ready on http://",
        "TTFT",
        "throughput",
        "[9/9] report",
        "demo finished in",
        "armillary-demo.html",
    ):
        assert said in ran.stdout, said
    assert (tmp_path / "armillary-demo.html").is_file()


@pytest.mark.slow
def test_ctrl_c_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    line = [*ARMILLARY, *command(tmp_path, peaks=all_peaks(), **{"train.steps": 4000, "layout.dp": 1})]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=_env()
    )
    assert process.stdout is not None
    said = ""
    for piece in process.stdout:
        said += piece
        if "planned " in piece:
            break
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said + rest
    assert re.search(r"stopped after \d+ steps", rest) and "report: " in rest
    assert (tmp_path / "armillary-demo.html").is_file()


def test_the_recipe_says_what_it_leaves_on_the_table() -> None:
    recipe, text = load_recipe(RECIPE), RECIPE.read_text()
    assert recipe.layout.recompute == "full" and not recipe.serve.prefix_cache
    assert text.count("# deliberately slow") == 2


def test_one_device_is_one_rank_unless_somebody_says_otherwise() -> None:
    assert fitting(["train.steps=5"], 1) == ("train.steps=5", "layout.dp=1")
    assert fitting(["layout.tp=2"], 1) == ("layout.tp=2",) and fitting([], 2) == ()


def test_ceilings_of_today_are_not_measured_twice() -> None:
    assert not is_known(made_peaks(), 2), "torch calls were not timed"
    peaks = all_peaks()
    assert is_known(peaks, 2) and is_known(peaks, 1) and not is_known(peaks, 4)
    assert not is_known(new_peaks("x"), 1)
    link = "all-reduce of 2 ranks 100 µs and 1.00 GB/s"
    assert ceilings_text(peaks) == f"fp32 300 GFLOP/s · bf16 1.00 GFLOP/s · memory 20.0 GB/s · {link}"
    assert "catalogue" in ceilings_text(new_peaks("x"))


def test_what_a_rank_has_of_the_cores_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    cores, gpu = torch.device("cpu"), torch.device("cuda")
    assert [(name, threads) for name, threads, _ in sections(cores, 2)][-3:] == [(name, 2) for name in ALONE]
    assert all(threads is None for device, ranks in ((cores, 1), (gpu, 2)) for _, threads, _ in sections(device, ranks))


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_the_service_has_the_release_and_what_the_first_server_found_out(tmp_path: Path) -> None:
    plan = SimpleNamespace(serve=SimpleNamespace(threads=4), layout=SimpleNamespace(precision="fp32"))
    served = SimpleNamespace(reading=SimpleNamespace(plan=plan))
    state = SimpleNamespace(recipe=load_recipe(RECIPE), report=SimpleNamespace(served=served))
    file = tmp_path / "service.toml"
    file.write_text(to_toml(recipe_of(state)))  # type: ignore[arg-type]
    recipe, _ = read_service(file, ())
    assert recipe.model.source == "registry:demo@production" and recipe.fleet.replicas == 2
    assert (recipe.serve.threads, recipe.serve.dtype, recipe.serve.prefix_cache) == (2, "fp32", True)
