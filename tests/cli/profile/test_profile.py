"""profile and plan amdahl through the command line: each kind of target, human, json and quiet, and what goes wrong."""

from __future__ import annotations

import gzip
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.machine.device_name import device_name
from armillary.profiling.ceilings.ceilings import Ceilings
from armillary.profiling.profile import Profile
from armillary.store.home import Home
from armillary.store.peaks import new_peaks, save_peaks
from tests.cli.test_model_verbs import RECIPE
from tests.conftest import Ran
from tests.profiling.profiles import made_profile

Cli = Callable[..., Ran]
STEP = """
import torch

x = torch.randn(64, 64)

def step():
    return x @ x

number = 3

def needs(x, *, y, z=1):
    return x

def raises():
    torch.ones(2) @ torch.ones(3)

def leaves():
    raise SystemExit(4)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def measured(home: Home) -> None:
    """This processor has ceilings, so that nothing is measured first."""
    save_peaks(home, ceilings_here().peaks)


def ceilings_here() -> Ceilings:
    peaks = new_peaks(device_name("cpu", threads=torch.get_num_threads()))
    peaks = peaks.with_points("gemm", [{"m": 512, "n": 512, "k": 512, "dtype": "fp32", "flops": 1e11}])
    peaks = peaks.with_points("copy", [{"bytes": 1 << 28, "bytes_per_s": 1e10}])
    return Ceilings(peaks=peaks, skipped=0, seconds=0.0, other_cores=None)


def test_a_device_without_ceilings_is_measured_once(
    cli: Cli, module: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in home.peaks.iterdir():
        path.unlink()
    looks: list[Any] = []
    monkeypatch.setattr(
        "armillary.profiling.ceilings.ceilings.measure_ceilings",
        lambda *args, **kwargs: looks.append(kwargs) or ceilings_here(),
    )
    first = cli("profile", f"{module}:step", "--steps", "1")
    assert "a quick measurement now" in first.out and looks[0]["quick"], first.err
    again = cli("profile", f"{module}:step", "--steps", "1", "--json")
    assert len(looks) == 1 and again.json["roofline"]["source"] == "measured"


def error(ran: Ran) -> str:
    assert ran.code == 2 and ran.err.startswith("error: ") and ran.err.count("\n") == 1, ran.err
    return ran.err.removeprefix("error: ").rstrip()


@pytest.fixture
def module(here: Path) -> str:
    """A module of its own name, as Python keeps what it has imported."""
    name = f"profiled_{here.name}"
    (here / f"{name}.py").write_text(STEP)
    return name


def test_a_callable_and_its_trace(cli: Cli, module: str, here: Path) -> None:
    ran = cli("profile", f"{module}:step", "--steps", "2", "--trace", "t.json")
    assert ran.code == 0, ran.err
    assert "\nstep " in ran.out and "aten::mm" in ran.out and "report: profile.html" in ran.out
    assert "<svg" in (here / "profile.html").read_text()
    again = cli("profile", "t.json", "--json", "--html", "again.html")
    assert again.code == 0, again.err
    found = Profile.from_json(again.out)
    assert found.steps == 2 and next(row for row in found.operators if row.name == "aten::mm").calls == 2
    (here / "before.json").write_text(again.out)
    assert Profile.from_json((here / "before.json").read_text()) == found
    compared = cli("profile", "t.json", "--compare", "before.json")
    assert compared.code == 0 and ", 1.00 ×" in compared.out
    assert cli("profile", "before.json", "--quiet").out == "profile.html\n"


def test_a_recipe(cli: Cli, here: Path) -> None:
    source = here / "text"
    source.mkdir()
    for i in range(20):
        (source / f"{i}.py").write_text(f"def f_{i}(x):\n    return x + {i}\n" * 20)
    (here / "r.toml").write_text(RECIPE.format(source=source))
    ran = cli("profile", "r.toml", "--steps", "2", "--device", "cpu", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["steps"] == 2 and sum(ran.json["budget"].values()) == pytest.approx(ran.json["wall_s"], rel=0.005)
    assert not (here / "home" / "runs").exists()


def test_a_script(cli: Cli, home: Home, here: Path) -> None:
    (here / "s.py").write_text("import torch, sys\nprint('said')\ntorch.ones(9, 9).mm(torch.ones(9, 9))\nsys.exit(7)")
    ran = cli("profile", "--json", "--home", str(home.work), "--", sys.executable, "s.py")
    assert ran.code == 7 and "said\n" in ran.err and "exit code 7" in ran.err
    assert ran.json["source"] == "s.py" and any("whole run" in note for note in ran.json["notes"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nothing",), "nothing to profile in 'nothing'; give a recipe.toml"),
        (("train.py",), "write armillary profile -- python train.py"),
        (("absent.json",), "no trace absent.json"),
        (("absent_module:step",), "no module 'absent_module' here"),
        (("x.json", "--device", "cpu"), "--set and --device are for recipes"),
        (("x.json", "y.json"), "'y.json' comes after x.json"),
        (("x.json", "--compare", "absent.json"), "no trace absent.json"),
        (("x.json", "--steps", "0"), "0 is not in the range"),
        (("x.json", "--html", "/nosuch/x.html"), "no folder /nosuch for --html /nosuch/x.html; make it"),
        (("x.json", "--trace", "absent/t.json"), "for --trace absent/t.json; make it"),
    ],
)
def test_what_cannot_be_profiled(cli: Cli, args: tuple[str, ...], said: str) -> None:
    assert said in error(cli("profile", *args))


@pytest.mark.parametrize("name", ["number", "absent", ""])
def test_a_name_that_is_no_function(cli: Cli, module: str, name: str) -> None:
    assert f"has no function '{name}'" in error(cli("profile", f"{module}:{name}"))


def test_errors_of_the_function_are_its_own(cli: Cli, module: str, here: Path) -> None:
    assert f"{module}:needs needs x, y; give a function without arguments" in error(cli("profile", f"{module}:needs"))
    line = 1 + (here / f"{module}.py").read_text().splitlines().index("    torch.ones(2) @ torch.ones(3)")
    said = error(cli("profile", f"{module}:raises"))
    assert said.startswith(f"{module}:raises raised RuntimeError: ") and f"({module}.py:{line}); put that" in said
    assert "leaves raised SystemExit: 4" in error(cli("profile", f"{module}:leaves"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "raised ZeroDivisionError: division by zero ({}.py:1)"),
        ("x = (", "raised SyntaxError"),
        ("import absent_module", "raised ModuleNotFoundError: No module named 'absent_module' ({}.py:1)"),
    ],
)
def test_a_module_that_cannot_be_imported(cli: Cli, here: Path, text: str, said: str) -> None:
    name = f"broken_{here.name}"
    (here / f"{name}.py").write_text(text)
    assert f"importing {name} {said.format(name)}" in error(cli("profile", f"{name}:step"))


def test_nothing_is_done_for_a_page_that_cannot_be_written(cli: Cli, here: Path) -> None:
    (here / "s.py").write_text("open('ran', 'w')\n")
    said = error(cli("profile", "--html", "absent/x.html", "--", sys.executable, "s.py"))
    assert "absent" in said and not (here / "ran").exists()


def test_files_are_told_by_how_they_begin(cli: Cli, module: str, here: Path) -> None:
    assert cli("profile", f"{module}:step", "--steps", "1", "--trace", "t.json").code == 0
    (here / "plain").write_bytes(b"\n " + (here / "t.json").read_bytes())
    (here / "packed.trace").write_bytes(gzip.compress((here / "t.json").read_bytes()))
    sqlite3.connect(here / "export.db").executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1)")
    for name in ("plain", "packed.trace"):
        assert cli("profile", name, "--json").json["steps"] == 1
    assert "export.db" in error(cli("profile", "export.db"))  # read as one of nsys, which it is not
    (here / "words").write_text("nothing of ours")
    assert "nothing to profile in 'words'" in error(cli("profile", "words"))


def test_what_a_comparison_printed_can_be_compared(cli: Cli, here: Path) -> None:
    (here / "p.json").write_text(made_profile().to_json())
    (here / "both.json").write_text(cli("profile", "p.json", "--compare", "p.json", "--json").out)
    ran = cli("profile", "p.json", "--compare", "both.json")
    assert ran.code == 0 and ", 1.00 ×" in ran.out, ran.err
    assert Profile.from_json(cli("profile", "both.json", "--json").out) == made_profile()
    (here / "both.json").write_text((here / "both.json").read_text()[:-100])
    assert "both.json is not JSON" in error(cli("profile", "both.json"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "not json", '{"traceEvents": []}', '{"wall_s": 1}'])
def test_a_broken_file_is_said(cli: Cli, here: Path, text: str) -> None:
    (here / "t.json").write_text(text)
    assert "t.json" in error(cli("profile", "t.json"))


def test_a_profile_made_elsewhere_is_shown(cli: Cli, here: Path) -> None:
    (here / "p.json").write_text(made_profile().to_json())
    ran = cli("profile", "p.json")
    assert ran.out.startswith("step 100 ms = useful 28 %") and "1. loader starves" in ran.out
    assert "train.py:88" in ran.out and "memory peak 5.00 GB" in ran.out


# --- plan amdahl


def test_amdahl(cli: Cli) -> None:
    ran = cli("plan", "amdahl", "gemm=0.8")
    assert "80 %" in ran.out and "1.67 ×" in ran.out and "5.00 ×" in ran.out
    rows = cli("plan", "amdahl", "norm=10%", "gemm=0.8", "--speedup", "4", "--json").json
    assert [row["part"] for row in rows] == ["gemm", "norm"] and rows[0]["speedup"] == pytest.approx(2.5)
    assert cli("plan", "amdahl", "gemm=0.8", "--quiet").out == "1.667\n"


@pytest.mark.parametrize("part", ["gemm", "gemm=x", "gemm=1.5", "=", "gemm=-1", "gemm=nan"])
def test_shares_that_make_no_sense(cli: Cli, part: str) -> None:
    assert ";" in error(cli("plan", "amdahl", part))
