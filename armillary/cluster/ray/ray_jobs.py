"""Ray as a target of `armillary launch`: a supervisor that outlives this process, and what it wrote down."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from hashlib import sha256
from typing import Any

from armillary.cluster.commands import TargetFailed
from armillary.cluster.job import Job, JobState
from armillary.cluster.ray.connection import NAMESPACE, connect
from armillary.cluster.ray.ranks import STATE, Supervisor, bundles, node_domains, read_note
from armillary.errors import ArmillaryError
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch

FILE = "ray.json"
_GONE_S = 30.0
_GONE = "its supervisor is gone; start it again with --run"


def files(job: Job, recipe: str) -> dict[str, str]:
    """What is asked of the cluster, to be read by people: actors take it from job.json."""
    asked = {"bundles": bundles(job), "strategy": "SPREAD", "ranks": job.num_ranks, "command": job.rank_command()}
    return {FILE: json.dumps(asked, indent=1) + "\n"}


def submit(job: Job) -> str:
    """Start the supervisor as an actor with a name, which lives on when this process ends."""
    ray = connect(job.launch.address)
    (job.folder / STATE).unlink(missing_ok=True)
    _end_before(ray, job)
    options = {
        "name": actor_name(job),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
    }
    supervisor = ray.remote(Supervisor).options(**options).remote(str(job.folder))
    with suppress(ray.exceptions.RayActorError):  # it has ended already: what it wrote down says how
        ray.get(supervisor.ping.remote())
    return job.name


def actor_name(job: Job) -> str:
    """One of the job's folder, so that a job of the same name from another folder is not taken for it."""
    return f"{job.name}-{sha256(str(job.folder).encode()).hexdigest()[:12]}"


def _end_before(ray: Any, job: Job) -> None:
    """The supervisor of an earlier start; its name is free only some time after it was killed."""
    end = time.monotonic() + _GONE_S
    while (before := _supervisor(ray, job)) is not None:
        if time.monotonic() > end:
            raise TargetFailed(f"actor {actor_name(job)} of an earlier start does not go away; name another --run")
        ray.kill(before)
        time.sleep(0.2)


def state(job: Job) -> JobState:
    """What the supervisor wrote down; it writes how the job ended before it ends itself."""
    known = _noted(job)
    if not known.is_live or _supervisor(connect(job.launch.address), job) is not None:
        return known
    known = _noted(job)
    return known if not known.is_live else JobState(state="failed", detail=_GONE)


def _noted(job: Job) -> JobState:
    note = read_note(job)
    return JobState(
        state=note.get("state", "pending"), detail=str(note.get("detail", "")), where=str(note.get("where", ""))
    )


def fetch_logs(job: Job) -> None:
    """The ranks write into the job's folder."""


def cancel(job: Job) -> None:
    """Ranks get SIGTERM and save."""
    ray = connect(job.launch.address)
    if (supervisor := _supervisor(ray, job)) is not None:
        with suppress(ray.exceptions.RayActorError):  # it ended meanwhile
            ray.get(supervisor.cancel.remote())


def domains(launch: Launch) -> dict[str, Domain]:
    """From the labels of the cluster's nodes."""
    try:
        return node_domains(connect(launch.address), launch.pack_within)
    except ArmillaryError:  # no cluster answers: submitting says so
        return {}


def _supervisor(ray: Any, job: Job) -> Any:
    """The actor; None where there is none."""
    try:
        return ray.get_actor(actor_name(job), namespace=NAMESPACE)
    except ValueError:
        return None
