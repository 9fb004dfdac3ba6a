"""Copies in memory: a lost machine's files come from its peer, and a crash costs a few steps."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from armillary.parallel.consensus import Consensus
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import peer_copies
from armillary.training.checkpoint.checkpoint import load, newest, save, saved_steps
from armillary.training.checkpoint.peer_copies import PeerCopies, gather_newest, memory_run, peer_shift, sweep_memory
from armillary.training.checkpoint.saver import Saver
from armillary.training.loop import train
from tests.ranks import Ranks
from tests.training.checkpoint.test_checkpoint import Make, begin, cut_off, losses

ALONE = Consensus(rank=0, size=1)


def test_the_peer_is_on_another_machine() -> None:
    assert peer_shift(["a"] * 4) == 0
    assert peer_shift(["a", "a", "b", "b"]) == 2
    assert peer_shift(["a", "b", "c"]) == 1
    assert peer_shift(["a", "a", "a", "b"]) in (1, 2, 3), "some have none elsewhere"


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peer_copies, "ROOT", tmp_path / "memory")
    return tmp_path / "memory"


def test_a_crash_costs_a_few_steps(recipe: Make, home: Home, memory: Path) -> None:
    begun = begin(recipe("train.steps=8", "train.save_every=0", "train.peer_copy_every=6"), home)
    whole = begun.create_run()
    expected = train(begun.plan, whole)
    assert not list(memory.glob("*/*")), "a run that ends in order frees its memory"
    run = cut_off(begun, 6)
    assert saved_steps(run) == [] and memory_run(run).checkpoint_steps() == [6]
    said: list[str] = []
    done = train(begun.plan, run, say=said.append)
    assert done.resumed_at == 6 and "the run continues from step 6, which is still in memory" in said
    assert losses(run) == losses(whole) and done.loss == expected.loss
    assert done.export is not None and expected.export is not None
    ours, theirs = ((folder / "model.safetensors").read_bytes() for folder in (done.export, expected.export))
    assert ours == theirs


def test_a_copy_in_memory_is_saved_when_the_run_stops_before_its_first_step(
    recipe: Make, home: Home, memory: Path
) -> None:
    begun = begin(recipe("train.steps=8", "train.save_every=0", "train.peer_copy_every=6"), home)
    run = cut_off(begun, 6)
    assert saved_steps(run) == [] and memory_run(run).checkpoint_steps() == [6]
    done = train(begun.plan, run, parent=os.getppid() + 1)  # as if the launcher were gone
    assert (done.resumed_at, done.steps, done.saved, done.finished) == (6, 6, 6, False)
    assert saved_steps(run) == [6] and not list(memory.glob("*/*"))


def test_a_copy_of_another_history_or_a_damaged_one_is_not_used(tmp_path: Path, memory: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    save(run, 3, {"w": torch.ones(4)}, {"restarts_total": 1}, ALONE)
    saver = Saver(run, ALONE, peers=PeerCopies(run, ALONE))
    saver.save(5, {"w": torch.ones(4)}, {"restarts_total": 0}, in_memory=True)
    saver.finish()
    assert newest(run, ALONE, copies=True) == 3, "the run was resumed without it since"
    saver.save(6, {"w": torch.ones(4)}, {"restarts_total": 1}, in_memory=True)
    saver.finish()
    saver.close()
    assert newest(run, ALONE, copies=True) == 6 and memory_run(run).checkpoint_steps() == [6]
    path = memory_run(run).checkpoint(6) / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[800] ^= 1
    path.write_bytes(content)
    assert newest(run, ALONE, copies=True) == 3


def test_memory_that_is_full_costs_a_line(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run(Home.at(tmp_path), {})
    saver = Saver(run, ALONE, peers=PeerCopies(run, ALONE))
    saver.save(1, {"w": torch.ones(4)}, {}, in_memory=True)
    saver.finish()
    assert saver.may_copy and saver._shard is not None
    full = {"errno": errno.ENOSPC, "error": "No space left on device"}
    monkeypatch.setattr(saver._shard.writer, "ask", lambda job: full)
    saver.save(2, {"w": torch.ones(4)}, {}, in_memory=True)
    saver.finish()
    (note,) = saver.take_notes()
    assert note.startswith("no more copies are kept in memory: disk full") and not saver.may_copy
    saver.close()


def test_the_rendezvous_store_does_not_fill_up(tmp_path: Path, memory: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    saver = Saver(run, ALONE, peers=PeerCopies(run, ALONE))
    for step in range(1, 5):
        saver.save(step, {"w": torch.ones(4)}, {}, in_memory=step != 3)
        saver.finish()
    assert set(saver._channel._own) == {"4/committed"}
    saver.close()


@pytest.mark.parametrize(
    ("state", "copied", "gone"),
    [("failed", 6, False), ("failed", 3, True), ("finished", 6, True), ("running", 3, False), ("deleted", 6, True)],
)
def test_memory_that_no_run_needs_is_freed(state: str, copied: int, gone: bool, tmp_path: Path, memory: Path) -> None:
    run = create_run(Home.at(tmp_path), {})
    save(run, 3, {"w": torch.ones(4)}, {}, ALONE)
    saver = Saver(run, ALONE, peers=PeerCopies(run, ALONE))
    saver.save(copied, {"w": torch.ones(4)}, {}, in_memory=True)
    saver.finish()
    saver.close()
    if state == "deleted":
        shutil.rmtree(run.folder)
    else:
        run.update(state=state)
    freed = sweep_memory()
    assert (memory_run(run).folder.exists(), freed > 0) == (not gone, gone)


# --- ranks


def tensors(rank: int) -> dict[str, torch.Tensor]:
    return {"shared": torch.arange(200_000.0), f"own_{rank}": torch.full((3,), float(rank))}


def keep_copies(folder: str, root: str) -> list[str]:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks, run, node = Consensus(rank=rank, size=4), Run(folder=Path(folder)), f"node{rank // 2}"
    peers = PeerCopies(run, ranks, node=node, root=Path(root) / node)
    saver = Saver(run, ranks, peers=peers)
    for step in (1, 2):
        saver.save(step, tensors(rank), {}, in_memory=True)
        saver.finish()
    saver.close()
    return sorted(path.name for path in peers.run.checkpoint(2).iterdir())


def restore(folder: str, root: str) -> bool:
    import torch.distributed as dist

    rank = dist.get_rank()
    ranks, run, home = Consensus(rank=rank, size=4), Run(folder=Path(folder)), Path(root) / f"node{rank // 2}"
    step = gather_newest(run, ranks, root=home)
    found = {name: torch.zeros_like(value) for name, value in tensors(rank).items()}
    load(memory_run(run, home).checkpoint(step), found, ranks)
    return step == 2 and all(torch.equal(found[name], value) for name, value in tensors(rank).items())


@pytest.mark.slow
def test_a_lost_machine_comes_back_from_its_peer(tmp_path: Path, ranks: Ranks) -> None:
    run = create_run(Home.at(tmp_path), {})
    files = ranks.run(4, keep_copies, str(run.folder), str(tmp_path))
    assert all(f"__{rank}_0.distcp" in names for names in files for rank in range(4)), "its own, and the peer's"
    shutil.rmtree(tmp_path / "node1")
    assert ranks.run(4, restore, str(run.folder), str(tmp_path)) == [True] * 4
