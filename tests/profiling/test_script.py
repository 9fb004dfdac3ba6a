"""Scripts as they are: which steps are recorded, what is passed through, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.profiling.script import parse, profile_script
from armillary.store.home import Home

pytestmark = pytest.mark.slow  # real runs, whose shares depend on what else the machine does

Write = Callable[[str], int]
TRAIN = """
import sys, torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("end", __name__, sys.argv[1:])
sys.exit(int(sys.argv[2]))
"""
INFER = """
import torch

net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
with torch.no_grad():
    for _ in range(20):
        net(torch.randn(4, 8))
"""
PLAIN = "import torch\nfor _ in range(3): torch.mm(torch.ones(8, 8), torch.ones(8, 8))\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`write(text)` puts a script in the current folder."""
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("script.py").write_text(text)


def steps_in(trace: Path) -> int:
    return sum(event["name"].startswith("ProfilerStep#") for event in json.loads(trace.read_text())["traceEvents"])


def test_optimiser_steps_are_steps(write: Write, tmp_path: Path, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(TRAIN)
    trace = tmp_path / "t.json"
    ran = profile_script(["python", "-u", "script.py", "12", "5"], home=home, steps=3, trace_path=trace)
    assert (ran.code, ran.profile.steps, steps_in(trace)) == (5, 3, 3)
    captured = capfd.readouterr()
    assert captured.out == "end __main__ ['12', '5']\n" and "Traceback" not in captured.err
    assert any("3 optimiser steps were recorded" in note for note in ran.profile.notes)
    assert any("without the profiler" in note for note in ran.profile.notes)


@pytest.mark.slow
def test_it_may_be_ended_early(write: Write, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(TRAIN)
    ran = profile_script(["python", "script.py", "1000000", "5"], home=home, steps=2, stop=True)
    assert (ran.code, ran.profile.steps) == (0, 2)
    assert capfd.readouterr().out == ""


def test_forward_passes_are_steps_of_inference(write: Write, home: Home) -> None:
    write(INFER)
    ran = profile_script([sys.executable, "script.py"], home=home, steps=4)
    assert ran.profile.steps == 4
    assert any("4 forward passes" in note for note in ran.profile.notes)


@pytest.mark.slow
def test_a_script_without_steps_is_one_step(write: Write, home: Home) -> None:
    write(PLAIN)
    ran = profile_script(["python", "-m", "script"], home=home)
    assert (ran.code, ran.profile.steps) == (0, 1)
    assert any("the whole run is one step" in note for note in ran.profile.notes)


def test_a_script_that_breaks_shows_its_own_traceback(
    write: Write, home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    write("import torch\ntorch.ones(2) + 1\n1 / 0\n")
    ran = profile_script(["python", "script.py"], home=home)
    text = capfd.readouterr().err
    assert ran.code == 1
    assert "Traceback" in text and "script.py" in text and text.endswith("ZeroDivisionError: division by zero\n")
    assert "run_script" not in text and "runpy" not in text


@pytest.mark.slow
def test_an_interpreter_without_torch_is_said(write: Write, home: Home) -> None:
    write(PLAIN)
    with pytest.raises(BadInput, match="has no torch"):
        profile_script(["python", "-S", "-I", "script.py"], home=home)


@pytest.mark.slow
def test_a_script_that_kills_itself(write: Write, home: Home) -> None:
    write("import os\nos._exit(7)\n")
    with pytest.raises(ArmillaryError, match=r"script.py ended with exit code 7 .* run it by itself first"):
        profile_script(["python", "script.py"], home=home)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.sh"], "is not python"),
        (["python"], "nothing to profile"),
        (["python", "-c", "1"], "nothing to profile"),
        (["python", "-m"], "nothing to profile"),
        (["python", "absent.py"], "no script absent.py"),
        (["python9.9", "script.py"], "no program python9.9"),
    ],
)
def test_what_cannot_be_run(write: Write, words: list[str], said: str) -> None:
    write(PLAIN)
    with pytest.raises((BadInput, NotFound), match=said):
        parse(words)


def test_options_of_python_are_kept(write: Write) -> None:
    write(PLAIN)
    command = parse(["python3", "-X", "dev", "-u", "script.py", "-m", "x"])
    assert (command.options, command.target) == (("-X", "dev", "-u"), ("script.py", "-m", "x"))
