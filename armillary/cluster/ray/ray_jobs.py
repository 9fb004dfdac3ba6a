"""Ray as a target of `armillary launch`: a supervisor that outlives this process, and what it wrote down."""

from __future__ import annotations

import json
from typing import Any

from armillary.cluster.job import Job, JobState
from armillary.cluster.ray.connection import NAMESPACE, connect
from armillary.cluster.ray.ranks import STATE, Supervisor, bundles, read_note

FILE = "ray.json"


def files(job: Job, recipe: str) -> dict[str, str]:
    """What is asked of the cluster, to be read by people: actors take it from job.json."""
    asked = {"bundles": bundles(job), "strategy": "SPREAD", "ranks": job.num_ranks, "command": job.rank_command()}
    return {FILE: json.dumps(asked, indent=1) + "\n"}


def submit(job: Job) -> str:
    """Start the supervisor as an actor with a name, which lives on when this process ends."""
    ray = connect(job.launch.address)
    (job.folder / STATE).unlink(missing_ok=True)
    if (before := _supervisor(ray, job)) is not None:
        ray.kill(before)
    options = {"name": job.name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    supervisor = ray.remote(Supervisor).options(**options).remote(str(job.folder))
    ray.get(supervisor.ping.remote())
    return job.name


def state(job: Job) -> JobState:
    note = read_note(job)
    known = JobState(
        state=note.get("state", "pending"), detail=str(note.get("detail", "")), where=str(note.get("where", ""))
    )
    if not known.is_live:
        return known
    ray = connect(job.launch.address)
    if _supervisor(ray, job) is None:
        return JobState(state="failed", detail="its supervisor is gone; start it again with --run")
    return known


def fetch_logs(job: Job) -> None:
    """The ranks write into the job's folder."""


def cancel(job: Job) -> None:
    """Ranks get SIGTERM and save."""
    ray = connect(job.launch.address)
    if (supervisor := _supervisor(ray, job)) is not None:
        ray.get(supervisor.cancel.remote())


def _supervisor(ray: Any, job: Job) -> Any:
    """The actor; None where there is none."""
    try:
        return ray.get_actor(job.name, namespace=NAMESPACE)
    except ValueError:
        return None
