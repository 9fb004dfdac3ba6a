"""Checkpoints: a run that was cut off goes on as if nothing had happened, and no half checkpoint is ever used."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armillary.errors import ArmillaryError, BadData
from armillary.spec.recipe import Recipe
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.runs import Run
from armillary.training.checkpoint import faults, saved_steps
from armillary.training.loop import train
from armillary.training.start import Start, start, starting_point
from armillary.training.trainer import StepReport

Make = Callable[..., Recipe]
STEPS = 8


class Cut(Exception):
    """What ends a run without warning."""


def begin(recipe: Recipe, home: Home) -> Start:
    begun = start(recipe, home, starting_point(recipe, home))
    begun.prepare()
    return begun


def losses(run: Run) -> dict[int, float]:
    """The last that was written of each step."""
    return {record["step"]: record["loss"] for record in read_gauges(run.gauges)}


def cut_off(begun: Start, after: int) -> Run:
    """A run that dies once step `after` is written down."""
    run = begun.create_run()

    def watch(report: StepReport) -> None:
        if report.step == after:
            raise Cut

    with pytest.raises(Cut):
        train(begun.plan, run, watch=watch)
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_run_cut_off_anywhere_goes_on_with_the_same_bits(data: st.DataObject, recipe: Make, whole: Path) -> None:
    home = Home.at(whole)
    every = data.draw(st.integers(1, 4), label="save_every")
    after = data.draw(st.integers(0, STEPS - 2), label="cut off after step")
    precision = data.draw(st.sampled_from(["fp32", "bf16"]), label="precision")
    made = recipe(f"train.steps={STEPS}", f"train.save_every={every}", f"layout.precision={precision}",
                  "train.eval_every=3")  # fmt: skip
    begun = begin(made, home)
    uninterrupted = begun.create_run()
    expected = train(begun.plan, uninterrupted)
    run = cut_off(begun, after)
    last = (after + 1) // every * every
    assert saved_steps(run) == list(range(every, last + 1, every))
    done = train(begun.plan, run)
    assert done.resumed_at == last and done.finished
    assert losses(run) == losses(uninterrupted)
    assert (done.loss, done.val_loss) == (expected.loss, expected.val_loss)
    assert done.export is not None and expected.export is not None
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (done.export, expected.export))
    assert ours == theirs


def test_what_is_kept(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=4", "train.save_every=2"), home)
    run = begun.create_run()
    train(begun.plan, run)
    folder = run.checkpoint(2)
    about = json.loads((folder / "state.json").read_text())
    assert about["step"] == 2 and about["tokens_total"] == 512 and about["ranks"] == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "rng.pt", "state.json"}
    assert not faults(folder) and saved_steps(run) == [2, 4]
    records = [record for record in read_gauges(run.gauges) if "checkpoint_s" in record]
    assert [record["step"] for record in records] == [1, 3]
    assert records[0]["checkpoint_bytes"] == sum(manifest["files"].values())


@pytest.mark.parametrize("harm", ["cut", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over(harm: str, recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=6", "train.save_every=2"), home)
    run = cut_off(begun, 4)
    data = run.checkpoint(4) / "__0_0.distcp"
    if harm == "cut":
        data.write_bytes(data.read_bytes()[:-100])
    elif harm == "missing":
        data.unlink()
    else:
        (run.checkpoint(4) / "manifest.json").unlink()
    assert faults(run.checkpoint(4)) and saved_steps(run) == [2]
    assert train(begun.plan, run).resumed_at == 2


def test_a_checkpoint_of_another_model_is_refused(recipe: Make, home: Home) -> None:
    small = begin(recipe("train.steps=4", "train.save_every=2"), home)
    run = cut_off(small, 2)
    other = begin(recipe("train.steps=4", "model.hidden=48", "model.head_dim=12"), home)
    with pytest.raises(BadData, match=r"is no checkpoint of this model .*; name another run"):
        train(other.plan, run)


def test_other_text_is_refused(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=4", "train.save_every=2"), home)
    run = cut_off(begun, 2)
    other = begin(recipe("train.steps=4", "train.save_every=2", "data.held_out=0.3"), home)
    with pytest.raises(BadData, match=r"the text has changed since run .* was saved at step 2; put it back"):
        train(other.plan, run)


def test_what_a_killed_writer_left_is_swept_away(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=4", "train.save_every=2"), home)
    run = cut_off(begun, 2)
    left = f".3.partial-999999-1-aaaaaaaa-{socket.gethostname()}"
    shutil.copytree(run.checkpoint(2), run.folder / "checkpoints" / left)
    assert saved_steps(run) == [2]
    assert train(begun.plan, run).finished
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == ["2", "4"]


def test_a_failed_write_keeps_the_last_good_one(
    recipe: Make, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource
    import signal

    begun = begin(recipe("train.steps=6", "train.save_every=2"), home)
    run = cut_off(begun, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(ArmillaryError, match=r"disk full while writing a checkpoint to .*; free") as caught:
            train(begun.plan, run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "\n" not in str(caught.value)
    assert saved_steps(run) == [2] and [p.name for p in (run.folder / "checkpoints").iterdir()] == ["2"]
    assert run.state.shown == "failed"
    assert train(begun.plan, run).finished, "it goes on once there is room"
