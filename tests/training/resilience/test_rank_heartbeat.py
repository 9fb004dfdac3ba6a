"""Heartbeats of a rank: what counts as its progress, and its last word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.parallel.store_barrier import RankLost, StoreBarrier
from armillary.parallel.world import World
from armillary.training.checkpoint.shard_writer import ShardWriter
from armillary.training.resilience.rank_heartbeat import MUCH_IO, HeartbeatBoard, HeartbeatSender


def sender_in(folder: Path) -> HeartbeatSender:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    return HeartbeatSender(world, folder, HeartbeatBoard(dist.HashStore(), "run/0"))


def test_what_is_written_of_a_checkpoint_beside_a_step_is_no_progress(tmp_path: Path) -> None:
    sender, worker = sender_in(tmp_path), ShardWriter()
    (tmp_path / "part").write_bytes(bytes(16 * MUCH_IO))
    store, path = tmp_path / "store", str(tmp_path / "part")
    try:
        worker.ask({"upload": f"file://{store}/0", "paths": [path]})  # imports what it needs
        sender.progress.mark("backward")
        before = sender.beat().progress
        worker.ask({"upload": f"file://{store}/1", "paths": [path]})
        assert sender.beat().progress == before, "the rank is inside a step, which does not wait for the upload"
        sender.progress.mark("save")
        before = sender.beat().progress
        worker.ask({"upload": f"file://{store}/2", "paths": [path]})
        assert sender.beat().progress == before + 1, "the rank waits for it"
    finally:
        worker.close()


def test_a_rank_at_a_store_barrier_says_so_and_stands_still(tmp_path: Path) -> None:
    """Rank 1 never comes."""
    sender, barrier = sender_in(tmp_path), StoreBarrier(rank=0, size=2, store=dist.HashStore())
    beats = []

    def is_gone(other: int) -> bool:
        beats.append(sender.beat())
        return len(beats) > 2

    barrier._is_gone = is_gone  # type: ignore[method-assign]
    assert not sender.beat().in_barrier
    with pytest.raises(RankLost), barrier.working("write a checkpoint"):
        pass
    assert all(beat.in_barrier for beat in beats) and beats[1].progress == beats[2].progress, beats


def test_the_last_heartbeat_says_that_the_rank_has_left(tmp_path: Path) -> None:
    sender = sender_in(tmp_path)
    with sender:
        sender.end()
        beat = sender._board.read(0)
        assert beat is not None and beat.ended and not beat.failed
