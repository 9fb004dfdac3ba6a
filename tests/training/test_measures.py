"""What a run measures about itself: memory by category, goals, where the time of a step went."""

from __future__ import annotations

import pytest
import torch

from armillary.errors import BadInput
from armillary.spec.train_job import TrainJob
from armillary.training.memory import CpuMeter, bytes_of
from armillary.training.memory_watch import MemoryWatch
from armillary.training.until import Until
from armillary.training.waits import Waits, covered
from armillary.training.window import recorded


def test_storages_are_counted_from_birth_to_end() -> None:
    weight = torch.zeros(1000)
    with MemoryWatch() as watch:
        watch.hold([weight], "weights")
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
            meter.above(hidden)
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
    with pytest.raises(BadInput, match=r"write it like --until val_loss=3\.2"):
        Until.parse(text)


def test_a_goal_is_reached_at_or_below() -> None:
    goal = Until.parse(" val_loss = 3.5 ")
    assert goal.reached({"val_loss": 3.5}) and not goal.reached({"val_loss": 3.6}) and not goal.reached({"loss": 1.0})


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
    made, split = recorded(lambda: (a @ a).sum())
    assert float(made) == pytest.approx(float((a @ a).sum()))
    assert set(split) == {"compute_s", "comm_s", "comm_exposed_s", "bubble_s", "overhead_s"}
    assert split["compute_s"] > 0 and split["comm_s"] == split["comm_exposed_s"] == split["bubble_s"] == 0


def test_waits_are_taken_once() -> None:
    waits = Waits(torch.device("cpu"))
    waits.add(0.25)
    begin = waits.mark()
    waits.until_now(begin)
    assert waits.take() >= 0.25 and waits.take() == 0.0


def test_waits_inside_each_other_count_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == pytest.approx(4.0)


def test_what_belongs_to_no_step_is_forgotten() -> None:
    waits = Waits(torch.device("cpu"))
    waits.until_now(waits.mark() - 3.0)
    waits.add(1.0)
    waits.forget()
    assert waits.take() == 0.0
