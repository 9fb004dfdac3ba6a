"""Gauges reach the trackers that were asked for, and no tracker stops a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import BadInput, MissingPart
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.prepare_run import train_recipe
from armillary.training.telemetry import trackers
from armillary.training.telemetry.trackers import Sink, Trackers, check_trackers, flat

RECIPE = {"model": {"name": "x"}, "train": {"lr": 1e-3, "betas": [0.9, 0.95]}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(Home.at(tmp_path / "home"), RECIPE, text="", overrides=(), plan={}, model="x", steps=3)


def silent(text: str) -> None:
    raise AssertionError(text)


def test_a_recipe_names_its_trackers() -> None:
    table = {"model": {"name": "armillary-2m"}, "train": {"track": ["tensorboard"]}}
    assert recipe_from_dict(table, ["train.track=tensorboard,wandb"]).train.track == ("tensorboard", "wandb")
    with pytest.raises(BadInput, match=r"train.track=tensorbord is not known; did you mean tensorboard\?"):
        recipe_from_dict(table, ["train.track=tensorbord"])


def test_what_is_not_installed_is_said_before_the_run(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_trackers(())
    with pytest.raises(MissingPart, match=r"MLflow needs mlflow: pip install 'armillary\[tracking\]'"):
        Trackers(["mlflow"], run, say=silent)


def having(monkeypatch: pytest.MonkeyPatch, sink: Sink | Exception) -> None:
    def opened(run: Run, recipe: Mapping[str, Any], start: int) -> Sink:
        if isinstance(sink, Exception):
            raise sink
        return sink

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(trackers.OPENERS, "wandb", opened)


def test_one_that_fails_is_said_once_and_left(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    seen: list[int] = []

    def send(step: int, gauges: Mapping[str, float]) -> None:
        seen.append(step)
        if step == 1:
            raise ConnectionError("no route\nto host")

    having(monkeypatch, Sink(send=send, close=lambda: seen.append(-1)))
    said: list[str] = []
    with Trackers(["wandb"], run, say=said.append) as track:
        for step in range(5):
            track(step, {"loss": 1.0})
    assert seen == [0, 1]
    assert said == ["Weights & Biases gave up (no route to host); training continues, gauges.jsonl has everything"]


def test_one_that_does_not_open_is_said_once(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    having(monkeypatch, RuntimeError("not logged in"))
    said: list[str] = []
    with Trackers(["wandb"], run, say=said.append) as track:
        track(0, {"loss": 1.0})
    assert len(said) == 1 and "not logged in" in said[0]


def test_one_that_does_not_close_is_said(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    def close() -> None:
        raise OSError("disk full")

    having(monkeypatch, Sink(send=lambda step, gauges: None, close=close))
    said: list[str] = []
    with Trackers(["wandb"], run, say=said.append) as track:
        track(0, {})
    assert len(said) == 1 and "disk full" in said[0]


def test_a_recipe_is_flat_for_others() -> None:
    assert flat(RECIPE) == {"model.name": "x", "train.lr": 1e-3, "train.betas": [0.9, 0.95]}


@pytest.mark.filterwarnings("ignore")  # of other people's packages
def test_tensorboard_has_what_was_sent(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Trackers(["tensorboard"], run, recipe=RECIPE, say=silent) as track:
        for step in range(4):
            track(step, {"loss": 3.0 - step, "tokens_per_s": 100.0 * step})
    with Trackers(["tensorboard"], run, recipe=RECIPE, start=2, say=silent) as track:  # resumed at step 2
        for step in range(2, 5):
            track(step, {"loss": 30.0 - step})
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "tokens_per_s"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (0, 3.0),
        (1, 2.0),
        (2, 28.0),
        (3, 27.0),
        (4, 26.0),
    ]
    assert "train.lr" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore")
def test_a_run_sends_its_gauges(home: Home, recipe: Callable[..., Recipe]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = recipe("train.steps=3", "train.track=tensorboard", "train.profile_every=0")
    losses: list[float] = []
    done = train_recipe(wanted, home=home, device="cpu", watch=lambda report: losses.append(report.gauges["loss"]))
    events = EventAccumulator(str(done.run.folder / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert {"val_loss", "grad_norm", "tokens_per_s"} <= set(events.Tags()["scalars"])


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_what_was_sent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for start, steps in ((0, range(3)), (3, range(3, 5))):  # the second goes on with the first's run
        with Trackers(["mlflow"], run, recipe=RECIPE, start=start, say=silent) as track:
            for step in steps:
                track(step, {"loss": 3.0 - step})
    client = MlflowClient(f"sqlite:///{run.folder.parent / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("armillary").experiment_id])
    assert found.info.run_name == run.name and found.info.status == "FINISHED"
    assert found.data.params["train.lr"] == "0.001"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, 3.0 - step) for step in range(5)]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_an_offline_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Trackers(["wandb"], run, recipe=RECIPE, say=silent) as track:
        assert wandb.run.id == run.id
        for step in range(3):
            track(step, {"loss": 3.0 - step})
        assert wandb.run.summary["loss"] == 1.0 and wandb.run.config["train.lr"] == 1e-3
    (kept,) = (run.folder / "wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 0
