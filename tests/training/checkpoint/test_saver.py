"""Saving beside training: what is saved is the state at the request, one save at a time, and no failure is silent."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.training.checkpoint import saver as saving
from armillary.training.checkpoint import shard_writer_process
from armillary.training.checkpoint.checkpoint import load, newest, saved_steps
from armillary.training.checkpoint.save_in_flight import Saved
from armillary.training.checkpoint.saver import Saver
from armillary.training.checkpoint.shard_writer import ShardWriter
from armillary.training.checkpoint.staging import call_before_steps, fits_memory
from tests.fork_server import ForkServer
from tests.ranks import Ranks

ALONE = Consensus(rank=0, size=1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(Home.at(tmp_path), {})


def slow_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes begin when the event is set."""
    begin, write = threading.Event(), ShardWriter.ask

    def later(self: ShardWriter, job: Any) -> Any:
        begin.wait(20)
        return write(self, job)

    monkeypatch.setattr(ShardWriter, "ask", later)
    return begin


def test_training_goes_on_and_the_state_of_the_request_is_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(200_000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    saver, write = Saver(run, ALONE), slow_writes(monkeypatch)
    call_before_steps(optimizer, saver.before_update)
    saver.save(1, {"w": weight, "count": torch.tensor(5)}, {"loss": 2.5})
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert saved_steps(run) == [] and saver.take_saved() == [], "nothing is written yet, and three steps were taken"
    write.set()
    saver.finish()
    (saved,) = saver.take_saved()
    assert saved.step == 1 and saved.seconds > saved.stall_s >= 0.0 and saved.wait_s < 0.1
    saver.close()
    found = {"w": torch.zeros(200_000), "count": torch.tensor(0)}
    assert load(run.checkpoint(1), found, ALONE)["loss"] == 2.5
    assert torch.equal(found["w"], torch.ones(200_000)) and found["count"] == 5


def test_a_save_waits_for_the_one_in_flight(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, write, join = Saver(run, ALONE), slow_writes(monkeypatch), Saver._join
    saver.save(1, {"w": torch.ones(4)}, {})
    assert saved_steps(run) == []

    def joining(self: Saver) -> None:
        write.set()  # the second save is about to wait
        join(self)

    monkeypatch.setattr(Saver, "_join", joining)
    saver.save(2, {"w": torch.zeros(4)}, {})
    assert saved_steps(run)[0] == 1, "the second began when the first was committed"
    saver.finish()
    first, second = saver.take_saved()
    assert second.stall_s >= second.wait_s > first.wait_s
    saver.close()


def test_a_writer_that_is_killed_is_replaced(run: Run) -> None:
    saver = Saver(run, ALONE)
    saver.save(1, {"w": torch.ones(4)}, {})
    saver.finish()
    assert saver._shard is not None
    os.kill(saver._shard.writer.pid, signal.SIGKILL)
    saver.save(2, {"w": torch.zeros(4)}, {})
    saver.finish()
    saver.close()
    assert saved_steps(run) == [1, 2] == [saved.step for saved in saver.take_saved()]


def test_errors_that_pass_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    tried: list[str] = []

    def write(path: str, view: memoryview, pool: Any) -> str:
        tried.append(path)
        if len(tried) < 3:
            raise OSError(errno.EIO, "Input/output error")
        return "digest"

    monkeypatch.setattr(shard_writer_process, "write", write)
    monkeypatch.setattr(shard_writer_process, "RETRIES_S", (0.0, 0.0, 0.0))
    layout: dict[str, Any] = {"size": 8, "items": []}
    with mmap.mmap(-1, 8) as buffer, ThreadPoolExecutor(1) as pool:
        done = shard_writer_process.run({"path": "x"}, layout, buffer, pool)
        assert len(tried) == 3 and done["block_sha256"] == "digest"
        tried.clear()
        monkeypatch.setattr(shard_writer_process, "RETRIES_S", (0.0,))
        assert shard_writer_process.run({"path": "x"}, layout, buffer, pool)["errno"] == errno.EIO and len(tried) == 2


def test_a_folder_that_cannot_be_written_is_an_error_at_the_next_step(run: Run) -> None:
    saver = Saver(run, ALONE)
    saver.save(1, {"w": torch.ones(4)}, {})
    saver.finish()
    folder = run.folder / "checkpoints"
    folder.rename(run.folder / "moved")
    folder.write_text("no folder")
    saver.save(2, {"w": torch.ones(4)}, {})
    with pytest.raises(ArmillaryError, match=r"cannot write a checkpoint to .*; check the disk and train again"):
        saver.finish()
    with pytest.raises(ArmillaryError, match="cannot write a checkpoint"):
        saver.check()
    saver.close()


KILLED = """
import os, signal, sys, time
from pathlib import Path
import torch
from armillary.parallel.consensus import Consensus
from armillary.store.runs import Run
from armillary.training.checkpoint import commit, saver as saving

folder, moment = Path(sys.argv[1]), sys.argv[2]
saver = saving.Saver(Run(folder=folder), Consensus(rank=0, size=1))

def save(step):
    saver.save(step, {"w": torch.full((8_000_000,), float(step))}, {})

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

save(1)
saver.finish()
writer = saver._shard.writer.pid
print(writer, flush=True)
if moment == "before the rename":
    saving.commit = lambda *four: commit.commit(*four[:4], die)
for step in range(2, 100):
    save(step)
    while moment == "while it writes" and not (folder / "checkpoints" / str(step)).exists():
        if list((folder / "checkpoints").glob(f".{step}.partial-*/__0_0.distcp")):
            os.kill(writer, signal.SIGSTOP)  # wherever it is, it comes no further
            die()
    saver.finish()
"""


@pytest.mark.parametrize("moment", ["while it writes", pytest.param("before the rename", marks=pytest.mark.slow)])
def test_a_rank_killed_during_a_save_leaves_the_one_before(
    moment: str, run: Run, tmp_path: Path, fork_server: ForkServer
) -> None:
    done = fork_server.start([str(run.folder), moment], tmp_path / "log", program=("-c", KILLED))
    assert done.wait(180) == -signal.SIGKILL, done.err
    (left,) = (run.folder / "checkpoints").glob(".*.partial-*/__0_0.distcp")
    assert moment == "while it writes" or (left.parent / "manifest.json").exists()
    writer = int(done.out)
    for _ in range(200):
        if not Path(f"/proc/{writer}").exists():
            break
        time.sleep(0.02)
    else:
        os.kill(writer, signal.SIGKILL)
        pytest.fail("the writer outlived its rank")
    step = int(left.parent.name.split(".")[1]) - 1
    assert newest(run, ALONE) == step
    found = {"w": torch.zeros(8_000_000)}
    load(run.checkpoint(step), found, ALONE)
    assert bool((found["w"] == step).all())


def test_what_cannot_be_deleted_costs_a_line(run: Run) -> None:
    def prune(saved: Saved) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    saver = Saver(run, ALONE, committed=prune)
    saver.save(1, {"w": torch.ones(4)}, {})
    saver.finish()
    assert [saved.step for saved in saver.take_saved()] == [1]
    assert saver.take_notes() == ["old checkpoints are not deleted: [Errno 16] Device or resource busy"]
    saver.close()


def test_the_thread_uses_the_devices_of_its_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, object]] = []
    monkeypatch.setattr(saving, "CopyStream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device)))
    saver = Saver(run, ALONE, device=torch.device("cuda", 3))
    saver._thread.submit(lambda: None).result()
    assert used == [("checkpoint_0", torch.device("cuda", 3))]
    saver.close()


# --- memory


def test_the_buffers_of_all_ranks_of_a_machine_must_fit() -> None:
    machines = ["a", "a", "b"]
    assert fits_memory([40, 40, 40], machines, 2, 60.0), "alone on its machine"
    assert not fits_memory([40, 40, 40], machines, 0, 100.0), "each alone would fit, both leave too little free"
    assert fits_memory([40, 40, 40], machines, 1, 120.0) and fits_memory([40], ["a"], 0, None)


@pytest.mark.parametrize("available", [600, 1e12])
def test_a_buffer_that_does_not_fit_is_on_disk(available: float, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "available_bytes", lambda: available)
    saver = Saver(run, ALONE)
    saver.save(1, {"w": torch.ones(400)}, {})
    saver.finish()
    assert saver._buffer is not None
    assert ("memfd" in os.readlink(f"/proc/self/fd/{saver._buffer.fd}")) == (available > 600)
    saver.close()
    assert saved_steps(run) == [1]


# --- ranks


def fail_on_rank_1(folder: str) -> list[str]:
    """Rank 1 cannot write its second file."""
    import torch.distributed as dist

    rank = dist.get_rank()
    saver = Saver(Run(folder=Path(folder)), Consensus(rank=rank, size=2))
    tensors = {"a": torch.arange(100_000.0), f"own_{rank}": torch.ones(3)}
    saver.save(1, tensors, {})
    saver.finish()
    if rank == 1:
        assert saver._shard is not None
        saver._shard.writer.ask = lambda job: {"errno": errno.ENOSPC, "error": "No space left on device"}  # type: ignore
    saver.save(2, tensors, {})
    said = []
    try:
        saver.finish()
    except ArmillaryError as error:
        said.append(str(error))
    saver.close(failed=bool(said))
    return said


def test_the_failure_of_one_rank_is_every_ranks(run: Run, ranks: Ranks) -> None:
    (first,), (second,) = ranks.run(2, fail_on_rank_1, str(run.folder))
    assert first == second and first.startswith("disk full while writing a checkpoint to ")
    assert saved_steps(run) == [1] and os.listdir(run.folder / "checkpoints") == ["1"]
