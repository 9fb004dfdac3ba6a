"""`armillary plan`: one plan, searches, explanations and tables, for people, JSON and quiet; nonsense in one line."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.spec.plan import Plan
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks

Cli = Callable[..., Any]
SMALL = ("--model", "llama-3-8b", "--on", "h100x8")
FIXTURE = Path(__file__).parents[2] / "planning" / "published" / "published_training_40.csv"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nname = "llama-3-8b"\n[hardware]\non = "h100x16"\n[layout]\ndp = 16\nzero = 3\n'
        "[train]\nsequence = 4096\nbatch_tokens = 2_097_152\nsteps = 500\n"
    )
    return path


# --- one plan


def test_a_model_on_devices_gets_the_best_layout(cli: Cli) -> None:
    out = " ".join(cli("plan", *SMALL).out.split())  # wherever lines break
    for word in ("memory / device", "fits", "step", "tokens/s/device", "limit next", "cost", "the fastest of"):
        assert word in out
    found = cli("plan", *SMALL, "--json").json
    plan = Plan.from_dict(found["plan"])
    gauges = plan.predicted
    assert found["fits"] and plan.layout.num_devices == 8
    terms = ("compute_s", "comm_exposed_s", "bubble_s", "overhead_s")
    assert sum(gauges[name] for name in terms) == pytest.approx(gauges["step_s"])
    parts = [value for name, value in gauges.items() if name.startswith("memory_") and name != "memory_peak_bytes"]
    assert sum(parts) == pytest.approx(gauges["memory_peak_bytes"])
    assert float(cli("plan", *SMALL, "-q").out) == pytest.approx(gauges["step_s"], rel=1e-4)


def test_a_plan_says_which_links_its_axes_cross(cli: Cli) -> None:
    moe = str(Path(__file__).parents[3] / "recipes" / "moe_64xh100.toml")
    near = cli("plan", moe).out
    assert "ep=8: neighbouring ranks, over NVLink 4 (8 devices)" in near and "exchange tokens" not in near
    far = " ".join(cli("plan", moe, "--set", "layout.ep=16").out.split())
    assert "experts over ep=16 ranks exchange tokens over InfiniBand NDR; ep=8 stays inside NVLink 4" in far


def test_a_recipe_is_planned_as_it_stands(cli: Cli, recipe: Path) -> None:
    found = cli("plan", str(recipe), "--json").json
    assert found["plan"]["layout"]["dp"] == 16 and found["plan"]["train"]["steps"] == 500
    other = cli("plan", str(recipe), "--set", "layout.recompute=full", "--json").json
    before, after = found["plan"]["predicted"], other["plan"]["predicted"]
    assert after["step_s"] > before["step_s"]
    assert after["memory_activations_bytes"] < before["memory_activations_bytes"]


def test_what_does_not_fit_names_the_smallest_change(cli: Cli, recipe: Path) -> None:
    ran = cli("plan", str(recipe), "--set", "layout.zero=0")
    assert ran.code == 0 and "does not fit" in ran.out and "try --set layout." in ran.out
    found = cli("plan", str(recipe), "--set", "layout.zero=0", "--json").json
    assert not found["fits"]
    change = found["remedy"].split("try ")[1].split(" (")[0].split()[1::2]
    flags = [word for one in change for word in ("--set", one)]
    assert cli("plan", str(recipe), "--set", "layout.zero=0", *flags, "--json").json["fits"]


def test_adapters_are_planned_beside_frozen_weights(cli: Cli) -> None:
    whole = cli(
        "plan",
        "--model",
        "llama-3-8b",
        "--on",
        "h100",
        "--set",
        "layout.precision=bf16",
        "--sequence",
        "512",
        "--batch-tokens",
        "4096",
        "--set",
        "layout.dp=1",
    )
    assert "does not fit" in whole.out
    lora = ("plan", "--model", "llama-3-8b", "--on", "h100", "--lora", "16", "--json")
    found, quantised = cli(*lora).json, cli(*lora[:6], "16:nf4", "--json").json
    assert found["fits"] and "adapters" in " ".join(found["plan"]["notes"])
    small, smaller = found["plan"]["predicted"], quantised["plan"]["predicted"]
    assert small["memory_optimizer_bytes"] < 1e9 and smaller["memory_weights_bytes"] < small["memory_weights_bytes"] / 2
    assert "trained parameters" in cli("plan", "explain", *lora[1:-1]).out


def test_the_page_fits_the_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("plan", "--model", "llama-3.1-70b", "--on", "h100x64").out.splitlines()
    assert len(lines) > 20 and max(len(line) for line in lines) <= 80


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_search_keeps_the_schedule_that_was_asked_for(cli: Cli, schedule: str) -> None:
    sets = ("--set", "layout.pp=4", "--set", f"layout.schedule={schedule}", "--batch-tokens", "512k")
    layout = cli("plan", *SMALL, *sets, "--json").json["plan"]["layout"]
    assert layout["schedule"] == schedule and layout["interleave"] == 1 and layout["pp"] == 4


def test_ceilings_measured_on_the_chip_are_used(cli: Cli, home: Home) -> None:
    peaks = new_peaks("NVIDIA H100 80GB HBM3")
    peaks = peaks.with_points("gemm", [{"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "flops": 2e14}])
    asked = ("plan", *SMALL, "--set", "layout.dp=8", "--set", "layout.precision=bf16")
    before = float(cli(*asked, "-q").out)
    save_peaks(home, peaks.with_points("copy", [{"bytes": 2**30, "bytes_per_s": 1e12}]))
    assert "measured" in cli(*asked).out
    assert 2.5 * before < float(cli(*asked, "-q").out) < 3.5 * before, "both are about a third of the catalogue's"


def test_this_machine_can_be_planned_for(cli: Cli) -> None:
    ran = cli("plan", "--model", "armillary-2m", "--on", "here", "--sequence", "128", "--batch-tokens", "1024")
    assert ran.code == 0 and "armillary-2m" in ran.out


def test_axes_given_without_dp_are_filled_up_with_dp(cli: Cli) -> None:
    found = cli("plan", "--model", "llama-3-8b", "--on", "h100x64", "--set", "layout.tp=8", "--json").json
    assert found["plan"]["layout"]["dp"] == 8


# --- search, explain, table


def test_search_ranks_layouts_and_says_why(cli: Cli) -> None:
    out = cli("plan", "search", "--model", "llama-3-70b", "--on", "h100x64", "--top", "5").out
    assert "valid layouts" in out and "why:" in out and "Pareto front" in out and "limit next" in out
    found = cli("plan", "search", *SMALL, "--top", "3", "--json").json
    steps = [one["predicted"]["step_s"] for one in found["best"]]
    assert len(steps) == 3 and steps == sorted(steps) and found["front"][0]["predicted"]["step_s"] == steps[0]
    assert found["best"][0]["trillion_tokens_usd"] > 0
    flags = cli("plan", "search", *SMALL, "-q").out.split()
    again = cli("plan", *SMALL, *flags, "--json").json
    assert again["plan"]["predicted"]["step_s"] == pytest.approx(steps[0])


def test_a_batch_that_divides_badly_is_moved_and_said(cli: Cli) -> None:
    out = cli("plan", "search", *SMALL, "--sequence", "8192", "--batch-tokens", "1M").out
    assert "the batch was taken as 128 sequences = 1,048,576 tokens" in out


@pytest.mark.parametrize("devices", ["gb200x72", "dgx-h100x3", "h100x56"])
def test_the_batch_nobody_named_divides_over_any_number_of_devices(cli: Cli, devices: str) -> None:
    plan = cli("plan", "--model", "llama-3-8b", "--on", devices, "--json").json["plan"]
    layout = plan["layout"]
    assert layout["dp"] * layout["cp"] * layout["tp"] >= 24 and layout["pp"] == 1
    assert 3e6 < plan["train"]["batch_tokens"] < 6e6


def test_explain_puts_numbers_into_every_formula(cli: Cli) -> None:
    out = cli("plan", "explain", "--model", "llama-3-70b", "--on", "h100x64").out
    assert "formula" in out and "pipeline fill" in out and "memory, all" in out
    found = cli("plan", "explain", *SMALL, "--json").json
    assert {"GEMMs", "step", "memory, all"} <= {term["name"] for term in found["terms"]}


def test_predictions_are_written_beside_their_rows_even_without_ids(cli: Cli, tmp_path: Path) -> None:
    with FIXTURE.open(newline="") as file:
        rows = [{**row, "config_id": ""} for row in csv.DictReader(file)]
    source, target = tmp_path / "mine.csv", tmp_path / "with.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = cli("plan", "table", str(source), "--filter", "moe", "--write", str(target), "--json").json["rows"]
    with target.open(newline="") as file:
        written = list(csv.DictReader(file))
    beside = {i: row["armillary_predicted"] for i, row in enumerate(written, start=1) if row["kind"] == "moe"}
    assert {row["row"]: row["predicted"] for row in found} == {i: float(text) for i, text in beside.items()}
    assert all(not row["armillary_predicted"] for row in written if row["kind"] != "moe")


def test_a_table_is_judged(cli: Cli, tmp_path: Path) -> None:
    out = cli("plan", "table", str(FIXTURE), "--write", str(tmp_path / "beside.csv")).out
    assert "errors" in out and "llm-foundry" in out and "physics only" in out and "out of memory: 3 of 3" in out
    assert "armillary_predicted" in (tmp_path / "beside.csv").read_text().splitlines()[0]
    found = cli("plan", "table", str(FIXTURE), "--filter", "newest,complete", "--json").json
    summary = found["summary"]
    assert {"mape", "median", "bias", "complete", "predicted", "by_framework", "memory"} <= set(summary)
    assert summary["mape"] < 0.1 and len(found["rows"]) == summary["complete"] == 31
    assert all(row["error"] is not None for row in found["rows"])
    plain = cli("plan", "table", str(FIXTURE), "--filter", "complete", "--physics-only", "--json").json["summary"]
    assert plain["mape"] == plain["physics_only"]["mape"] > summary["mape"]


# --- nonsense


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("plan", "--model", "llama-3-8b"), "needs --on"),
        (("plan", "--model", "lama-3-8b", "--on", "h100x8"), "did you mean llama-3-8b"),
        (("plan", "--model", "llama-3-8b", "--on", "h100x0"), "at least one"),
        (("plan", "--model", "llama-3-8b", "--on", "h10x8"), "no hardware"),
        (("plan", *SMALL, "--set", "layout.tp=64"), "tp=64 does not divide"),
        (("plan", *SMALL, "--set", "layout.tp=3"), "try --set layout.tp="),
        (("plan", *SMALL, "--set", "cost.usd_per_device_hour=-1"), "must be at least 0"),
        (("plan", *SMALL, "--sequence", "0"), "train.sequence=0"),
        (("plan", *SMALL, "--set", "train.steps=-5"), "train.steps='-5' is negative"),
        (("plan", *SMALL, "--batch-tokens", "many"), "is not a number"),
        (("plan", *SMALL, "--sequence", "4096", "--batch-tokens", "512"), "batch"),
        (("plan", "search", "--model", "llama-3.1-405b", "--on", "a100x8"), "no layout of llama-3.1-405b fits"),
        (("plan", "search", *SMALL, "--top", "0"), "--top 0 shows nothing"),
        (("plan", "--model", "llama-3.2-1b", "--on", "gb10"), "the speed of"),
        (("plan", "serach", *SMALL), "did you mean armillary plan search"),
        (("plan", "nowhere.toml"), "no recipe"),
        (("plan",), "give a recipe"),
        (("plan", "table", "nowhere.csv"), "no table"),
        (("plan", "table", str(FIXTURE), "--filter", "newst"), "did you mean newest"),
    ],
)
def test_nonsense_gets_one_clear_sentence(cli: Cli, args: tuple[str, ...], says: str) -> None:
    ran = cli(*args)
    assert ran.code == 2 and says in ran.err and len(ran.err.strip().splitlines()) == 1
