"""The loader: the same batches with and without worker processes, and no way to hang or to leave something behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.errors import ArmillaryError, BadData
from armillary.training.data.batch import LAYOUT, Batch
from armillary.training.data.batch_sources import Batches
from armillary.training.data.loader import WAIT, DeviceBatch, Loader, to_device
from armillary.training.data.workers import Workers
from tests.training.data.failing import Failing

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def batches(make_shards) -> Batches:
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 99, draw.integers(1, 60)).tolist() for _ in range(80)]
    return Batches(shards=make_shards(documents, shard_tokens=400), sequence=16, batch=8, seed=3)


def same(found: DeviceBatch, expected: Batch) -> bool:
    return all(np.array_equal(getattr(found, name).numpy(), getattr(expected, name)) for name in LAYOUT)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_it_gives_what_batches_give_from_any_step_on(batches: Batches, workers: int) -> None:
    with Loader(batches, device=CPU, rank=1, world=2, workers=workers, start=5, stop=17) as loader:
        for step in range(5, 17):
            found, expected = loader.at(step), batches.at(step, rank=1, world=2)
            assert same(found, expected)
            assert found.num_targets == expected.num_targets
            assert found.has_documents == bool(expected.documents_BT.any())
            assert loader.wait_s >= 0
        with pytest.raises(AssertionError):
            loader.at(17)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_copies_arrive_before_they_are_used_and_are_never_overwritten(batches: Batches, workers: int) -> None:
    """Without any wait between steps: the streams must put themselves in order."""
    with Loader(batches, device=torch.device("cuda"), rank=0, world=1, workers=workers, start=0, stop=40) as loader:
        kept = [loader.at(step) for step in range(40)]
        for step, found in enumerate(kept):
            expected = batches.at(step)
            assert all(np.array_equal(getattr(found, name).cpu().numpy(), getattr(expected, name)) for name in LAYOUT)
            assert found.num_targets == expected.num_targets


def test_workers_need_no_torch() -> None:
    code = (
        "import sys, armillary.training.data.workers, armillary.training.data.batch_sources; "
        "print('torch' in sys.modules)"
    )
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, stdout=-1, check=True)
    assert ran.stdout.strip() == b"False"


def test_micro_batches_know_their_own_targets(batches: Batches) -> None:
    batch = batches.at(2)
    parts = to_device(batch, CPU).micro(3)
    assert [len(part.tokens_BT) for part in parts] == [3, 3, 2]
    for number, part in enumerate(parts):
        expected = Batch(**{name: getattr(batch, name)[3 * number : 3 * number + 3] for name in LAYOUT})
        assert same(part, expected)
        assert part.num_targets == expected.num_targets
        assert part.has_documents == bool(expected.documents_BT.any())


def test_a_profiler_sees_the_wait_as_the_loaders(batches: Batches) -> None:
    from armillary.profiling.trace.event_classes import host_state

    with Loader(batches, device=CPU, rank=0, world=1, workers=0, start=0, stop=4) as loader:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loader.at(0)
        assert WAIT in {event.name for event in profile.events()}
    assert host_state(WAIT, "annotation") == "loader"


def test_steps_are_asked_for_in_order(batches: Batches) -> None:
    with Loader(batches, device=CPU, rank=0, world=1, workers=0, start=0, stop=4) as loader:
        loader.at(0)
        with pytest.raises(AssertionError, match="step 2 asked for, 1 is next"):
            loader.at(2)


def test_leaving_early_ends_threads_and_processes(batches: Batches) -> None:
    for workers in (0, 2):
        with Loader(batches, device=CPU, rank=0, world=1, workers=workers, start=0, stop=10**9) as loader:
            loader.at(0)
        assert not loader._thread.is_alive()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_goes_bad_is_named(make_shards, workers: int) -> None:
    shards = make_shards([[1] * 50, [2] * 50], shard_tokens=10)
    batches = Batches(shards=shards, sequence=8, batch=2)
    bad = shards.folder / "train/00001.bin"
    bad.write_bytes(bad.read_bytes()[:-2])
    with (
        Loader(batches, device=CPU, rank=0, world=1, workers=workers, start=0, stop=20) as loader,
        pytest.raises(BadData, match=r"train/00001.bin has 98 bytes instead of 100; prepare the data again"),
    ):
        for step in range(20):
            loader.at(step)


def test_a_bug_in_a_worker_comes_with_its_traceback() -> None:
    with Loader(Failing(), device=CPU, rank=0, world=1, workers=1, start=0, stop=9) as loader:
        assert int(loader.at(0).tokens_BT[0, 0]) == 0
        loader.at(1)
        for _ in range(2):  # asked again, it fails again
            with pytest.raises(RuntimeError, match=r"loader worker 0 failed:(?s:.*)ZeroDivisionError: a bug"):
                loader.at(2)


def test_a_worker_that_is_killed_is_named(batches: Batches) -> None:
    with Workers(batches, rank=0, world=1, count=2, start=0, stop=10**6) as workers:
        os.kill(workers._workers[1]._process.pid, signal.SIGKILL)
        with pytest.raises(
            ArmillaryError, match=r"loader worker 1 \(process \d+\) was killed by SIGKILL .out of memory"
        ):
            for _ in range(100):
                workers.take(10)


def test_workers_outlive_ctrl_c_but_not_their_parent(batches: Batches, tmp_path: Path) -> None:
    """The script has no __main__ guard, gets SIGINT as a group, goes on, and is then killed outright."""
    script = tmp_path / "script.py"
    script.write_text(
        "import glob, os, signal, sys, torch\n"
        "from armillary.training.data.batch_sources import Batches\n"
        "from armillary.training.data.loader import Loader\n"
        "from armillary.training.data.shards import TokenShards\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "batches = Batches(shards=TokenShards.open(sys.argv[1]), sequence=16, batch=8)\n"
        "loader = Loader(batches, device=torch.device('cpu'), rank=0, world=1, workers=1, start=0, stop=10**6)\n"
        "loader.__enter__().at(0)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "for step in range(1, 9): loader.at(step)\n"
        "for file in glob.glob('/proc/self/task/*/children'): print(open(file).read(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(batches.shards.folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout.split()[0])
    for _ in range(100):
        if not Path(f"/proc/{worker}").exists() or "\nState:\tZ" in Path(f"/proc/{worker}/status").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"worker {worker} outlived its parent")
