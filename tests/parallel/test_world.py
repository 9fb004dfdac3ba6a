"""Joining the processes that act as one, and leaving so that nobody waits for ever."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from armillary.errors import BadInput, BadLayout
from armillary.model.device import fit_threads
from armillary.parallel.world import _device, _Place, _place, claim_gpu, first_host, join_world
from tests.fork_server import Command, ForkServer

SCRIPT = """
import sys, torch, torch.distributed as dist
from armillary.parallel.world import join_world
with join_world("cpu", timeout_s=60) as world:
    value = torch.tensor(float(world.rank + 1))
    dist.all_reduce(value)
    print(world.rank, world.size, value.item(), flush=True)
    if world.rank == 1 and "fail" in sys.argv:
        raise SystemExit("rank one gives up")
    dist.all_reduce(value)
"""


def start(server: ForkServer, folder: Path, *args: str) -> list[Command]:
    """Two processes as torchrun starts them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [
        server.start(args, folder / f"rank-{rank}", program=("-c", SCRIPT), env=env, err_to_out=True)
        for rank, env in enumerate(places)
    ]


@pytest.mark.slow  # by default ranks of tests/training/test_verb.py meet
def test_processes_meet_and_part(fork_server: ForkServer, tmp_path: Path) -> None:
    started = start(fork_server, tmp_path)
    codes, said = [process.wait(100) for process in started], [process.out for process in started]
    assert codes == [0, 0], said
    assert said == ["0 2 3.0\n", "1 2 3.0\n"]


@pytest.mark.slow  # judges the clock
def test_a_rank_that_gives_up_does_not_leave_the_other_hanging(fork_server: ForkServer, tmp_path: Path) -> None:
    begin = time.monotonic()
    test_a_rank_that_gives_up_ends_the_other(fork_server, tmp_path)
    assert time.monotonic() - begin < 55, "the other waited for the timeout"


def test_a_rank_that_gives_up_ends_the_other(fork_server: ForkServer, tmp_path: Path) -> None:
    started = start(fork_server, tmp_path, "fail")
    assert all(process.wait(100) > 0 for process in started), "none had to be killed"
    assert "rank one gives up" in started[1].out


def test_alone_there_is_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    with join_world("cpu") as world:
        assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
        assert not dist.is_initialized()


def test_a_slurm_step_says_where_ranks_meet() -> None:
    env = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_NODELIST": "gpu[07-09,12],spare1",
    }
    place = _place(env)
    assert (place.rank, place.size, place.local_rank) == (5, 8, 1)
    assert place.rendezvous == {"MASTER_ADDR": "gpu07", "MASTER_PORT": "32856"}


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({}, 8),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, 8),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 2),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
                "SLURM_CPUS_PER_TASK": "8",
            },
            8,
        ),
    ],
)
def test_a_rank_computes_with_its_part_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], threads: int
) -> None:
    """Of 64 cores this process may use 8."""
    used: list[int] = []
    monkeypatch.setattr("armillary.model.device.compute_threads", lambda ranks: max(1, 8 // ranks))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr("armillary.parallel.world.dist.is_initialized", lambda: True)
    monkeypatch.setattr("armillary.parallel.world.dist.get_rank", lambda: 0)
    monkeypatch.setattr("armillary.parallel.world.dist.get_world_size", lambda: 1)
    for name in [key for key in os.environ if key.startswith("SLURM_") or key in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    with join_world("cpu"):
        assert used == [threads]


def test_fewer_threads_than_cores_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("armillary.model.device.compute_threads", lambda ranks: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", pytest.fail)
    fit_threads()


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n1,n2", "n1"), ("n[3-5]", "n3"), ("a[01,04-09],b2", "a01"), ("n-[8]", "n-8")]
)
def test_the_first_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("gpus", "own_gpu", "index"), [(8, False, 3), (4, True, 3), (1, True, 0), (2, False, None), (1, False, None)]
)
def test_a_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: int, own_gpu: bool, index: int | None
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    place = _Place(rank=3, size=4, local_rank=3, own_gpu=own_gpu, rendezvous={})
    if index is None:
        with pytest.raises(BadLayout, match=f"process 4 on this machine has no GPU.*; try --devices {gpus}"):
            _device("cuda", place)
    else:
        assert _device("cuda", place) == torch.device("cuda", index)


@pytest.mark.parametrize(("visible", "own_gpu"), [(None, False), ("3", True), ("GPU-1a", True), ("0,1", False)])
def test_a_launcher_may_show_each_rank_its_own_gpu(visible: str | None, own_gpu: bool) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    place = _place(env if visible is None else env | {"CUDA_VISIBLE_DEVICES": visible})
    assert place.own_gpu == own_gpu


def test_two_ranks_with_one_gpu_are_named() -> None:
    store = dist.HashStore()
    claim_gpu(store, "GPU-1", 1)
    claim_gpu(store, "GPU-1", 1)  # its own
    store.set("gpu/GPU-2", f"0 {os.getppid()}")
    with pytest.raises(BadLayout, match="ranks 0 and 1 have the same GPU GPU-2; set CUDA_VISIBLE_DEVICES"):
        claim_gpu(store, "GPU-2", 1)
    store.set("gpu/GPU-3", f"0 {2**22 + 1}")  # above Linux' largest process id: a start before this one
    claim_gpu(store, "GPU-3", 1)
    assert store.get("gpu/GPU-3") == f"1 {os.getpid()}".encode()


def test_a_broken_launcher_is_named() -> None:
    with pytest.raises(BadInput, match="RANK=x is not a number"):
        _place({"RANK": "x", "WORLD_SIZE": "2"})
