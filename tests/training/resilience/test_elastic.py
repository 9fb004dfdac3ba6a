"""Elastic runs: the batches of a run do not depend on how many ranks share them, and ranks come and go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.spec.recipe import Recipe, to_toml
from armillary.store.gauges import read_gauges
from armillary.store.goodput import account_of_run
from armillary.store.home import Home
from armillary.store.run_events import read_events
from armillary.store.runs import find_run
from armillary.training.prepare_run import model_source, resolve_run
from armillary.training.trainer import Trainer
from tests.ranks import Ranks

Make = Callable[..., Recipe]
ROOT = Path(__file__).parents[3]


def losses(plan: str, steps: int = 3) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, checksum of the batch) of the first steps on this rank, and the held-out loss."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    world = World(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"))
    with Trainer(Plan.from_json(plan), world) as trainer:
        reports = [trainer.step(step) for step in range(steps)]
        found = [(r.gauges["loss"], r.gauges["grad_norm"], r.gauges["batch_checksum"]) for r in reports if r]
        return [*found, (trainer.validate() or 0.0, 0.0, 0.0)]


def plan_of(recipe: Recipe, home: Home) -> str:
    begun = resolve_run(recipe, home, model_source(recipe, home), cpu_ranks=4)
    begun.prepare()
    return begun.plan.to_json()


@pytest.mark.parametrize("layout", [[], ["layout.zero=3"]], ids=["ddp", "fsdp"])
def test_a_batch_that_does_not_divide_trains_as_in_one_process(
    layout: list[str], recipe: Make, home: Home, ranks: Ranks
) -> None:
    """8 rows on 3 ranks, in micro-batches of 2: 3, 3 and 2 rows."""
    alone = losses(plan_of(recipe("layout.micro_batch=2"), home))
    uneven = plan_of(recipe("layout.micro_batch=2", "layout.dp=3", "layout.uneven=true", *layout), home)
    for each in ranks.run(3, losses, uneven):
        for step, (got, wanted) in enumerate(zip(each, alone, strict=True)):
            assert got == pytest.approx(wanted, rel=1e-5), step
        assert [row[2] for row in each] == [row[2] for row in alone]


# --- 4 → 3 → 4 ranks, each a node of its own


class Nodes:
    """Nodes of one rank each, as processes of this machine."""

    def __init__(self, folder: Path, recipe: Path, home: Home) -> None:
        self.folder, self.recipe, self.home = folder, recipe, home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    def start(self) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "armillary", "train", str(self.recipe), "--home", str(self.home.work)]
        line += ["--nodes", f"3:4@localhost:{self.port}", "--devices", "1", "--run", "elastic"]
        file = (self.folder / f"node-{len(self.started)}.log").open("wb")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        node = subprocess.Popen(line, stdout=file, stderr=file, env=environment, start_new_session=True)
        self.started.append((node, file))
        return node

    def children(self, node: subprocess.Popen[bytes]) -> list[int]:
        return list(map(int, Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()))

    def rank_of(self, node: subprocess.Popen[bytes]) -> int:
        """The process of its one rank."""
        program = b"armillary.cli.train.rank"
        return next(pid for pid in self.children(node) if program in Path(f"/proc/{pid}/cmdline").read_bytes())

    def kill(self, node: subprocess.Popen[bytes]) -> None:
        """As if its machine were switched off: its launcher, and the rank, which has a session of its own."""
        children = self.children(node)
        node.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))

    def wait(self, condition: Callable[[], Any], seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said()
            time.sleep(0.2)

    def steps(self) -> int:
        with suppress(Exception):
            return sum(1 for _ in read_gauges(find_run(self.home, "elastic").gauges))
        return 0

    def close(self) -> None:
        for node, file in self.started:
            if node.poll() is None:
                self.kill(node)
            node.wait()
            file.close()


def is_host(node: subprocess.Popen[bytes], port: int) -> bool:
    """Whether the nodes meet in this process: without it the run ends, as with torchrun."""
    listening = {row.split()[9] for row in Path("/proc/net/tcp").read_text().splitlines()[1:] if _listens(row, port)}
    listening |= {row.split()[9] for row in Path("/proc/net/tcp6").read_text().splitlines()[1:] if _listens(row, port)}
    files = [os.readlink(path) for path in Path(f"/proc/{node.pid}/fd").iterdir()]
    return any(f"socket:[{number}]" in files for number in listening)


def _listens(row: str, port: int) -> bool:
    columns = row.split()
    return columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port


@pytest.fixture
def nodes(recipe: Make, tmp_path: Path, home: Home) -> Iterator[Nodes]:
    path = tmp_path / "recipe.toml"
    path.write_text(to_toml(recipe(*ELASTIC)))
    made = Nodes(tmp_path, path, home)
    yield made
    made.close()


ELASTIC = (
    "layout.dp=4",
    "layout.micro_batch=2",
    "train.steps=3000",
    "train.eval_every=0",
    "train.save_every=20",
    "train.lr=1e-4",
)


@pytest.mark.slow
def test_ranks_are_lost_and_come_back_with_the_same_batches(nodes: Nodes, recipe: Make, home: Home) -> None:
    first = [nodes.start() for _ in range(4)]
    nodes.wait(lambda: "4 ranks on dp=4" in nodes.said() and nodes.steps() > 30)
    nodes.kill(first[-1] if not is_host(first[-1], nodes.port) else first[0])
    began = time.monotonic()
    nodes.wait(lambda: "lost" in nodes.said())
    noticed_s = time.monotonic() - began
    nodes.wait(lambda: "3 ranks on dp=3: 2 or 3 rows of the batch of 8 each" in nodes.said())
    before = nodes.steps()
    nodes.wait(lambda: nodes.steps() > before + 30)
    nodes.start()
    nodes.wait(lambda: nodes.said().count("4 ranks on dp=4") == 2)
    before = nodes.steps()
    nodes.wait(lambda: nodes.steps() > before + 20)
    for node, _ in nodes.started:
        node.send_signal(signal.SIGTERM)
    nodes.wait(lambda: all(node.poll() is not None for node, _ in nodes.started))
    run = find_run(home, "elastic")
    got = [(each["step"], each["loss"], each["batch_checksum"]) for each in read_gauges(run.gauges)]
    account = account_of_run(run, now=time.time())
    assert account is not None and account.num_failures == 1 and account.seconds["waiting"] > 0
    whole = losses(plan_of(recipe(*ELASTIC, "layout.dp=1"), home), len(got))[:-1]
    apart = max(abs(loss / row[0] - 1) for (_, loss, _), row in zip(got, whole, strict=True))
    print(f"lost node noticed after {noticed_s:.1f} s; {len(got)} steps, losses at most {apart:.1e} apart")
    assert noticed_s < 10
    assert [(step, checksum) for step, _, checksum in got] == [(n, row[2]) for n, row in enumerate(whole)]
    assert [loss for _, loss, _ in got] == pytest.approx([row[0] for row in whole], rel=1e-4)


@pytest.mark.slow
def test_the_node_of_a_straggler_is_left_out_at_the_next_restart(nodes: Nodes, home: Home) -> None:
    """One rank is stopped most of the time; another one dies, and all meet again without the node of the first."""
    nodes.recipe.write_text(nodes.recipe.read_text().replace("[train]", "[train]\nexclude_stragglers = true"))
    first = [nodes.start() for _ in range(4)]
    nodes.wait(lambda: "4 ranks on dp=4" in nodes.said() and nodes.steps() > 10)
    host = next(node for node in first if is_host(node, nodes.port))
    slow, dies = [node for node in first if node is not host][:2]
    before, pid = nodes.steps(), nodes.rank_of(slow)
    end = time.monotonic() + 600
    while nodes.steps() < before + 40:
        assert time.monotonic() < end, nodes.said()
        for _ in range(20):  # at least once per step, however short: it is the slowest in nearly all of them
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.005)
    os.kill(nodes.rank_of(dies), signal.SIGKILL)
    nodes.wait(lambda: slow.poll() is not None)
    assert slow.returncode == 2 and "is left out: rank" in nodes.said()
    nodes.wait(lambda: "3 ranks on dp=3" in nodes.said())
    before = nodes.steps()
    nodes.wait(lambda: nodes.steps() > before + 10)
    events = read_events(find_run(home, "elastic").folder)
    assert [event.more["excluded"] for event in events if "excluded" in event.more]
