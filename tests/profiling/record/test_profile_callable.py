"""Recording: steps, modules, the line where Python stands, and what it costs."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from armillary.errors import BadInput
from armillary.profiling.record.hooks import ModuleScopes
from armillary.profiling.record.profile_callable import profile, record
from armillary.profiling.record.python_sampler import Sample, Sampler, free_stretches, merged, placed
from armillary.profiling.record.trace_recorder import TraceRecorder
from armillary.profiling.trace.event_classes import MODULE
from armillary.store.home import Home

pytestmark = pytest.mark.slow  # real runs, whose shares depend on what else the machine does


def events(path: Path, category: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == category]


def recorded(step: Callable[[], object], path: Path, steps: int = 2, **options: bool) -> Path:
    recorder = TraceRecorder(**options)
    record(recorder, step, steps)
    return recorder.save(path / "trace.json")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return self.body(x)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net, x = Net(), torch.randn(4, 8)
    return recorded(lambda: net(x).sum().backward(), tmp_path_factory.mktemp("trace"), steps=3)


def test_every_step_is_marked(trace: Path) -> None:
    names = [event["name"] for event in events(trace, "user_annotation") if event["name"].startswith("ProfilerStep#")]
    assert names == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]


def test_modules_have_their_paths_and_hold_their_operators(trace: Path) -> None:
    python = events(trace, "python_function")
    modules = [event for event in python if event["name"].startswith(MODULE)]
    assert {event["name"].removeprefix(MODULE) for event in modules} == {"Net", "body", "body.0", "body.1"}
    linear = next(event for event in modules if event["name"] == MODULE + "body.0")
    inside = [event for event in events(trace, "cpu_op") if event["name"] == "aten::addmm"]
    assert any(linear["ts"] <= op["ts"] and op["ts"] + op["dur"] <= linear["ts"] + linear["dur"] for op in inside)


def sampled_us(trace: Path) -> float:
    """Time that samples give to the line that sleeps."""
    lines, first = inspect.getsourcelines(Net.forward)
    line = first + next(i for i, text in enumerate(lines) if "sleep" in text)
    places = [event for event in events(trace, "python_function") if f"({line}): forward" in event["name"]]
    assert Path(__file__).name in places[0]["name"]
    return sum(event["dur"] for event in places)


def test_samples_name_the_very_line(trace: Path) -> None:
    assert sampled_us(trace) > 0


@pytest.mark.slow  # judges the clock
def test_samples_say_how_long_a_line_took(trace: Path) -> None:
    assert sampled_us(trace) == pytest.approx(4 * 10_000, rel=0.6)


def test_nothing_stays_behind(trace: Path) -> None:
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not [thread for thread in threading.enumerate() if thread.name == "armillary-sampler"]


def test_a_step_that_raises_ends_the_recording(tmp_path: Path) -> None:
    def step() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recorded(step, tmp_path)
    assert not torch.nn.modules.module._has_any_global_hook()
    assert recorded(lambda: torch.ones(2) + 1, tmp_path).exists()  # the profiler can start again


def test_a_forward_that_raises_leaves_no_open_module() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    names, net = ModuleScopes(), nn.Sequential(Breaks())
    names.start()
    for _ in range(2):
        with pytest.raises(ValueError):
            net(torch.ones(1))
    names.stop()
    assert [event["name"] for event in names.events(1, 0)] == [MODULE + "0", MODULE + "Sequential"] * 2


# --- samples


def event(category: str, start: float, end: float, name: str = "x") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "tid": 1, "ts": start, "dur": end - start}


def test_samples_stand_between_exact_events() -> None:
    step, op, wait = event("user_annotation", 0, 100), event("cpu_op", 20, 40), event("cpu_op", 60, 80, "aten::item")
    assert free_stretches([step, op, event("cpu_op", 25, 30), wait]) == [(0, 20), (40, 60), (60, 80), (80, 100)]


def test_a_sample_fills_its_stretch_and_none_inside_an_operator() -> None:
    stacks = [((f"{n}.py", n, "f"),) for n in range(4)]
    samples = [Sample(time_ns=at * 1000, thread=1, stack=stacks[n]) for n, at in enumerate((5, 30, 44, 50))]
    found = list(placed(samples, [(0, 20), (40, 60)], 0))
    assert found == [(0, 20, stacks[0]), (40, 47.0, stacks[2]), (47.0, 60, stacks[3])]


def test_samples_of_one_place_are_one_stay() -> None:
    f, g = (("a.py", 1, "f"),), (("a.py", 2, "g"),)
    assert list(merged([(0, 5, f), (5, 9, f), (9, 10, g), (20, 30, g)])) == [(0, 9, f), (9, 10, g), (20, 30, g)]


def test_a_waiting_thread_is_not_shown_and_a_busy_one_is() -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(1000))

    def waiting() -> None:
        stop.wait()

    threads = [threading.Thread(target=busy), threading.Thread(target=waiting)]
    for thread in threads:
        thread.start()
    sampler = Sampler()
    sampler.start()
    time.sleep(0.3)
    sampler.stop()
    stop.set()
    for thread in threads:
        thread.join()
    functions = {name for each in sampler.samples() for _, _, name in each.stack}
    assert "busy" in functions and "waiting" not in functions


# --- the library call


def test_profile_says_where_a_step_goes(tmp_path: Path) -> None:
    x, calls = torch.randn(64, 64), []

    def step() -> None:
        calls.append(1)
        torch.mm(x, x)

    kept = tmp_path / "kept.json"
    found = profile(step, steps=3, warmup=2, home=Home.at(tmp_path), trace_path=kept, source="mine")
    assert len(calls) == 2 + 3 + 1 + 3  # warm, plain, the first under the profiler, recorded
    assert (found.source, found.steps) == ("mine", 3)
    assert next(row for row in found.operators if row.name == "aten::mm").calls == 3
    assert any("without the profiler" in note for note in found.notes)
    assert json.loads(kept.read_text())["traceEvents"]


def test_the_twin_is_called_once_outside_the_steps(tmp_path: Path) -> None:
    x, calls = torch.randn(8, 8), []

    def step() -> None:
        calls.append("step")
        torch.mm(x, x)

    def twin() -> None:
        calls.append("twin")
        torch.mm(x, x).sin()

    found = profile(step, steps=3, warmup=2, home=Home.at(tmp_path), twin=twin)
    assert calls == ["step"] * (2 + 3) + ["twin"] + ["step"] * (1 + 3)  # warm, plain; then under the profiler
    assert {row.name: row.calls for row in found.operators}["aten::mm"] == 3
    assert not [row for row in found.operators if row.name == "aten::sin"]


@pytest.mark.parametrize("counts", [{"steps": 0}, {"warmup": -1}])
def test_counts_that_make_no_sense(counts: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="at least 1"):
        profile(lambda: None, **counts)
