"""A pool of processes: started, adopted, stopped, killed; and gone with the service that nobody renews."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from armillary.fleet.pool.local_pool import LocalPool

SERVER = Path(__file__).parent / "sleeping_server.py"


def command(port: int, release: str) -> list[str]:
    return [sys.executable, str(SERVER), str(port), "0.01", "4"]


def wait(check: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    made = LocalPool(tmp_path / "pool", command, lasts_s=30.0)
    yield made
    made.stop_all(2.0)
    assert not made.members()


def test_a_server_starts_and_stops(pool: LocalPool) -> None:
    started = pool.start()
    assert started.state == "starting" and started.url.startswith("http://127.0.0.1:")
    wait(lambda: pool.members()[0].state == "ready")
    assert 0 < (pool.members()[0].start_s or 0) < 60
    pool.stop(started.name)
    wait(lambda: not pool.members())


def test_a_new_pool_adopts_what_runs(pool: LocalPool, tmp_path: Path) -> None:
    names = [pool.start().name for _ in range(2)]
    wait(lambda: all(member.state == "ready" for member in pool.members()))
    adopting = LocalPool(tmp_path / "pool", command)
    assert [member.name for member in adopting.members()] == names
    assert {member.state for member in adopting.members()} == {"ready"}
    adopting.kill(names[0])
    wait(lambda: [member.name for member in adopting.members()] == names[1:])
    assert adopting.start().name not in names  # names, and so logs, are not used again
    adopting.stop_all(2.0)


def test_servers_end_where_nobody_renews_their_lease(tmp_path: Path) -> None:
    made = LocalPool(tmp_path / "pool", command, lasts_s=1.0)
    member = made.start()
    record = made._record(member.name)
    assert record is not None
    os.utime(made._lease, (0, 0))
    wait(lambda: made._children[record.pid].poll() is not None)


def test_a_record_of_a_process_that_is_gone_is_forgotten(pool: LocalPool, tmp_path: Path) -> None:
    member = pool.start()
    record = pool._record(member.name)
    assert record is not None
    pool.kill(member.name)
    pool._write(record)  # as a machine that lost its power leaves it
    assert not LocalPool(tmp_path / "pool", command).members()
