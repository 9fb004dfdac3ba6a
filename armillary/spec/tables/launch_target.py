"""The recipe's [launch] table: how `armillary launch` asks for the nodes that [hardware] states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.tables.checks import above_zero, at_least, refuse

TargetName = Literal["local", "ssh", "slurm", "kubernetes", "ray"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where and how a job is started on several nodes; most keys belong to one target."""

    on: TargetName = "local"
    """target: this machine, hosts over ssh, Slurm, Kubernetes or Ray; --on overrides it"""
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
    """time limit of the job. Slurm: rounded up to whole minutes, none: the partition's; Kubernetes: none: no limit"""
    signal_s: float = 120.0
    """seconds that ranks have to save and end. Slurm: before the time limit; Kubernetes: the pods' grace period"""
    requeue: bool = True
    """start again after preemption and when a node fails, on Slurm also at the time limit; the job resumes"""
    partition: str = ""
    """Slurm: partition; empty: the default one"""
    account: str = ""
    """Slurm: account to charge; empty: the user's"""
    options: tuple[str, ...] = ()
    """Slurm: further lines for sbatch, like --qos=high or --constraint=h100"""
    image: str = ""
    """container image. Slurm: a .sif file runs with Apptainer, other names with pyxis, empty: no container; Kubernetes:
    of the pods"""
    mounts: tuple[str, ...] = ()
    """container: folders to mount, as HOST:CONTAINER; on Slurm the working folder, jobs and --home always are.
    Kubernetes: also CLAIM:CONTAINER, a PersistentVolumeClaim"""
    address: str = ""
    """Ray: the cluster, as HOST:PORT or ray://HOST:PORT; empty: the one that this machine belongs to"""
    home: str = ""
    """Kubernetes: folder in the container for runs and data, on a volume that pods share; empty: the first mount"""
    namespace: str = ""
    """Kubernetes: namespace; empty: that of the kubeconfig's context"""
    controller: Literal["job", "jobset", "trainjob"] = "job"
    """Kubernetes: an Indexed Job and a service; or a JobSet or Kubeflow's TrainJob, where the cluster has them"""
    secrets: tuple[str, ...] = ()
    """Kubernetes: Secrets whose keys become environment variables of the ranks"""
    shm_bytes: int | None = None
    """Kubernetes: size of /dev/shm; none: as much as the pod may use"""
    gpu_resource: str = "nvidia.com/gpu"
    """Kubernetes: name under which GPUs are requested"""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Kubernetes: labels that nodes must have, like "nvidia.com/gpu.product" """
    pack_within: str = ""
    """Kubernetes: label of nodes, like their rack, among whose equals the network is fastest: pods are packed there. On
    Ray ranks are ordered by such a label"""

    def __post_init__(self) -> None:
        at_least(self, "launch", 1, "ranks_per_node", "cpus_per_node", "memory_bytes", "shm_bytes")
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
