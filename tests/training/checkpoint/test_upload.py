"""Checkpoints in a store: in parts, the manifest last, again after a failure, and back on another machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from armillary.errors import ArmillaryError, BadData
from armillary.parallel.consensus import Consensus
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import upload, uploader
from armillary.training.checkpoint.checkpoint import load, newest
from armillary.training.checkpoint.saver import Saver
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
    saver = Saver(run, ALONE, url=url, **options)
    for step in steps:
        saver.save(step, tensors(step), {})
        saver.finish()
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


def test_a_damaged_part_is_not_used(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    save_to(create_run(Home.at(tmp_path / "here"), {}, name="shared"), url, range(1, 2))
    part = next((tmp_path / "store" / "shared" / "1").glob("__0_0.distcp.00000.*"))
    part.write_bytes(bytes(4096))
    there = create_run(Home.at(tmp_path / "there"), {}, name="shared")
    with pytest.raises(BadData, match=r"__0_0\.distcp\.00000\.\w+ in file://.* is damaged"):
        newest(there, ALONE, url=url)
    assert there.checkpoint_steps() == []


def test_what_is_pruned_here_goes_there_as_well(recipe: Make, home: Home, tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    begun = begin(recipe("train.steps=6", "train.save_every=1", "train.keep=2", f"train.checkpoint_url={url}"), home)
    run = cut_off(begun, 3)
    assert upload.complete_steps(uploader.run_url(url, run))[-1:] in ([3], [4], [])
    done = train(begun.plan, run)
    assert done.finished and upload.complete_steps(uploader.run_url(url, run)) == run.checkpoint_steps() == [5, 6]


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
