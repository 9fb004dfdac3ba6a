"""Jobs on this machine: torchrun in the background. Several nodes share its cores, to try a start on many nodes."""

from __future__ import annotations

import socket

from armillary.cluster import hosts
from armillary.cluster.commands import run_program
from armillary.cluster.job import Job, JobState
from armillary.machine.cores import compute_threads
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch


def files(job: Job, recipe: str) -> dict[str, str]:
    if job.num_nodes == 1:
        return {hosts.script_name(0): hosts.node_script(job, 0, _meeting(job))}
    share = {"OMP_NUM_THREADS": str(compute_threads(job.num_ranks))}  # the nodes share this machine's cores
    return {
        hosts.script_name(node): hosts.node_script(job, node, _meeting(job), node_id=f"local-{node}", environment=share)
        for node in range(job.num_nodes)
    }


def _meeting(job: Job) -> str:
    return f"127.0.0.1:{job.port}"


def submit(job: Job) -> str:
    return hosts.start(job, _shell)


def state(job: Job) -> JobState:
    return hosts.state(job, _shell)


def fetch_logs(job: Job) -> None:
    """The nodes write into the job's folder."""


def cancel(job: Job) -> None:
    hosts.cancel(job, _shell)


def domains(launch: Launch) -> dict[str, Domain]:
    """This machine has no network."""
    return {}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _shell(node: int, line: str) -> str:
    return run_program(["bash", "-c", line], then="see the job's logs")
