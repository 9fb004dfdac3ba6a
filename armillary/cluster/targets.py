"""The targets by name, each a module with the same functions."""

from __future__ import annotations

from typing import Protocol

from armillary.cluster import local, slurm, ssh
from armillary.cluster.job import Job, JobState
from armillary.cluster.kubernetes import kubernetes_jobs as kubernetes
from armillary.cluster.ray import ray_jobs as ray
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch


class Target(Protocol):
    """Where jobs run."""

    def files(self, job: Job, recipe: str) -> dict[str, str]:
        """Name -> text of what is written into the job's folder before it is submitted; --dry-run shows it. `recipe` is
        the recipe's text, for nodes that do not share the folder."""

    def submit(self, job: Job) -> str:
        """Start or queue the job; returns the target's id of it."""

    def state(self, job: Job) -> JobState: ...

    def fetch_logs(self, job: Job) -> None:
        """Bring what the nodes have printed into the job's folder, where it is not there by itself."""

    def cancel(self, job: Job) -> None:
        """Ask the ranks to save and end."""

    def domains(self, launch: Launch) -> dict[str, Domain]:
        """The domains of the network that the target's nodes are in, by node, as far as it knows them."""


TARGETS: dict[str, Target] = {"local": local, "ssh": ssh, "slurm": slurm, "kubernetes": kubernetes, "ray": ray}
