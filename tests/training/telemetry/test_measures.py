"""What a run measures about itself: memory by category, goals, where the time of a step went."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from armillary.errors import BadInput
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.parallel.recompute import recompute
from armillary.parallel.timers import ExposedWaits, covered
from armillary.profiling.profile import BUDGET, Roofline
from armillary.spec.gauges import budget_gauge
from armillary.spec.tables.train import TrainJob
from armillary.training.parity.case import tiny
from armillary.training.stopping import Until
from armillary.training.telemetry.memory_gauges import CpuMeter, MemoryWatch, bytes_of
from armillary.training.telemetry.profiled_step import (
    FIRST,
    ProfileSchedule,
    profiled,
    without_core_contention,
    without_rank_waits,
)
from armillary.training.telemetry.step_clock import RecomputeTimer, StepClock, queued_s, rank_spread


def test_storages_are_counted_from_birth_to_end() -> None:
    weight = torch.zeros(1000)
    with MemoryWatch() as watch:
        watch.add([weight], "weights")
        kept = torch.ones(500) * 2  # the ones are gone at once
        with watch.phase("loss"):
            large = torch.ones(3000)
            del large
        small = kept[:10] + 1
        del small
    assert watch.peak() == {"weights": 4000, "activations": 2000, "loss": 12_000}


def test_views_and_growing_storages_count_once() -> None:
    with MemoryWatch() as watch:
        base = torch.zeros(100)
        assert base.view(10, 10).t().data_ptr() == base.data_ptr()
        base.untyped_storage().resize_(4000)
        base.untyped_storage().resize_(0)
    assert sum(watch.peak().values()) == 4000


def test_a_step_s_memory_adds_up_to_what_is_alive() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 8, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(32, 64)
    for measured in (False, True):
        meter = CpuMeter(model, optimizer, half=False)
        with meter.step() if measured else torch.enable_grad():
            with meter.phase("forward"):
                hidden = model(x)
            meter.mark_hidden(hidden)
            with meter.phase("loss"):
                loss = hidden.square().sum()
            with meter.phase("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found, weights = meter.sizes(), bytes_of(model.parameters())
    assert found["memory_weights_bytes"] == weights
    assert found["memory_optimizer_bytes"] == 2 * weights + 2 * 4
    assert found["memory_gradients_bytes"] == weights
    assert found["memory_activations_bytes"] >= 32 * 128 * 4


@pytest.mark.parametrize("text", ["val_loss", "val_loss=", "val_loss=low", "accuracy=1", "loss=nan", "=3"])
def test_goals_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match=r"is no goal; try --set train\.until=val_loss=3\.2"):
        Until.parse(text)


def test_a_goal_is_reached_at_or_below() -> None:
    goal = Until.parse(" val_loss = 3.5 ")
    assert goal.is_met({"val_loss": 3.5}) and not goal.is_met({"val_loss": 3.6}) and not goal.is_met({"loss": 1.0})


def test_a_goal_that_nothing_could_reach_is_refused() -> None:
    goal = Until.parse("val_loss=3")
    goal.check(TrainJob(steps=100, eval_every=50), held_out=True)
    with pytest.raises(BadInput, match=r"no text is held out to validate on; try --set data.held_out=0.01$"):
        goal.check(TrainJob(), held_out=False)
    for every in (0, 100, 200):
        with pytest.raises(BadInput, match=rf"eval_every={every} there is no validation; try --set train.eval_every=5"):
            goal.check(TrainJob(steps=100, eval_every=every), held_out=True)
    Until.parse("loss=3").check(TrainJob(eval_every=0), held_out=False)


def test_a_recorded_step_is_split_into_parts_that_add_up() -> None:
    a = torch.randn(200, 200)
    with profiled() as split:
        made = (a @ a).sum()
    assert float(made) == pytest.approx(float((a @ a).sum()))
    assert {"compute_s", "comm_s", "comm_exposed_s", "bubble_s", "overhead_s"} < set(split)
    assert split["compute_s"] > 0 and split["comm_s"] == split["comm_exposed_s"] == split["bubble_s"] == 0


def test_a_recorded_step_is_a_budget_too() -> None:
    a, roof = torch.randn(300, 300), Roofline(device="x", flops={"fp32": 1e12}, bytes_per_s=1e11, source="measured")
    with profiled(roof) as found:
        (a @ a).sum()
    parts = [found[budget_gauge(part)] for part in BUDGET]
    assert sum(parts) == pytest.approx(1.0) and found["kernels"] >= 2
    assert 0 < found["roofline_fraction"] < 1 and found["useful_fraction"] > 0 and found["unjudged_fraction"] < 0.5
    with profiled() as blind:
        (a @ a).sum()
    assert "roofline_fraction" not in blind and blind["useful_fraction"] == 0


@pytest.mark.parametrize("kind", ["full", "none"])
def test_recompute_is_timed(kind: str) -> None:
    model, tokens = build(tiny(), dtype=torch.float32, device="cpu", seed=1), torch.arange(8)[None]
    recompute(model, kind=kind)
    timer = RecomputeTimer(model, torch.device("cpu"))
    with timer.timed():
        hidden = model(tokens, tokens, plain)
    assert timer.take() == {}, "the forward pass is no recompute"
    hidden.sum().backward()
    found = timer.take()
    assert (found.get("recompute_s", 0.0) > 0) == (kind == "full")
    model(tokens, tokens, plain).sum().backward()
    assert timer.take() == {}, "not timed"


def test_time_in_which_others_had_the_cores_is_no_stall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "host_fraction": 0.45,
        "host_stall_fraction": 0.4,
        "launch_gap_fraction": 0.05,
        "comm_exposed_fraction": 0.0,
        "idle_fraction": 0.0,
    }
    assert without_core_contention(parts, 1.0, 0.3, 0.7)["host_stall_fraction"] == pytest.approx(0.05), (
        "Python as others let it"
    )
    assert without_core_contention(parts, 1.0, 1.0, 0.0) == parts, "Python that really ran"
    assert without_core_contention(parts, 1.0, 0.05, 0.7)["host_stall_fraction"] == pytest.approx(0.25), "it slept"
    assert without_core_contention({}, 1.0, 0.3, 0.7) == {}
    (tmp_path / "schedstat").write_text("1000 2500000000 7\n")
    monkeypatch.setattr("armillary.training.telemetry.step_clock.SCHEDSTAT", tmp_path / "schedstat")
    assert queued_s() == 2.5
    monkeypatch.setattr("armillary.training.telemetry.step_clock.SCHEDSTAT", tmp_path / "none")
    assert queued_s() == 0.0


def test_early_profiles_end_when_they_become_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ProfileSchedule(100, Roofline(device="x"))
    assert [taken for taken in range(20) if schedule.is_due(taken, taken)] == list(FIRST) and schedule.is_due(99, 50)
    fake = contextmanager(lambda roofline, unprofiled_s: iter([{"compute_s": 1.0}]))
    monkeypatch.setattr("armillary.training.telemetry.profiled_step.profiled", fake)
    clock = iter([0.0, 0.0, 0.1, 2.5, 10.0, 10.0, 10.1, 12.6])
    monkeypatch.setattr("armillary.training.telemetry.profiled_step.time.perf_counter", lambda: next(clock))
    with schedule.record(None) as gauges:
        assert gauges == {"compute_s": 1.0}
    assert schedule.is_due(9, 9)
    with schedule.record(None):
        pass
    assert not schedule.is_due(11, 11) and schedule.is_due(199, 3)
    assert not any(ProfileSchedule(0, Roofline(device="x")).is_due(step, step) for step in range(200))


def test_waits_for_other_ranks_are_no_work_of_the_host() -> None:
    parts = {
        "compute_s": 0.5,
        "comm_s": 0.1,
        "comm_exposed_s": 0.1,
        "bubble_s": 0.0,
        "overhead_s": 0.4,
        "unjudged_fraction": 0.5,
        "comm_exposed_fraction": 0.1,
        "host_fraction": 0.3,
        "sync_fraction": 0.0,
        "launch_gap_fraction": 0.1,
        "idle_fraction": 0.0,
        "host_stall_fraction": 0.25,
    }
    apart = without_rank_waits(parts, 0.3)
    assert apart["bubble_s"] == pytest.approx(0.3) and apart["overhead_s"] == pytest.approx(0.2)
    assert apart["idle_fraction"] == pytest.approx(0.3) and apart["comm_exposed_fraction"] == 0.0
    assert apart["host_fraction"] == pytest.approx(0.1) and apart["host_stall_fraction"] == pytest.approx(0.05)
    waited = without_rank_waits(parts, 0.0, 0.2)
    assert waited["comm_exposed_fraction"] == pytest.approx(0.2) and waited["host_fraction"] == pytest.approx(0.2)
    assert without_rank_waits(parts, 0.0) == parts and without_rank_waits({}, 1.0, 1.0) == {}


def test_the_slowest_rank_is_held_against_the_median_one() -> None:
    assert rank_spread((1.0, 1.5, 1.1)) == {"rank_spread_s": pytest.approx(0.4), "slowest_rank": 1.0}
    assert rank_spread((2.0, 1.0)) == {"rank_spread_s": 1.0, "slowest_rank": 0.0}, "of two, against the other one"
    assert rank_spread((1.0, 0.0)) == {}, "a rank that was recorded has no figure"
    assert rank_spread((1.0,)) == rank_spread(()) == {}
    assert rank_spread((1.0, 1.5, 1.1), (0.1, 0.4, 0.0))["slowest_rank_data_s"] == pytest.approx(0.3)


def test_what_the_loop_does_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 1.5, 2.5])
    monkeypatch.setattr("armillary.training.telemetry.step_clock.time.perf_counter", lambda: next(now))
    clock = StepClock()
    clock.start()
    assert clock.gauges() == {} and clock.unprofiled_s is None
    clock.stop(1.0, undisturbed=True)
    clock.exclude(0.2)
    clock.start()
    assert clock.gauges() == {"between_steps_s": pytest.approx(0.3)}, "validation has a gauge of its own"
    assert clock.gauges(overrun_s=0.4) == {"between_steps_s": 0.0}, "the device was still busy"
    clock.stop(9.0, undisturbed=False)
    assert clock.unprofiled_s == 1.0


def test_waits_are_taken_once() -> None:
    waits = ExposedWaits(torch.device("cpu"))
    waits.add(0.25)
    begin = waits.mark()
    waits.until_now(begin)
    assert waits.take() >= 0.25 and waits.take() == 0.0


def test_waits_inside_each_other_count_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == pytest.approx(4.0)


def test_what_belongs_to_no_step_is_forgotten() -> None:
    waits = ExposedWaits(torch.device("cpu"))
    waits.until_now(waits.mark() - 3.0)
    waits.add(1.0)
    waits.forget()
    assert waits.take() == 0.0
