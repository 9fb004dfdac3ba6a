"""Scripts as they are: which steps are recorded, what is passed through, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.profiling.record.profile_script import ScriptProfile, parse, profile_script
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
COMPILED = """
import sys, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def forward(self, x):
        return self.body(x) * 2

net, x = Net(), torch.randn(4, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def train(call, steps):
    for _ in range(steps):
        call(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def function(x):
    return net(x)

how = sys.argv[1]
if how == "late":
    train(net, 7)
if how == "in-place":
    net.compile(backend="eager")
train({"function": torch.compile(function, backend="eager"), "in-place": net}.get(how)
      or torch.compile(net, backend="eager"), 15)
from torch._dynamo.utils import counters
print(dict(counters["frames"]), dict(counters["stats"]), dict(counters["graph_break"]))
"""
OWN_PROFILER = """
import torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train():
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
def ready(own):
    print("cycle", len(own.key_averages()) > 10)
schedule = torch.profiler.schedule(wait=1, warmup=1, active=3)
with torch.profiler.profile(schedule=schedule, on_trace_ready=ready) as own:
    for _ in range(10):
        train()
        own.step()
with torch.profiler.profile() as own:
    train()
print("whole", {row.key: row.count for row in own.key_averages()}["aten::addmm"])
"""
IN_A_THREAD = """
import sys, threading, time, torch
def train():
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(int(sys.argv[1])):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
    print("trained")
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
CHILDREN = """
import multiprocessing, sys, torch
def work(n):
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(20):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    return n
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(pool.map(work, range(4)))
"""
RANKS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(15):
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
os.write(1, f"rank {dist.get_rank()} {__name__}\\n".encode())  # in one piece, as both ranks write
dist.destroy_process_group()
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


def noted(ran: ScriptProfile, text: str) -> bool:
    return any(text in note for note in ran.profile.notes)


@pytest.mark.parametrize("how", ["module", "in-place", "function", "late"])
def test_dynamo_compiles_what_it_would_without_us(
    write: Write, home: Home, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    write(COMPILED)
    plain = subprocess.run([sys.executable, "script.py", how], capture_output=True, text=True, check=True).stdout
    assert "{'total': 1, 'ok': 1}" in plain
    ran = profile_script(["python", "script.py", how], home=home, steps=4)
    captured = capfd.readouterr()
    assert (ran.code, captured.out) == (0, plain), captured.err
    assert noted(ran, "4 optimiser steps were recorded") and noted(ran, "would change what torch.compile makes")


def test_a_script_with_its_own_profiler_keeps_it(write: Write, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(OWN_PROFILER)
    ran = profile_script(["python", "script.py"], home=home)
    assert (ran.code, capfd.readouterr().out) == (0, "cycle True\ncycle True\nwhole 1\n")
    assert noted(ran, "uses torch's profiler itself") and noted(ran, "too few of 11 optimiser steps")


def test_training_in_a_thread_is_recorded(write: Write, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(IN_A_THREAD)
    ran = profile_script(["python", "script.py", "40"], home=home, steps=3)
    assert (ran.code, ran.profile.steps, capfd.readouterr().out) == (0, 3, "trained\n")
    assert noted(ran, "3 optimiser steps were recorded")


def test_a_thread_that_ends_early(write: Write, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(IN_A_THREAD)
    ran = profile_script(["python", "script.py", "8"], home=home, steps=30)
    assert (ran.code, capfd.readouterr().out) == (0, "trained\n")
    assert noted(ran, "only 8 optimiser steps were seen")


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_children_are_told_of(write: Write, home: Home, capfd: pytest.CaptureFixture[str], method: str) -> None:
    write(CHILDREN)
    ran = profile_script(["python", "script.py", method], home=home)
    assert (ran.code, capfd.readouterr().out) == (0, "[0, 1, 2, 3]\n")
    assert noted(ran, "2 child processes were not recorded") and noted(ran, "the whole run is one step")


def test_a_rank_of_torchrun_is_recorded(write: Write, home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    write(RANKS)
    words = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "script.py"]
    ran = profile_script(words, home=home, steps=3)
    assert (ran.code, ran.profile.steps) == (0, 3)
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 __main__", "rank 1 __main__"]
    assert noted(ran, "rank 0 of 2 was recorded") and noted(ran, "3 optimiser steps were recorded")
    with pytest.raises(BadInput, match="leave --stop out"):
        profile_script(words, home=home, stop=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.sh"], "is not python"),
        (["python"], "nothing to profile"),
        (["python", "-c", "1"], "nothing to profile"),
        (["python", "-m"], "nothing to profile"),
        (["python", "absent.py"], "no script absent.py"),
        (["python9.9", "script.py"], "no program python9.9"),
        (["/absent/torchrun", "script.py"], "no program /absent/torchrun"),
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
