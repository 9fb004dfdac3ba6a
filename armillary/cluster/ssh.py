"""Jobs on hosts that ssh reaches, one node each. Folders are shared between them, at the same paths."""

from __future__ import annotations

import shlex

from armillary.cluster import hosts
from armillary.cluster.commands import run_program
from armillary.cluster.job import Job, JobState
from armillary.errors import BadRecipe
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch

CONNECT_S = 20


def files(job: Job, recipe: str) -> dict[str, str]:
    meeting = f"{address_of(job.launch.hosts[0], job.launch.ssh_options)}:{job.port}" if _checked(job) else ""
    names = [shlex.quote(host) for host in job.launch.hosts[: job.num_nodes]]
    return {hosts.script_name(node): hosts.node_script(job, node, meeting, node_id=id) for node, id in enumerate(names)}


def submit(job: Job) -> str:
    for node in range(job.num_nodes):
        _check_folder(job, node)
    return hosts.start(job, _shell(job))


def state(job: Job) -> JobState:
    seen = hosts.state(job, _shell(job))
    return JobState(state=seen.state, detail=seen.detail, where=", ".join(job.launch.hosts[: job.num_nodes]))


def fetch_logs(job: Job) -> None:
    """The nodes write into the job's folder."""


def cancel(job: Job) -> None:
    hosts.cancel(job, _shell(job))


def domains(launch: Launch) -> dict[str, Domain]:
    """Hosts do not say."""
    return {}


def address_of(host: str, options: tuple[str, ...] = ()) -> str:
    """The name or address behind a host of ~/.ssh/config, as ssh resolves it; nothing is contacted."""
    said = run_program(["ssh", *options, "-G", host], then="check launch.hosts and launch.ssh_options")
    settings = dict(line.partition(" ")[::2] for line in said.splitlines())
    return settings.get("hostname") or host.rpartition("@")[2]


def _checked(job: Job) -> bool:
    have = len(job.launch.hosts)
    if have < job.num_nodes:
        raise BadRecipe(
            f"{job.num_nodes} nodes need as many hosts and launch.hosts has {have}; try --set launch.hosts=HOST1,HOST2 "
            f"or --nodes {max(have, 1)}"
        )
    return True


def _check_folder(job: Job, node: int) -> None:
    """A host that does not see the job's folder would train on its own."""
    host, file = job.launch.hosts[node], job.folder / hosts.script_name(node)
    if "there" not in _shell(job)(node, f"test -f {shlex.quote(str(file))} && echo there || true"):
        raise BadRecipe(
            f"{host} has no {file}; share that folder with all hosts at the same path, or use another --home"
        )


def _shell(job: Job) -> hosts.Shell:
    def run(node: int, line: str) -> str:
        host = job.launch.hosts[node]
        command = [
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            f"ConnectTimeout={CONNECT_S}",
            *job.launch.ssh_options,
            host,
            line,
        ]
        return run_program(command, then=f"try ssh {host} by hand")

    return run
