"""`layout.precision = "auto"` from end to end: chosen by ceilings, kept by a resumed run, refused where hopeless."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.cli.train.planning import DAY_S
from armillary.machine.device_name import device_name
from armillary.machine.machine import here
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.compile_choice import compile_choice
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.home import Home
from armillary.store.peaks import Peaks, new_peaks, peaks_path, save_peaks
from armillary.store.runs import find_run
from tests.conftest import Ran

Cli = Callable[..., Ran]


def ceilings(bf16: float, *, fp32: float = 100e9, name: str = "", half: bool = True) -> Peaks:
    """Of this machine, as if bf16 reached so much."""
    rates = {"fp32": fp32} | ({"bf16": bf16} if half else {})
    gemm = [
        {"m": size, "n": size, "k": size, "dtype": dtype, "flops": flops}
        for dtype, flops in rates.items()
        for size in (256, 1024)
    ]
    attention = [
        {"keys": keys, "head_dim": 64, "dtype": dtype, "backward": backward, "flops": flops / 4}
        for dtype, flops in rates.items()
        for keys in (64, 2048)
        for backward in (False, True)
    ]
    peaks = new_peaks(name or device_name("cpu")).with_points("gemm", gemm).with_points("attention", attention)
    peaks = peaks.with_points("passes", [{"dtype": dtype, "tokens": 1, "bytes_per_s": 8e9} for dtype in rates])
    return peaks.with_points("copy", [{"bytes": 1 << 30, "bytes_per_s": 20e9}])


def measured(home: Home, bf16: float) -> None:
    peaks_path(home, device_name("cpu")).unlink(missing_ok=True)
    save_peaks(home, ceilings(bf16))


@pytest.fixture
def file(recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., str]:
    def write(*overrides: str) -> str:
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(recipe("layout.precision=auto", *overrides)))
        return str(path)

    return write


@pytest.mark.parametrize(("bf16", "taken"), [(400e9, "bf16"), (110e9, "fp32"), (0.3e9, "fp32")])
def test_the_ceilings_decide_and_the_plan_says_why(
    cli: Cli, file: Callable[..., str], home: Home, bf16: float, taken: str
) -> None:
    measured(home, bf16)
    plan = cli("train", file(), "--dry-run", "--json").json["plan"]
    assert plan["layout"]["precision"] == taken and "precision" not in plan["recipe"].get("layout", {})
    assert plan["chosen"]["layout.precision"].startswith(f"{taken}: ")
    assert f"precision         {taken}: " in cli("train", file(), "--dry-run").out
    assert cli("plan", file(), "--json").json["plan"]["layout"]["precision"] == taken


def test_a_run_in_bf16_goes_on_where_bf16_is_hopelessly_slow(cli: Cli, file: Callable[..., str], home: Home) -> None:
    measured(home, 400e9)
    assert cli("train", file("train.steps=2"), "--run", "kept").code == 0
    measured(home, 0.3e9)
    ran = cli("train", file("train.steps=3"), "--run", "kept")
    assert ran.code == 0, ran.err
    assert "keeps bf16" in ran.out + ran.err
    asked = cli("train", file("train.steps=3", "layout.precision=bf16"), "--run", "asked")
    assert asked.code == 2 and "--set layout.precision=auto" in asked.err, "but nobody begins one there"


def test_a_resumed_run_keeps_its_dtype_and_says_where_auto_would_differ(
    cli: Cli, file: Callable[..., str], home: Home
) -> None:
    measured(home, 0.3e9)
    assert cli("train", file("train.steps=2"), "--run", "kept").code == 0
    measured(home, 400e9)
    ran = cli("train", file("train.steps=3"), "--run", "kept")
    assert ran.code == 0, ran.err
    assert "this run keeps fp32, with which it was started; auto would now take bf16" in ran.err + ran.out
    plan = Plan.from_json(find_run(home, "kept").plan.read_text())
    assert plan.layout.precision == "fp32" and "as this run was started" in plan.chosen["layout.precision"]


def test_a_dtype_that_is_asked_for_is_warned_of_or_refused(cli: Cli, file: Callable[..., str], home: Home) -> None:
    measured(home, 30e9)
    ran = cli("train", file(), "--set", "layout.precision=bf16", "--dry-run")
    assert ran.code == 0 and "3.33 × slower than in fp32" in ran.err + ran.out
    measured(home, 3e9)
    ran = cli("train", file(), "--set", "layout.precision=bf16", "--dry-run")
    assert ran.code == 2 and "33.3 × slower" in ran.err and "--set layout.precision=auto" in ran.err
    assert len(ran.err.strip().splitlines()) == 1


def test_a_training_plan_of_days_on_a_cpu_needs_yes(cli: Cli, file: Callable[..., str], home: Home) -> None:
    measured(home, 0.3e9)
    long = file("train.steps=1000000000")
    ran = cli("train", long, "--dry-run")
    assert ran.code == 2 and "--yes" in ran.err and DAY_S == 86_400
    assert cli("train", long, "--dry-run", "--yes").code == 0
    assert "ends about " in cli("train", file("train.steps=1"), "--run", "short").out


# --- each dtype has its own curve


def test_a_plan_in_fp32_does_not_depend_on_how_slow_bf16_is(recipe: Callable[..., Recipe], home: Home) -> None:
    """It was 70 times too slow where bf16 is emulated: the curves scaled every dtype by the bf16 peak."""
    asked = resolve(recipe("layout.precision=fp32"), recipe().model_config(), here(device="cpu"), home)
    steps = {}
    for name, peaks in (("none", ceilings(0.0, half=False)), ("slow", ceilings(0.25e9)), ("quick", ceilings(400e9))):
        case = replace(asked.case, measured=peaks)
        steps[name] = float(predict(case, as_arrays([asked.layout])).time.total[0])
    assert steps["slow"] == pytest.approx(steps["none"], rel=1e-6)
    assert steps["slow"] == pytest.approx(steps["quick"], rel=0.01)


def test_compiling_is_chosen_where_it_saves_several_times_its_cost(
    recipe: Callable[..., Recipe], home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("armillary.planning.training.compile_choice.has_compiler", lambda: True)
    measured(home, 0.3e9)

    def chosen(*overrides: str) -> str:
        one = recipe("layout.precision=fp32", *overrides)
        return compile_choice(resolve(one, one.model_config(), here(device="cpu"), home))

    assert chosen("train.steps=20") == ""
    assert chosen("train.steps=5000000").startswith("true: ")
    monkeypatch.setattr("armillary.planning.training.compile_choice.has_compiler", lambda: False)
    assert chosen("train.steps=5000000") == ""


def test_auto_is_never_left_in_a_plan(cli: Cli, file: Callable[..., str], home: Home) -> None:
    plan = json.loads(cli("train", file(), "--dry-run", "--json").out)["plan"]
    assert plan["layout"]["precision"] in ("fp32", "bf16", "fp16") and plan["train"]["compile"] in (True, False)
