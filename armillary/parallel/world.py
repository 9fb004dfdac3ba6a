"""The world of processes: joined under torchrun or srun, or alone, and left in order or aborted.

A rank that fails closes its connections, so that peers that wait for it fail soon after instead of hanging; where even
that is not possible, every collective has a timeout.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from armillary.errors import BadInput, BadLayout
from armillary.model.device import fit_threads, pick_device

_SRUN_PORT = 29_400
"""first port tried for a Slurm step; its job number is added, so that two jobs on one node do not collide"""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those of the run: its rank over all machines, and on its own."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def join_world(device: str | None = None, *, timeout_s: float = 600.0) -> Iterator[World]:
    """Join the processes that torchrun or srun started, or be alone: one process needs no process group.

    gloo on a CPU; NCCL on CUDA, with gloo for CPU tensors. `timeout_s` bounds every collective, so a rank that died is
    noticed. A process group that exists already is used and left as it is.
    """
    place = _place(os.environ)
    where = _device(device, place)
    fit_threads(place.local_size)
    if dist.is_initialized():
        yield World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=place.local_rank, device=where)
        return
    world = World(rank=place.rank, size=place.size, local_rank=place.local_rank, device=where)
    if place.size == 1:
        yield world
        return
    os.environ |= place.rendezvous
    _start(world, timeout_s, own_gpu=place.own_gpu)
    try:
        yield world
    except BaseException:
        abort_world()
        raise
    dist.destroy_process_group()


def is_launched() -> bool:
    """Whether torchrun or srun started this process as one of several."""
    return _place(os.environ).size > 1


def abort_world() -> None:
    """Abort the process group without waiting for other ranks: peers that wait for this rank fail soon after."""
    if not dist.is_initialized():
        return
    if "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()  # destroying would wait for collectives that never end
    else:
        dist.destroy_process_group()


def _start(world: World, timeout_s: float, *, own_gpu: bool) -> None:
    nccl = world.device.type == "cuda"
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "256"
    )  # torch records the last collectives, for the verdict on a hang
    if nccl:
        torch.cuda.set_device(world.device)
    timeout = timedelta(seconds=timeout_s)
    store = _store_of_start(os.environ, timeout)
    if nccl and own_gpu and torch.cuda.device_count() == 1:
        store = store or next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))[0]
        claim_gpu(store, str(torch.cuda.get_device_properties(world.device).uuid), world.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=world.device if nccl else None,
    )


def _store_of_start(env: Mapping[str, str], timeout: timedelta) -> dist.Store | None:
    """The store of torchrun's agent, with keys of this start's own: the agent keeps it over restarts, and with it the
    addresses of the ranks before. None: torch finds or makes the store."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT")
    agent = dist.TCPStore(*place, is_master=False, timeout=timeout)
    return dist.PrefixStore(f"start/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", agent)


def claim_gpu(store: dist.Store, uuid: str, rank: int) -> None:
    """Fail where another rank has the GPU of this UUID: each sees one GPU only, which may be the same, and NCCL needs
    one per rank. A rank that has ended, as before a restart, claims nothing."""
    claim = f"{rank} {os.getpid()}"
    claimed = store.compare_set(f"gpu/{uuid}", "", claim).decode()
    other, pid = (int(number) for number in claimed.split())
    if claimed != claim and psutil.pid_exists(pid):
        raise BadLayout(
            f"ranks {other} and {rank} have the same GPU {uuid}; set CUDA_VISIBLE_DEVICES to another one for each, "
            "or to all of the node's"
        )
    store.set(f"gpu/{uuid}", claim)


# --- what a launcher set


@dataclass(frozen=True, kw_only=True)
class _Place:
    """What a launcher set for this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes that share this one's cores
    own_gpu: bool = False  # a process may see only its own GPU (srun --gpus-per-task, or CUDA_VISIBLE_DEVICES)
    rendezvous: Mapping[str, str]  # environment variables of the rendezvous, beyond those that are set


def _place(env: Mapping[str, str]) -> _Place:
    """torchrun's variables first, then those of a Slurm step; neither: alone."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size, local = (_number(env, key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return _Place(
            rank=rank,
            size=size,
            local_rank=local,
            local_size=_number(env, "LOCAL_WORLD_SIZE") or 1,
            own_gpu=len(env.get("CUDA_VISIBLE_DEVICES", "").split(",")) == 1 and "CUDA_VISIBLE_DEVICES" in env,
            rendezvous={},
        )
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env:
        rank, size, local = (_number(env, f"SLURM_{key}") for key in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        port = _SRUN_PORT + _number(env, "SLURM_JOB_ID") % 10_000
        rendezvous = {"MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST", "localhost")), "MASTER_PORT": str(port)}
        return _Place(
            rank=rank,
            size=size,
            local_rank=local,
            local_size=_slurm_local_size(env),
            own_gpu=True,
            rendezvous=rendezvous,
        )
    return _Place(rendezvous={})


def _number(env: Mapping[str, str], key: str) -> int:
    text = env.get(key, "0")
    if not text.isdecimal():
        raise BadInput(f"{key}={text} is not a number; start with torchrun or srun, or unset it")
    return int(text)


def _slurm_local_size(env: Mapping[str, str]) -> int:
    """Tasks of a Slurm step that share cores: '4(x2)' on a node, or none where each is bound to cores of its own."""
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return 1 if "SLURM_CPUS_PER_TASK" in env or tasks is None else int(tasks.group())


def first_host(nodes: str) -> str:
    """The first of a Slurm node list: 'gpu[07-09,12],cpu1' -> 'gpu07'."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _device(asked: str | None, place: _Place) -> torch.device:
    device = pick_device(asked)
    if device.type != "cuda" or device.index is not None or place.size == 1:
        return device
    count = torch.cuda.device_count()
    if place.local_rank < count:
        return torch.device("cuda", place.local_rank)
    if place.own_gpu and count == 1:
        return torch.device("cuda", 0)
    number, have = place.local_rank + 1, f"{count} GPU{'s' * (count != 1)}"
    raise BadLayout(f"process {number} on this machine has no GPU, there are {have}; try --devices {count}")


# --- process groups: torch gives each new one its own timeout (10 min for NCCL, 30 for gloo), not the default group's


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout of this group's collectives."""
    backend = group._get_backend(group._device_types[0])
    return backend.options._timeout


def default_timeout() -> timedelta:
    """The timeout of the default group, as `join_world` set it."""
    world = dist.group.WORLD
    assert world is not None, "several ranks have a process group"
    return timeout_of(world)


def new_group(
    ranks: Sequence[int] | None = None, *, backend: str | None = None, timeout_s: float | None = None
) -> dist.ProcessGroup:
    """A group of these ranks, or of all; every rank calls it. The timeout is the default group's unless given."""
    timeout = default_timeout() if timeout_s is None else timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout)
    return group


def new_mesh(
    device_type: str, ranks: torch.Tensor, axes: Sequence[str], timeouts_s: Mapping[str, float] | None = None
) -> DeviceMesh:
    """torch's mesh of these ranks, with a group for every axis, each with its timeout; every rank calls it."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=tuple(axes))
    for axis, group in zip(axes, mesh.get_all_groups(), strict=True):
        given = (timeouts_s or {}).get(axis)
        timeout = default_timeout() if given is None else timedelta(seconds=given)
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh
