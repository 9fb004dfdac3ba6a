"""Checkpoints: a run that was cut off goes on as if nothing had happened, and no half checkpoint is ever used."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armillary.errors import ArmillaryError, BadData, Unreadable
from armillary.parallel.consensus import Consensus
from armillary.parallel.world import World
from armillary.spec.recipe import Recipe
from armillary.store import atomic, manifest, nan_safe_json
from armillary.store.gauges import read_gauges
from armillary.store.home import Home
from armillary.store.manifest import size_faults
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint.checkpoint import newest, save, saved_steps
from armillary.training.loop import train
from armillary.training.prepare_run import ResolvedRun, model_source, resolve_run
from armillary.training.run_lifecycle import RunLifecycle
from armillary.training.step.numerics import seed
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.trainer import Trainer

Make = Callable[..., Recipe]
STEPS = 8
FULL = r"disk full while writing a checkpoint to \S+/checkpoints; free some space and train again"


class Cut(Exception):
    """What ends a run without warning."""


def begin(recipe: Recipe, home: Home) -> ResolvedRun:
    begun = resolve_run(recipe, home, model_source(recipe, home))
    begun.prepare()
    return begun


def losses(run: Run) -> dict[int, float]:
    """The last that was written of each step."""
    return {record["step"]: record["loss"] for record in read_gauges(run.gauges)}


def cut_off(begun: ResolvedRun, after: int) -> Run:
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


def cut_off_and_continued(data: st.DataObject, recipe: Make, whole: Path) -> None:
    home = Home.at(whole)
    every = data.draw(st.integers(1, 4), label="save_every")
    after = data.draw(st.integers(0, STEPS - 2), label="cut off after step")
    precision = data.draw(st.sampled_from(["fp32", "bf16"]), label="precision")
    made = recipe(
        f"train.steps={STEPS}",
        f"train.save_every={every}",
        f"layout.precision={precision}",
        "train.eval_every=3",
        "train.keep=0",
    )
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


ANYWHERE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(ANYWHERE, max_examples=2)
@given(data=st.data())
def test_a_run_cut_off_anywhere_goes_on_with_the_same_bits(data: st.DataObject, recipe: Make, whole: Path) -> None:
    cut_off_and_continued(data, recipe, whole)


@pytest.mark.slow
@settings(ANYWHERE, max_examples=20)
@given(data=st.data())
def test_runs_cut_off_at_many_places_go_on_with_the_same_bits(data: st.DataObject, recipe: Make, whole: Path) -> None:
    cut_off_and_continued(data, recipe, whole)


@pytest.mark.parametrize("beside", [True, False])
def test_what_is_kept(beside: bool, recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=4", "train.save_every=2", f"train.checkpoint_async={beside}".lower()), home)
    run = begun.create_run()
    train(begun.plan, run)
    folder = run.checkpoint(2)
    about = json.loads((folder / "state.json").read_text())
    assert about["step"] == 2 and about["tokens_total"] == 512 and about["ranks"] == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {".metadata", "__0_0.distcp", "rng.pt", "state.json"}
    assert not size_faults(folder) and saved_steps(run) == [2, 4]
    records = [record for record in read_gauges(run.gauges) if "checkpoint_s" in record]
    assert records[-1]["step"] == 3 and records[-1]["checkpoints_total"] == 2
    assert all(record["checkpoint_stall_s"] >= record["checkpoint_wait_s"] >= 0.0 for record in records)
    if not beside:
        assert [record["step"] for record in records] == [1, 3]
        assert records[0]["checkpoint_bytes"] == sum(entry["bytes"] for entry in manifest["files"].values())


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
    assert size_faults(run.checkpoint(4)) and saved_steps(run) == [2]
    assert train(begun.plan, run).resumed_at == 2
    assert (run.folder / "checkpoints" / "4.damaged").is_dir(), "set aside, not deleted"


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


@contextmanager
def little_room(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_failed_write_keeps_the_last_good_one(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=6", "train.save_every=2"), home)
    run = cut_off(begun, 2)
    with little_room(200_000), pytest.raises(ArmillaryError, match=FULL) as caught:
        train(begun.plan, run)
    assert "\n" not in str(caught.value)
    assert saved_steps(run) == [2] and [p.name for p in (run.folder / "checkpoints").iterdir()] == ["2"]
    assert run.state.state == "failed"
    assert train(begun.plan, run).finished, "it goes on once there is room"


@pytest.mark.parametrize(("room", "facts"), [(4_000, 0), (9_000, 10_000)], ids=["rng.pt", "state.json"])
def test_a_disk_that_is_full_at_the_last_files_is_one_line(room: int, facts: int, home: Home) -> None:
    run, alone = create_run(home, {}), Consensus(rank=0, size=1)
    tensors = {"a": torch.ones(3)}
    save(run, 1, tensors, {}, alone)
    with little_room(room), pytest.raises(ArmillaryError, match=FULL) as caught:
        save(run, 2, tensors, {"text": "x" * facts}, alone)
    assert "\n" not in str(caught.value) and ".partial" not in str(caught.value)
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["1"]


def test_a_disk_that_says_so_only_when_it_is_synced(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, alone = create_run(home, {}), Consensus(rank=0, size=1)
    monkeypatch.setattr(atomic, "_sync", full)
    with pytest.raises(ArmillaryError, match=FULL):
        save(run, 1, {"a": torch.ones(3)}, {}, alone)
    assert not list((run.folder / "checkpoints").iterdir())


# --- content


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with checkpoints of two steps."""
    run = create_run(Home.at(tmp_path_factory.mktemp("two")), {})
    for step in (1, 2):
        save(run, step, {"a": torch.full((64,), float(step))}, {"loss": 1.0}, Consensus(rank=0, size=1))
    return run


def newest_and_back(run: Run) -> tuple[int, list[str]]:
    """The newest good checkpoint and what is said; a damaged one gets its name back."""
    said: list[str] = []
    step = newest(run, Consensus(rank=0, size=1), said.append)
    aside = run.folder / "checkpoints" / "2.damaged"
    if aside.exists():
        aside.rename(run.checkpoint(2))
    return step, said


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["__0_0.distcp", ".metadata", "rng.pt", "state.json"]),
    place=st.integers(0, 10**6),
    bit=st.integers(0, 7),
)
def test_one_changed_bit_anywhere_is_named_and_passed_over(two: Run, name: str, place: int, bit: int) -> None:
    path = two.checkpoint(2) / name
    before = path.read_bytes()
    spoilt = bytearray(before)
    spoilt[place % len(spoilt)] ^= 1 << bit
    path.write_bytes(spoilt)
    try:
        step, said = newest_and_back(two)
    finally:
        path.write_bytes(before)
    assert step == 1 and said == [
        f"checkpoint 2 of run {two.name} is damaged (the content of {name} has changed), kept as 2.damaged; "
        "the run continues from step 1"
    ]
    assert newest(two, Consensus(rank=0, size=1)) == 2


@pytest.mark.parametrize("times", [2, 100])
@pytest.mark.parametrize("part", ["block_sha256", "stat", "read_table"])
def test_a_disk_that_fails_to_read_is_no_damage(
    part: str, times: int, two: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again, and then said; nothing is set aside."""
    module = {"stat": os, "read_table": nan_safe_json}.get(part, manifest)
    read, failures = getattr(module, part), iter(range(times))

    def failing(path: Any, *more: Any, **options: Any) -> Any:
        if str(path).startswith(str(two.checkpoint(2))) and next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *more, **options)

    monkeypatch.setattr(manifest, "RETRIES_S", (0.0, 0.0))
    monkeypatch.setattr(module, part, failing)
    if times == 2:
        assert newest(two, Consensus(rank=0, size=1)) == 2
    else:
        with pytest.raises(Unreadable, match=r"2/\S+ cannot be read \(Input/output error\); check the disk, or remove"):
            newest(two, Consensus(rank=0, size=1))
    monkeypatch.undo()
    assert two.checkpoint_steps() == [1, 2]


@pytest.mark.parametrize("hashes", [False, True])
def test_the_manifest_of_an_older_checkpoint_is_read(two: Run, hashes: bool) -> None:
    """Sizes only, or with the hashes in a table of their own."""
    path, data = two.checkpoint(2) / "manifest.json", two.checkpoint(2) / "rng.pt"
    before, content = path.read_text(), data.read_bytes()
    entries = json.loads(before)["files"]
    assert all(entry["bytes"] and entry["block_sha256"] for entry in entries.values())
    older = {"step": 2, "files": {name: entry["bytes"] for name, entry in entries.items()}}
    sums = {"sums": {name: entry["block_sha256"] for name, entry in entries.items()}} if hashes else {}
    path.write_text(json.dumps(older | sums))
    try:
        assert newest(two, Consensus(rank=0, size=1)) == 2
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert newest_and_back(two)[0] == (1 if hashes else 2)
        data.write_bytes(content[:-1])
        assert newest_and_back(two)[0] == 1
    finally:
        path.write_text(before)
        data.write_bytes(content)


def test_a_run_goes_on_from_the_one_before_a_spoilt_one(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=6", "train.save_every=2"), home)
    run = cut_off(begun, 4)
    state = run.checkpoint(4) / "state.json"
    state.write_text(state.read_text().replace(" ", "\t", 1))
    said: list[str] = []
    assert train(begun.plan, run, say=said.append).resumed_at == 2
    assert any("checkpoint 4" in text and "the run continues from step 2" in text for text in said)
    assert [record["step"] for record in read_gauges(run.gauges)] == list(range(6)), "no step is told twice"


def test_a_run_that_fails_between_its_notes_says_how_far_it_was(recipe: Make, home: Home) -> None:
    run = cut_off(begin(recipe("train.steps=6", "train.save_every=2"), home), 4)
    last = list(read_gauges(run.gauges))[-1]
    assert (run.state.state, run.state.step, run.state.loss) == ("failed", 5, last["loss"])


def test_other_ranks_draw_other_numbers_at_each_step() -> None:
    def drawn(*key: int) -> float:
        seed(*key)
        return float(torch.rand(()))

    keys = [(number, rank, step) for number in (0, 1) for rank in (0, 1) for step in (0, 1, 50_000)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    torch.manual_seed(0)


def test_dropout_does_not_start_over_on_another_number_of_ranks(recipe: Make, home: Home) -> None:
    begun = begin(recipe("train.steps=4", "train.save_every=2"), home)
    run = cut_off(begun, 2)
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))

    def numbers(ranks: int) -> list[float]:
        state = run.checkpoint(2) / "state.json"
        state.write_text(re.sub(r'"ranks": \d+', f'"ranks": {ranks}', state.read_text()))
        with Trainer(begun.plan, alone) as trainer:
            seed(begun.recipe.train.seed, 0)
            RunLifecycle(run, trainer, None).resume(2)
            return torch.rand(4).tolist()

    def after(step: int) -> list[float]:
        seed(begun.recipe.train.seed, 0, step)
        return torch.rand(4).tolist()

    assert numbers(2) == after(2) != after(0)
    assert numbers(1) == after(0), "nothing was drawn in this run, and its state came back"
