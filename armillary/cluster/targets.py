"""The targets by name, each a module with the same five functions."""

from __future__ import annotations

from typing import Protocol

from armillary.cluster import local, slurm, ssh
from armillary.cluster.job import Job, JobState


class Target(Protocol):
    """Where jobs run."""

    def files(self, job: Job) -> dict[str, str]:
        """Name -> text of what is written into the job's folder before it is submitted; --dry-run shows it."""

    def submit(self, job: Job) -> str:
        """Start or queue the job; returns the target's id of it."""

    def state(self, job: Job) -> JobState: ...

    def cancel(self, job: Job) -> None:
        """Ask the ranks to save and end."""


TARGETS: dict[str, Target] = {"local": local, "ssh": ssh, "slurm": slurm}
