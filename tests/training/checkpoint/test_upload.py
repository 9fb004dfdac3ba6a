"""Checkpoints in a store: in parts, the manifest last, again after a failure, and back on another machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from armillary.errors import ArmillaryError, BadInput
from armillary.parallel.consensus import Consensus
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import shard_writer_process, stored_run, upload, uploader
from armillary.training.checkpoint.checkpoint import load, newest
from armillary.training.checkpoint.commit import StoreChannel
from armillary.training.checkpoint.retention import Policy
from armillary.training.checkpoint.saver import Saver
from armillary.training.checkpoint.stored_run import begin_own, run_url
from armillary.training.loop import train
from tests.ranks import Ranks
from tests.training.checkpoint.test_checkpoint import Make, begin, cut_off

ALONE = Consensus(rank=0, size=1)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(upload, "PART", 4096)
    monkeypatch.setattr(upload, "RETRIES_S", (0.0, 0.0))
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Unreliable(MemoryFileSystem):
    """Fails every third write."""

    protocol = "unreliable"
    writes = 0

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        type(self).writes += 1
        if type(self).writes % 3 == 0:
            raise ConnectionError("the store is busy")
        super().pipe_file(path, value, **options)


fsspec.register_implementation("unreliable", Unreliable, clobber=True)


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(5000.0) + step, "n": torch.tensor(step)}


def save_to(run: Run, url: str, steps: range, **options: Any) -> list[str]:
    """Every step is uploaded: one that waits when the next is saved would be left out."""
    saver = Saver(run, ALONE, url=url, **options)
    for step in steps:
        saver.save(step, tensors(step), {})
        saver.finish()
        while saver.busy:
            time.sleep(0.005)
    saver.finish_uploads()
    saver.close()
    return saver.take_notes()


def same(run: Run, step: int) -> bool:
    found = {name: torch.zeros_like(value) for name, value in tensors(step).items()}
    load(run.checkpoint(step), found, ALONE)
    return all(torch.equal(found[name], value) for name, value in tensors(step).items())


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For stores that only this process knows."""
    monkeypatch.setattr(uploader.Uploader, "_send", lambda self, url, paths: upload.upload_files(url, paths))


@pytest.mark.parametrize("scheme", ["memory", "file", "unreliable"])
def test_another_machine_goes_on_from_the_store(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if scheme == "unreliable":
        in_process(monkeypatch)
    url = f"{scheme}://{tmp_path / 'store'}"
    here = create_run(Home.at(tmp_path / "here"), {}, name="shared")
    assert save_to(here, url, range(1, 4)) == []
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    said: list[str] = []
    assert newest(there, ALONE, said.append, url=url) == 3 and same(there, 3)
    assert said == [f"fetching checkpoint 3 from {url}/shared"]
    assert newest(there, ALONE, said.append, url=url) == 3 and len(said) == 1, "it is here already"


def test_deltas_bring_their_full_checkpoint_along(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    save_to(create_run(Home.at(tmp_path / "here"), {}, name="shared"), url, range(1, 4), full_every=9)
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    assert newest(there, ALONE, url=url) == 3 and there.checkpoint_steps() == [1, 3] and same(there, 3)


def test_an_upload_that_broke_off_sends_only_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, url = tmp_path / "file.bin", f"file://{tmp_path / 'store' / '5'}"
    path.write_bytes(bytes(range(256)) * 64)
    system = upload.file_system(url)[0]
    sent: list[str] = []

    def pipe(self: Any, place: str, content: bytes, **options: Any) -> None:
        if len(sent) == 2:
            raise ConnectionError("gone")
        sent.append(place)
        Path(place).write_bytes(content)

    monkeypatch.setattr(type(system), "pipe_file", pipe)
    with pytest.raises(ArmillaryError, match=r"the store file://.* fails \(ConnectionError: gone\); check the address"):
        upload.upload_files(url, [str(path)])
    assert len(sent) == 2 and upload.complete_steps(url.rpartition("/")[0]) == []
    monkeypatch.setattr(type(system), "pipe_file", lambda self, place, content: sent.append(place))
    parts = upload.upload_files(url, [str(path)])["file.bin"]
    assert len(parts) == 4 and len(set(sent)) == len(sent) == 4, "the parts that were there were not sent again"


def test_a_store_that_is_down_costs_a_warning_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    run = create_run(Home.at(tmp_path), {}, name="shared")
    notes = save_to(run, f"file://{tmp_path / 'store'}", range(1, 2))
    assert len(notes) == 1 and notes[0].startswith("checkpoint 1 is on the local disk only: the store file://")
    assert run.checkpoint_steps() == [1]


# --- what comes back


@pytest.mark.parametrize("harm", ["part", "manifest"])
def test_a_damaged_one_is_passed_over_and_replaced(harm: str, tmp_path: Path) -> None:
    url, store = f"memory://{tmp_path}", f"{tmp_path}/shared/2"
    save_to(create_run(Home.at(tmp_path / "here"), {}, name="shared"), url, range(1, 3))
    system = MemoryFileSystem()
    path = system.glob(f"{store}/__0_0.distcp.00000.*")[0] if harm == "part" else f"{store}/manifest.json"
    system.pipe_file(path, bytes(4096) if harm == "part" else system.cat_file(path)[:100])
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    said: list[str] = []
    assert newest(there, ALONE, said.append, url=url) == 1 and there.checkpoint_steps() == [1] and same(there, 1)
    assert said[1].startswith("checkpoint 2 of the store is not used: ") and len(said) == 3
    assert save_to(there, url, range(2, 3)) == []
    third = create_run(Home.at(tmp_path / "third"), {}, name="shared")
    assert newest(third, ALONE, url=url) == 2 and same(third, 2), "what was damaged was sent again"


def test_a_delta_that_is_here_has_its_full_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the process is killed."""
    url = f"memory://{tmp_path}"
    save_to(create_run(Home.at(tmp_path / "here"), {}, name="shared"), url, range(1, 4), full_every=9)
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    fetch = upload.fetch

    def killed(url: str, folder: Path) -> None:
        if url.endswith("/1"):
            raise KeyboardInterrupt
        fetch(url, folder)

    with monkeypatch.context() as patch:
        patch.setattr(upload, "fetch", killed)
        with pytest.raises(KeyboardInterrupt):
            newest(there, ALONE, url=url)
    assert there.checkpoint_steps() == []
    assert newest(there, ALONE, url=url) == 3 and same(there, 3)


def test_the_store_has_what_the_disk_has_lost(tmp_path: Path) -> None:
    url, run = f"memory://{tmp_path}", create_run(Home.at(tmp_path), {}, name="shared")
    save_to(run, url, range(1, 2))
    path = run.checkpoint(1) / "__0_0.distcp"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    said: list[str] = []
    assert newest(run, ALONE, said.append, url=url) == 1 and same(run, 1)
    assert said[1].endswith("kept as 1.damaged; the run continues from step 1")


def down(*_: Any, **__: Any) -> Any:
    raise ConnectionError("unreachable")


def test_a_store_that_is_down_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, here = f"memory://{tmp_path}", create_run(Home.at(tmp_path / "here"), {}, name="shared")
    save_to(here, url, range(1, 2))
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    new = create_run(Home.at(tmp_path / "new"), {}, name="shared")
    begin_own(new)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", down)
    said: list[str] = []
    assert newest(here, ALONE, said.append, url=url) == 1, "its own checkpoint is enough"
    assert len(said) == 1 and "fails (ConnectionError: unreachable)" in said[0]
    assert newest(new, ALONE, said.append, url=url) == 0, "a new run misses nothing there"
    with pytest.raises(upload.StoreFails, match="unreachable"):
        newest(there, ALONE, url=url)


def test_a_manifest_on_a_disk_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path / 'store'}"
    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.local.LocalFileSystem.mv", down)
        with pytest.raises(upload.StoreFails):
            upload.write_manifest(f"{url}/1", {"step": 1}, {})
    assert upload.complete_steps(url) == []
    upload.write_manifest(f"{url}/1", {"step": 1}, {})
    assert upload.complete_steps(url) == [1]


# --- whose they are


def test_another_run_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    url, small = f"memory://{tmp_path}", {"model": {"name": "armillary-2m"}}
    here = create_run(Home.at(tmp_path / "here"), small, name="shared")
    save_to(here, url, range(1, 3))
    new = create_run(Home.at(tmp_path / "new"), small, name="shared")
    begin_own(new)
    with pytest.raises(BadInput, match=rf"/shared has checkpoints of another run \({here.id}\); give this one another"):
        newest(new, ALONE, url=url)
    (note,) = save_to(new, url, range(5, 6), policy=Policy(last=1))
    assert "checkpoint 5 is on the local disk only" in note and "another run" in note
    other = create_run(Home.at(tmp_path / "other"), {"model": {"name": "armillary-25m"}}, name="shared")
    with pytest.raises(BadInput, match=r"another recipe \(model.name was armillary-2m and is armillary-25m\); restore"):
        newest(other, ALONE, url=url)
    assert upload.complete_steps(f"{url}/shared") == [1, 2]
    elsewhere = small | {"data": {"path": "/other/machine"}, "train": {"steps": 9}}
    assert newest(create_run(Home.at(tmp_path / "there"), elsewhere, name="shared"), ALONE, url=url) == 2


def test_a_new_run_draws_no_name_of_the_store(
    recipe: Make, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "calm-otter").mkdir(parents=True)
    monkeypatch.setattr("armillary.store.runs.ADJECTIVES", "calm")
    monkeypatch.setattr("armillary.store.runs.ANIMALS", "otter")
    begun = begin(recipe(f"train.checkpoint_url=file://{tmp_path / 'store'}"), home)
    run = begun.create_run()
    assert run.name == "calm-otter-2" and stored_run._own(run)["begun_here"]
    assert not stored_run._own(begun.create_run(name="calm-otter")), "which continues what is there"
    assert stored_run._own(begun.create_run(name="new", new=True))["begun_here"]
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.glob", down)
    assert begun.create_run().name == "calm-otter-3", "a store that does not answer is not waited for"


# --- which stay


def test_what_another_machine_kept_stays(tmp_path: Path) -> None:
    url = f"memory://{tmp_path}"
    here = create_run(Home.at(tmp_path / "here"), {}, name="shared")
    for step in range(1, 5):
        save_to(here, url, range(step, step + 1))
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    assert newest(there, ALONE, url=url) == 4
    assert save_to(there, url, range(5, 6), policy=Policy(last=2, milestones={"early": 1}, interval=3)) == []
    assert upload.complete_steps(f"{url}/shared") == [1, 3, 4, 5], "2 is none of the last, milestones or every third"


def test_a_run_thins_out_its_store(recipe: Make, home: Home, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begun = begin(recipe("train.steps=6", "train.save_every=1", "train.keep=2", f"train.checkpoint_url={url}"), home)
    run = cut_off(begun, 3)
    assert train(begun.plan, run).finished
    there = upload.complete_steps(run_url(url, run))
    assert there[-1] == 6 and len(there) <= 2 and run.checkpoint_steps() == [5, 6]


def test_a_step_that_is_taken_again_takes_its_deltas_along(tmp_path: Path) -> None:
    """What is a delta of other bytes would be read wrongly."""
    url, here = f"memory://{tmp_path}", create_run(Home.at(tmp_path), {}, name="shared")
    save_to(here, url, range(1, 4), full_every=9)
    assert save_to(here, url, range(1, 2)) == [] and upload.complete_steps(f"{url}/shared") == [1]


# --- failures


def gated_uploader(run: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[uploader.Uploader, threading.Event]:
    """It sends nothing before the event."""
    gate, following = threading.Event(), uploader.Uploader._next

    def gated(self: uploader.Uploader) -> int | None:
        gate.wait(20)
        return following(self)

    monkeypatch.setattr(uploader.Uploader, "_next", gated)
    return uploader.Uploader(run, "memory://s", ALONE, StoreChannel(ALONE, "", threading.Event()), Policy()), gate


def test_deltas_whose_full_checkpoint_fails_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def send(self: uploader.Uploader, url: str, paths: list[str]) -> Any:
        tried.append(url.rpartition("/")[2])
        if len(tried) > 3:
            pytest.fail("it is tried for ever")
        raise upload.StoreFails("the store fails; check it")

    monkeypatch.setattr(uploader.Uploader, "_send", send)
    sending, gate = gated_uploader(create_run(Home.at(tmp_path), {}), monkeypatch)
    sending.add(100, None)
    sending.add(120, 100)
    gate.set()
    sending.finish()
    assert tried == ["100"] and sending.busy == set()
    assert [note.split(" is on")[0] for note in sending.take_notes()] == ["checkpoint 100", "checkpoint 120"]
    sending.close()


def test_a_sending_process_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(self: uploader.Uploader, url: str, paths: list[str]) -> Any:
        raise OSError(None, "the process that writes it was killed")

    monkeypatch.setattr(uploader.Uploader, "_send", send)
    (note,) = save_to(create_run(Home.at(tmp_path), {}), "memory://store", range(1, 2))
    assert note.startswith("checkpoint 1 is on the local disk only: rank 0 cannot send it (OSError(None, 'the process")


def test_the_sending_process_answers_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str, paths: list[str]) -> Any:
        raise RuntimeError("a bug of a store's package")

    monkeypatch.setattr(upload, "upload_files", broken)
    answer = shard_writer_process.upload({"upload": "memory://x", "paths": []})
    assert answer == {"error": "it cannot be sent (RuntimeError: a bug of a store's package)"}


# --- ranks


def on_rank(folder: str, url: str) -> None:
    import torch.distributed as dist

    saver = Saver(Run(folder=Path(folder)), Consensus(rank=dist.get_rank(), size=2), url=url)
    saver.save(1, {"w": torch.arange(100_000.0)}, {})
    saver.finish()
    saver.finish_uploads()
    saver.close()


def test_each_rank_uploads_its_own(tmp_path: Path, ranks: Ranks) -> None:
    here = create_run(Home.at(tmp_path / "here"), {}, name="shared")
    url = f"file://{tmp_path / 'store'}"
    ranks.run(2, on_rank, str(here.folder), url)
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    assert newest(there, ALONE, url=url) == 1
    found = {"w": torch.zeros(100_000)}
    load(there.checkpoint(1), found, ALONE)
    assert torch.equal(found["w"], torch.arange(100_000.0))
