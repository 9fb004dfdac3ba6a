"""Ranks wait for one another longer than any exchange may take, and notice one that is gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from armillary.errors import BadData
from armillary.parallel.consensus import AgreedError, Consensus
from armillary.parallel.store_barrier import RankLost, StoreBarrier
from armillary.store import nan_safe_json
from armillary.store.writer_process import Process, machine
from tests.fork_server import ForkServer
from tests.ranks import Ranks


def waits(store: Any, size: int = 2, **settings: Any) -> list[StoreBarrier]:
    return [StoreBarrier(rank=rank, size=size, store=store, **settings) for rank in range(size)]


def test_heartbeats_keep_a_slow_rank_alive_however_short_the_silence_allowed() -> None:
    first, second = waits(dist.HashStore(), silent_s=1.0, beat_s=0.02)
    done: list[str] = []

    def tokenize() -> None:
        with first.working("prepare the data"):
            time.sleep(2.0)
            done.append("prepared")

    thread = threading.Thread(target=tokenize)
    thread.start()
    with second.working("prepare the data"):
        pass
    assert done == ["prepared"]
    thread.join()


def test_a_rank_that_falls_silent_is_named() -> None:
    _, second = waits(dist.HashStore(), silent_s=0.2)
    with pytest.raises(RankLost) as lost, second.working("prepare the data"):
        pass
    assert lost.value.rank == 0
    assert str(lost.value) == (
        "rank 0 gave no sign of life for 0.2 s while ranks waited for it to prepare the data; "
        "see what it said, and start again"
    )


def test_a_rank_that_failed_is_named_and_the_next_wait_is_in_step() -> None:
    first, second = waits(dist.HashStore())
    with pytest.raises(ZeroDivisionError), first.working("choose kernels"):
        raise ZeroDivisionError
    said = "rank 0 failed while ranks waited for it to choose kernels"
    with pytest.raises(RankLost, match=said), second.working("choose kernels"):
        pass
    thread = threading.Thread(target=_work, args=(first,))
    thread.start()
    _work(second)
    thread.join()


def _work(wait: StoreBarrier) -> None:
    with wait.working("load the model"):
        pass


def test_a_process_that_ended_is_noticed_at_once_on_this_machine_only() -> None:
    store = dist.HashStore()
    _, second = waits(store, silent_s=0.5)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    gone = asdict(Process(pid=ended.pid, born=1, host=socket.gethostname()))
    ended.wait()
    for where, said in ((machine(), "rank 0 ended while"), ("of another machine", "gave no sign of life")):
        store.set("store_barrier/process/0", nan_safe_json.dumps(gone | {"machine": where}))
        with pytest.raises(RankLost, match=said), second.working("prepare the data"):
            pass


# --- ranks


def refuses_on_one(broken: int) -> str:
    rank = dist.get_rank()

    def work() -> int:
        if rank == broken:
            raise BadData("no text in corpus; try --set data.path=…")
        return rank

    try:
        return str(Consensus(rank=rank, size=2).run_long("prepare the data", work))
    except AgreedError as error:
        return str(error)


def test_a_line_for_people_reaches_every_rank(ranks: Ranks) -> None:
    assert ranks.run(2, refuses_on_one, 0) == ["no text in corpus; try --set data.path=…"] * 2
    assert ranks.run(2, refuses_on_one, 1) == ["no text in corpus; try --set data.path=…"] * 2
    assert ranks.run(2, refuses_on_one, -1) == ["0", "1"]


# --- processes as torchrun starts them, with exchanges that time out long before the text is prepared

SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from armillary.parallel.world import join_world
from armillary.training import prepare_run as start
from armillary.training import open_data as opening

def slow(*args, **kwargs):
    print("preparing", flush=True)
    if "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3.0)
    return prepare_data(*args, **kwargs)

prepare_data, start.prepare_data = opening.prepare_data, slow
start.train = lambda plan, run, **settings: run.id
folder = sys.argv[1]
with join_world("cpu", timeout_s=100) as world:
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    from armillary.store.home import Home
    try:
        done = start.train_recipe(folder + "/recipe.toml", home=Home.at(folder + "/home"), device="cpu")
        print("trains", done, flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(1)
"""

RECIPE = """
[model]
name = "armillary-2m"
hidden = 32
heads = 2
kv_heads = 2
head_dim = 16
ffn = 64
num_layers = 1
vocab = 300
[data]
source = "{text}"
vocab = 300
[layout]
dp = 2
precision = "fp32"
[train]
steps = 2
sequence = 16
batch_tokens = 64
"""


def trained(server: ForkServer, folder: Path, *args: str) -> tuple[list[str], list[int]]:
    (folder / "text.txt").write_text("a small corpus of few words. " * 400)
    (folder / "recipe.toml").write_text(RECIPE.format(text=folder / "text.txt"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher's
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    line, program = [str(folder), *args], ("-c", SCRIPT)
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [
        server.start(line, folder / f"rank-{rank}", program=program, env=env, err_to_out=True)
        for rank, env in enumerate(places)
    ]
    codes = [process.wait(150) for process in started]
    return [process.out for process in started], codes


def test_ranks_wait_while_the_main_one_prepares_for_longer_than_a_timeout(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    said, codes = trained(fork_server, tmp_path)
    assert codes == [0, 0], said
    lines = [text.splitlines()[-1] for text in said]
    assert "preparing" in said[0] and lines[0] == lines[1] and lines[0].startswith("trains "), said


def test_ranks_notice_that_the_main_one_died_while_it_prepared(fork_server: ForkServer, tmp_path: Path) -> None:
    said, codes = trained(fork_server, tmp_path, "die")
    assert codes == [-signal.SIGKILL, 1], said
    assert "RankLost rank 0 ended while ranks waited for it to prepare the data; see what it said" in said[1]
