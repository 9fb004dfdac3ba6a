"""The actors of a job on Ray, without Ray: signals before there is a process, and a supervisor after the job's end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.cluster.job import Job, write_job
from armillary.cluster.ray import ranks, ray_jobs
from armillary.cluster.ray.ranks import RankActor, Supervisor, node_domains, rank_environment, read_note

ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "RANK": "0"}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(
        name="fox",
        target="ray",
        folder=tmp_path / "jobs/fox",
        work=tmp_path,
        home=tmp_path,
        num_nodes=2,
        ranks_per_node=1,
        python="python3",
    )
    write_job(job, {})
    return job


def test_a_rank_that_was_told_to_end_before_it_began_does_not_begin(tmp_path: Path) -> None:
    actor = RankActor()
    actor.signal(signal.SIGTERM)
    assert actor.run(["touch", str(tmp_path / "ran")], ENVIRONMENT, str(tmp_path), str(tmp_path / "log")) == 143
    assert not (tmp_path / "ran").exists()


def test_a_running_rank_gets_the_signal(tmp_path: Path) -> None:
    actor, codes = RankActor(), []
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    log = tmp_path / "log"
    thread = threading.Thread(target=lambda: codes.append(actor.run(command, ENVIRONMENT, str(tmp_path), str(log))))
    thread.start()
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    actor.signal(signal.SIGTERM)
    thread.join(30)
    assert codes == [-signal.SIGTERM]


@pytest.mark.parametrize("state", ["cancelled", "finished", "failed", "running"])
def test_a_supervisor_that_ray_starts_again_leaves_an_ended_job_alone(
    job: Job, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray starts it again on another node when its node is lost, also long after a job was cancelled."""
    began, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(Supervisor, "_supervise", lambda self: began.set())
    monkeypatch.setattr(ranks, "_end_actor", ended.set)
    monkeypatch.setattr(Supervisor, "_job", job, raising=False)
    Supervisor._note(SimpleNamespace(_job=job), state)  # type: ignore[arg-type]
    Supervisor(str(job.folder))
    assert ended.wait(10), "a detached actor would stay for ever"
    assert began.is_set() == (state == "running")
    assert read_note(job)["state"] == state


def test_ranks_that_do_not_end_are_not_waited_for(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "_work", lambda self: None)
    fake = SimpleNamespace(
        wait=lambda running, timeout: ([], running), exceptions=SimpleNamespace(RayActorError=OSError)
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(ranks, "MARGIN_S", -job.stop_s)
    supervisor = Supervisor(str(job.folder))
    supervisor.cancel()
    assert supervisor._watch({"rank 0": 0}) == "ranks had not ended in time"


def test_a_supervisor_ends_even_when_it_cannot_write_down_how(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(ranks, "_end_actor", ended.set)
    monkeypatch.setattr(Supervisor, "_start", lambda self, start: "rank 0 ended with 1")
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    supervisor = Supervisor(str(job.folder))
    assert ended.wait(10) and read_note(job)["state"] == "failed"
    ended.clear()
    (job.folder / ranks.STATE).unlink()
    monkeypatch.setattr(Supervisor, "_note", lambda self, *values: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervisor._work()
    assert ended.is_set()


class FakeRay:
    """A cluster's named actors."""

    exceptions = SimpleNamespace(RayActorError=OSError)

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.on_lookup: Any = lambda: None

    def get_actor(self, name: str, namespace: str) -> Any:
        self.on_lookup()
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, actor: Any) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}

    def remote(self, kind: type) -> Any:
        def make(folder: str, name: str) -> Any:
            self.actors[name] = SimpleNamespace(folder=folder, ping=SimpleNamespace(remote=lambda: True))
            return self.actors[name]

        return SimpleNamespace(options=lambda name, **more: SimpleNamespace(remote=lambda folder: make(folder, name)))

    def get(self, value: Any) -> Any:
        return value


def test_a_job_of_the_same_name_from_another_folder_is_left_alone(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeRay()
    monkeypatch.setattr(ray_jobs, "connect", lambda address: cluster)
    other = replace(job, folder=tmp_path / "elsewhere/jobs/fox")
    write_job(other, {})
    ray_jobs.submit(job)
    ray_jobs.submit(other)
    ray_jobs.submit(job)  # its own is replaced
    assert sorted(each.folder for each in cluster.actors.values()) == sorted((str(job.folder), str(other.folder)))


def test_a_supervisor_that_ends_while_it_is_asked_has_said_how(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeRay()
    monkeypatch.setattr(ray_jobs, "connect", lambda address: cluster)

    def note(state: str) -> None:
        Supervisor._note(SimpleNamespace(_job=job), state)  # type: ignore[arg-type]

    note("running")
    assert ray_jobs.state(job).state == "failed"
    cluster.on_lookup = lambda: note("finished")
    assert ray_jobs.state(job).state == "finished"


def test_domains_come_from_the_labels_of_living_nodes(job: Job) -> None:
    zone = "ray.io/availability-zone"
    nodes = [
        {"NodeID": "a", "Alive": True, "Labels": {zone: "z1", "rack": "r7"}},
        {"NodeID": "b", "Alive": False, "Labels": {zone: "z2"}},
        {"NodeID": "c", "Alive": True},
    ]
    found = node_domains(SimpleNamespace(nodes=lambda: nodes), "rack")
    assert found == {"a": ("zone=z1", "rack=r7"), "c": ()}
    facts: list[dict[str, Any]] = [
        {"node": name, "address": "127.0.0.1", "gpus": [], "port": 1, "domain": "/".join(domain)}
        for name, domain in found.items()
    ]
    assert rank_environment(job, 0, facts, 0)["ARMILLARY_NETWORK_DOMAIN"] == "zone=z1/rack=r7"
