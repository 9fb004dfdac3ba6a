"""Leases between real processes: live while they beat, on whatever machine; stale ones go to whoever comes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.store.home import Home
from armillary.store.lease import Lease, LeaseLost, age_s, keeps_beating, read_lease, take, write_lease
from armillary.store.runs import Run, create_run, find_run

HOLDER = """
import sys, time
from dataclasses import replace
from pathlib import Path
import armillary.store.lease as lease
from armillary.store.runs import Run
folder, machine = Path(sys.argv[1]), sys.argv[2]
if machine:
    lease.machine = lambda: machine
lease.write_lease(folder, replace(lease.Lease.new(), beat_s=0.1, lasts_s=3.0))
with Run(folder=folder).renewing_lease() as held:
    print("holds", flush=True)
    while not held.lost:
        time.sleep(0.02)
print("lost", flush=True)
"""
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(folder=create_run(Home.at(tmp_path), {}, steps=9).folder)


@pytest.fixture
def hold() -> Iterator[Hold]:
    """A process that has a run, from this machine or from another."""
    started: list[subprocess.Popen[str]] = []

    def start(run: Run, machine: str = "") -> subprocess.Popen[str]:
        line = [sys.executable, "-c", HOLDER, str(run.folder), machine]
        child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None and child.stdout.readline() == "holds\n"
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end, "waited for long enough"
        time.sleep(0.05)


@pytest.mark.parametrize("machine", ["", "elsewhere/1/2"])
def test_a_live_lease_is_not_taken(machine: str, run: Run, hold: Hold) -> None:
    child = hold(run, machine)
    assert run.state.is_running and run.is_held_elsewhere()
    with pytest.raises(BadInput, match=rf"is still running \(process {child.pid} on \S+\); stop it first"):
        run.claim()
    assert child.poll() is None


@pytest.mark.parametrize("machine", ["", "elsewhere/1/2"])
def test_a_run_that_was_killed_is_taken_over_by_itself(machine: str, run: Run, hold: Hold) -> None:
    child = hold(run, machine)
    child.kill()
    child.wait()
    if not machine:
        assert run.state.state == "died", "a process of this machine is known to be gone at once"
    mine = run.claim()
    assert mine.owner and mine.state.is_running and not mine.is_held_elsewhere()
    lease = read_lease(run.folder)
    assert lease is not None and lease.pid == os.getpid() and lease.owner == mine.owner


def test_silence_on_another_machine_shows_as_died(run: Run, hold: Hold) -> None:
    child = hold(run, "elsewhere/1/2")
    assert run.state.state == "running"
    child.kill()
    child.wait()
    wait_for(lambda: run.state.state == "died")


def test_a_live_lease_is_taken_when_asked_and_its_owner_notices(run: Run, hold: Hold) -> None:
    child = hold(run)
    old = read_lease(run.folder)
    mine = run.claim(take_over=True)
    assert child.wait(30) == 0, "the old owner saw it at its next beat"
    assert old is not None and mine.owner != old.owner
    with pytest.raises(LeaseLost, match="was taken over by process"):
        replace(run, owner=old.owner).update(state="failed")
    assert mine.state.state == "running", "and its end changed nothing"


def test_clocks_that_differ_take_no_run_away(run: Run, hold: Hold) -> None:
    hold(run, "elsewhere/1/2")
    lease = read_lease(run.folder)
    assert lease is not None
    os.utime(run.folder / "lease.json", (0, 0))  # a file system whose clients set time stamps, by clocks of their own
    assert keeps_beating(run.folder, lease), "the count rises"


def test_age_is_by_the_clock_of_the_file_system(run: Run) -> None:
    assert 0 <= age_s(run.folder) < 30
    now = os.stat(run.folder / "lease.json").st_mtime
    os.utime(run.folder / "lease.json", (now - 100, now - 100))
    assert 100 <= age_s(run.folder) < 130
    assert [path.name for path in run.folder.glob(".now-*")] == []


def test_two_who_come_at_once_do_not_both_get_it(run: Run) -> None:
    seen = read_lease(run.folder)
    write_lease(run.folder, replace(Lease.new(), pid=1, machine="elsewhere"))  # the other was quicker
    with pytest.raises(LeaseLost, match="in the same moment; try again"):
        take(run.folder, seen)


def test_a_released_lease_is_free_and_a_run_may_be_held_again(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    run = create_run(home, {})
    for _ in range(2):
        with run.renewing_lease() as held:
            assert not held.lost
        lease = read_lease(run.folder)
        assert lease is not None and lease.released
        run.update(state="finished")
    found = find_run(home, run.name)
    assert not found.is_held_elsewhere()
