"""Jobs on Slurm: a batch script with one torchrun per node, requeued at its time limit; an interactive allocation."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as package_files
from math import ceil
from pathlib import Path

from armillary.cluster.commands import TargetFailed, run_program
from armillary.cluster.job import Job, JobState, State
from armillary.errors import ArmillaryError
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch

SCRIPT, LOG = "slurm.sh", "slurm.log"
_NO_SLURM = "log in to a machine of the Slurm cluster, or choose another --on"
STATES: dict[str, State] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "SPECIAL_EXIT": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "RESIZING": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "PREEMPTED": "stopped",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "REVOKED": "failed",
    "TIMEOUT": "failed",
}
"""states of Slurm's jobs, as squeue and sacct name them"""


def files(job: Job, recipe: str) -> dict[str, str]:
    from jinja2 import Environment, StrictUndefined

    text = package_files("armillary.cluster").joinpath("templates", SCRIPT).read_text(encoding="utf-8")
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)
    script = template.render(
        job=job,
        options=(*request(job), *_batch_options(job), *job.launch.options),
        environment=[(name, shlex.quote(value)) for name, value in job.launch.environment.items()],
        step_options=shlex.join(_step_options(job)),
        command=_command(job),
    )
    return {SCRIPT: script}


def request(job: Job) -> tuple[str, ...]:
    """What is asked of Slurm, the same for a batch job and an allocation."""
    launch, minutes = job.launch, ceil((job.launch.time_limit_s or 0) / 60)
    return tuple(
        option
        for option, given in (
            (f"--job-name={job.name}", True),
            (f"--nodes={f'{job.least_nodes}-' if job.least_nodes else ''}{job.num_nodes}", True),
            ("--no-kill", job.least_nodes),  # when a node fails
            ("--ntasks-per-node=1", True),
            (f"--gres=gpu:{job.gpus_per_node}", job.gpus_per_node),
            (f"--cpus-per-task={launch.cpus_per_node}", launch.cpus_per_node),
            (f"--mem={ceil((launch.memory_bytes or 0) / 2**20)}M", launch.memory_bytes),
            (f"--time={minutes}", minutes),
            (f"--partition={launch.partition}", launch.partition),
            (f"--account={launch.account}", launch.account),
        )
        if given
    )


def _batch_options(job: Job) -> tuple[str, ...]:
    return (
        f"--signal=B:USR1@{ceil(job.stop_s)}",
        "--requeue" if job.launch.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={_quoted(job.logs / LOG)}",
        f"--chdir={_quoted(job.work)}",
    )


def _quoted(path: Path) -> str:
    """For a line of #SBATCH, which Slurm itself splits into words."""
    return '"{}"'.format(str(path).replace("\\", "\\\\").replace('"', '\\"'))


def _step_options(job: Job) -> tuple[str, ...]:
    """A node that fails early leaves the others time to save. Tasks keep the cores of their node, and inherit their
    number from the job only in this way since Slurm 22.05."""
    launch, mounts = job.launch, ",".join((*(f"{path}:{path}" for path in _folders(job)), *job.launch.mounts))
    cores = (f"--cpus-per-task={launch.cpus_per_node}",) if launch.cpus_per_node else ()
    container = (f"--container-image={launch.image}", f"--container-mounts={mounts}") if _is_pyxis(job) else ()
    wait = f"--wait={ceil(job.stop_s)}"
    elastic = ("--no-kill",) if job.least_nodes else ()
    return (
        wait,
        *elastic,
        "--kill-on-bad-exit=0",
        f"--output={job.logs}/node-%n.log",
        "--open-mode=append",
        *cores,
        *container,
    )


def _folders(job: Job) -> list[str]:
    """What a container must see: the working folder, the job's, and --home."""
    return list(dict.fromkeys(str(path) for path in (job.work, job.folder, job.home) if path))


def _is_pyxis(job: Job) -> bool:
    return bool(job.launch.image) and not job.launch.image.endswith(".sif")


def _command(job: Job) -> str:
    """The command of a node; Apptainer runs it inside its image."""
    command = job.node_command(f'"$address:{job.port}"')
    if not job.launch.image or _is_pyxis(job):
        return command
    binds = [part for mount in (*_folders(job), *job.launch.mounts) for part in ("--bind", mount)]
    gpus = ["--nv"] if job.gpus_per_node else []
    return f"{shlex.join(['apptainer', 'exec', *gpus, *binds, job.launch.image])} {command}"


def submit(job: Job) -> str:
    """Slurm's number of the job."""
    said = run_program(["sbatch", "--parsable", str(job.folder / SCRIPT)], then=_NO_SLURM)
    return said.strip().partition(";")[0]


def state(job: Job) -> JobState:
    """From the queue while it knows the job, then from the accounts; Slurm forgets a job after some minutes where no
    accounts are kept."""
    for command in (
        ["squeue", "--noheader", "--states=all", f"--jobs={job.handle}", "--format=%T|%N|%r"],
        [
            "sacct",
            "--noheader",
            "--parsable2",
            "--allocations",
            f"--jobs={job.handle}",
            "--format=State,NodeList,Reason",
        ],
    ):
        try:
            said = run_program(command, then=_NO_SLURM).strip()
        except TargetFailed:  # an unknown job, or no accounts
            continue
        if said:
            return read_state(said.splitlines()[-1])
    return JobState(state="unknown", detail="Slurm has forgotten it; armillary runs has what it did")


def read_state(line: str) -> JobState:
    """A line of squeue or sacct: state, nodes and reason."""
    word, nodes, reason = (*line.split("|"), "", "")[:3]
    name = word.split(" ")[0].rstrip("+")  # 'CANCELLED by 1000'
    shown = name.lower().replace("_", " ")
    known = STATES.get(name, "unknown")
    plain = shown in (known, "completed")
    detail = "" if plain else shown
    reason = "" if reason in ("None", "") else reason
    return JobState(state=known, detail=", ".join(filter(None, (detail, reason))), where=nodes)


def fetch_logs(job: Job) -> None:
    """The nodes write into the job's folder."""


def cancel(job: Job) -> None:
    """The ranks get SIGTERM and save; Slurm kills what is left after its KillWait."""
    run_program(["scancel", job.handle], then=_NO_SLURM)


def domains(launch: Launch) -> dict[str, Domain]:
    """From the switches that slurm.conf's topology names; nothing where it names none."""
    partition = [f"--partition={launch.partition}"] if launch.partition else []
    try:
        said = run_program(["scontrol", "--oneliner", "show", "topology"], then=_NO_SLURM)
        names = run_program(["sinfo", "--noheader", "--Node", "--format=%N", *partition], then=_NO_SLURM).split()
        switches = [Switch.of(line) for line in said.splitlines() if line.startswith("SwitchName=")]
        hosts = {each.nodes: _expanded(each.nodes) for each in switches}
    except ArmillaryError:
        return {}
    return domains_by_switch(switches, hosts, names)


@dataclass(frozen=True)
class Switch:
    """A line of `scontrol show topology`: level 0 is next to the nodes, and all nodes below a switch are listed."""

    name: str
    level: int
    nodes: str

    @classmethod
    def of(cls, line: str) -> Switch:
        fields = dict(word.partition("=")[::2] for word in line.split())
        return cls(name=fields["SwitchName"], level=int(fields.get("Level", "0")), nodes=fields.get("Nodes", ""))


def _expanded(nodes: str) -> frozenset[str]:
    """'tux[0-3]' -> its nodes."""
    return (
        frozenset(run_program(["scontrol", "show", "hostnames", nodes], then=_NO_SLURM).split())
        if nodes
        else frozenset()
    )


def domains_by_switch(
    switches: Sequence[Switch], hosts: Mapping[str, frozenset[str]], names: Sequence[str]
) -> dict[str, Domain]:
    """Node -> its switches, from the outermost."""
    outer_first = sorted(switches, key=lambda switch: -switch.level)
    return {
        name: tuple(f"switch={switch.name}" for switch in outer_first if name in hosts[switch.nodes])
        for name in dict.fromkeys(names)
    }


def allocation(job: Job) -> list[str]:
    """The command that opens a shell in an allocation of the job's size, in which `bash INTERACTIVE` starts the job."""
    return ["salloc", *request(job), *job.launch.options, f"--chdir={job.work}"]
