"""What is said of a job: its state as the target knows it, the step of its run, and what its nodes print."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from armillary.cli.output import Output
from armillary.errors import ArmillaryError, NotFound
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.cluster.job import Job, JobState

MOST_UNKNOWN = 10
"""answers in a row that a target does not know a job, after which it is taken to be over"""


def job_facts(job: Job, state: JobState | None = None, step: str | None = None) -> dict[str, Any]:
    """A job as --json prints it."""
    facts = {"job": job.name, "on": job.target, "id": job.handle, "nodes": job.num_nodes, "ranks": job.num_ranks}
    facts |= {"created": job.created, "folder": str(job.folder)}
    return facts | ({"state": state.state, "detail": state.detail, "where": state.where, "step": step} if state else {})


def state_of(job: Job) -> JobState:
    """The target's word; unknown, with the reason, where it cannot be asked from here."""
    from armillary.cluster.job import JobState
    from armillary.cluster.targets import TARGETS

    if not job.handle:
        return JobState(state="unknown", detail="was not submitted")
    try:
        return TARGETS[job.target].state(job)
    except ArmillaryError as error:
        return JobState(state="unknown", detail=str(error))


class Ending:
    """Whether a job is over. A target that cannot be asked now, as an API server that restarts, is asked again."""

    def __init__(self, job: Job) -> None:
        self._job, self._unknown = job, 0

    def __call__(self) -> bool:
        state = state_of(self._job)
        self._unknown = self._unknown + 1 if state.state == "unknown" else 0
        return not state.is_live and self._unknown not in range(1, MOST_UNKNOWN)


def progress_text(home: Home, job: Job) -> str | None:
    """'120 / 500' of the job's run, once it has begun."""
    from armillary.store.runs import find_run

    try:
        state = find_run(home, job.name).progress
    except NotFound:
        return None
    return state.step_text(" / ")


def follow(out: Output, job: Job, node: int | None = None) -> None:
    from armillary.cluster.log_files import follow_lines
    from armillary.cluster.targets import TARGETS

    def fetch(job: Job) -> None:
        with suppress(ArmillaryError):  # a target that does not answer now
            TARGETS[job.target].fetch_logs(job)

    for line in follow_lines(job, Ending(job), fetch=fetch, node=node):
        out.say(line)
    ended = state_of(job)
    out.say(f"job {job.name} {ended.state}" + (f" ({ended.detail})" if ended.detail else ""))
