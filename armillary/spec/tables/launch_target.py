"""The recipe's [launch] table: how `armillary launch` asks for the nodes that [hardware] states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least, refuse

TargetName = Literal["local", "ssh", "slurm"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where and how a job is started on several nodes; most keys belong to one target."""

    on: TargetName = "local"
    """target: this machine, hosts over ssh, or Slurm; --on overrides it"""
    hosts: tuple[str, ...] = ()
    """ssh: one host per node, as ssh takes them; ranks meet on the first. Folders must be shared, at the same paths"""
    ssh_options: tuple[str, ...] = ()
    """ssh: further arguments, like -p, 2222"""
    ranks_per_node: int | None = None
    """processes per node; none: one per device, and on CPUs as the layout divides over the nodes"""
    cpus_per_node: int | None = None
    """CPU cores to request per node; none: the target's default"""
    memory_bytes: int | None = None
    """host memory to request per node; none: the target's default"""
    interface: str = ""
    """network interface of gloo, NCCL and the rendezvous; empty: the one towards the first node"""
    port: int | None = None
    """port on the first node where ranks meet; none: derived from the job"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """environment variables of every rank; secrets do not belong in a recipe"""
    setup: tuple[str, ...] = ()
    """shell lines before the ranks start on a node, like module load cuda"""
    python: str = ""
    """Python on the nodes; empty: the one that launches, in containers python3"""
    time_limit_s: float | None = None
    """Slurm: time limit of the job, rounded up to minutes; none: the partition's"""
    signal_s: float = 120.0
    """Slurm: seconds before the time limit at which ranks are asked to save and end"""
    requeue: bool = True
    """Slurm: put the job back into the queue at its time limit, after preemption and when a node fails; it resumes"""
    partition: str = ""
    """Slurm: partition; empty: the default one"""
    account: str = ""
    """Slurm: account to charge; empty: the user's"""
    options: tuple[str, ...] = ()
    """Slurm: further lines for sbatch, like --qos=high or --constraint=h100"""
    image: str = ""
    """container image: a .sif file runs with Apptainer, other names with Slurm's pyxis; empty: no container"""
    mounts: tuple[str, ...] = ()
    """container: folders to mount, as HOST:CONTAINER; the working folder, jobs and --home always are"""

    def __post_init__(self) -> None:
        at_least(self, "launch", 1, "ranks_per_node", "cpus_per_node", "memory_bytes")
        above_zero(self, "launch", "time_limit_s")
        at_least(self, "launch", 0, "signal_s")
        if self.port is not None and not 1024 <= self.port <= 65_535:
            raise refuse(self, "launch", "port", "from 1024 to 65535", 29_500)
        if self.time_limit_s is not None and self.signal_s >= self.time_limit_s:
            raise refuse(self, "launch", "signal_s", "below launch.time_limit_s", f"{self.time_limit_s / 4:g}")
        if len(set(self.hosts)) < len(self.hosts):
            raise BadRecipe("launch.hosts names a host twice; more ranks on a host are launch.ranks_per_node")
        for mount in self.mounts:
            if ":" not in mount:
                raise BadRecipe(f"launch.mounts has '{mount}'; write it as HOST:CONTAINER")
