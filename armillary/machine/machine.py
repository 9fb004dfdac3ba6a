"""This machine as a description and as a Cluster to plan for, without importing torch.

`machine()` reads the system and the drivers' tools; `here()` maps the result to the catalogue where name and memory
match. What the system does not report stays None until it is measured.
"""

import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.machine import host_info
from armillary.machine.gpus import Gpu, gpu_links, gpus, torch_sees_gpus
from armillary.machine.host_info import Cpu, Disk, Interface
from armillary.machine.memory import available_bytes, memory_limit
from armillary.machine.numa import NumaNode, numa_nodes
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Link, Tier

_NOT_MODEL_WORDS = re.compile(r"\d+gb|hbm\d\w*|sxm\d?|oam|generation|server|edition")
_BEST_ISA = {"amx_bf16": "amx", "avx512f": "avx512", "avx2": "avx2", "sve": "sve", "asimd": "neon"}
_SHARED_MEMORY = Link(name="shared-memory", title="shared memory", bytes_per_s=None, latency_s=None, kind="scale_up")
_UNKNOWN_LINK = Link(name="unknown", title="an unknown link", bytes_per_s=None, latency_s=None, kind="scale_up")
_SAME_MEMORY = 0.12
"""vendors round, and drivers count in GiB: an H200 of '141 GB' reports 151e9 bytes"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine; memory is what this process may use, `memory_why` what limits it ('' for the physical memory),
    and available what can still be allocated now. NUMA nodes are empty where the system does not report them."""

    system: str
    cpu: Cpu
    memory_bytes: float
    memory_why: str
    available_bytes: float | None
    numa: tuple[NumaNode, ...]
    shm_bytes: float | None
    """size of /dev/shm, which ranks and loader workers share"""
    gpus: tuple[Gpu, ...]
    gpu_links: Mapping[str, str]
    """pair of accelerators -> NV#, PIX, SYS …"""
    disks: tuple[Disk, ...]
    network: tuple[Interface, ...]


def machine(root: Path = Path("/")) -> Machine:
    """Read this machine; `root` is the folder of /proc and /sys."""
    accelerators, limit = gpus(), memory_limit(root)
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=host_info.read_cpu(root),
        memory_bytes=limit.num_bytes,
        memory_why=limit.why,
        available_bytes=available_bytes(root),
        numa=numa_nodes(root),
        shm_bytes=host_info.read_shm(root),
        gpus=accelerators,
        gpu_links=gpu_links() if len(accelerators) > 1 else {},
        disks=host_info.read_disks(root),
        network=host_info.read_network(),
    )


# --- as a cluster


def here(described: Machine | None = None, *, device: str | None = None) -> Cluster:
    """This machine, or `described`, as a cluster of its GPUs or else of its CPU cores; of cores where `device` is cpu,
    or where it is not given and torch cannot use the GPUs."""
    use_gpus = device != "cpu" and (described is not None or device is not None or torch_sees_gpus())
    described = described or machine()
    return _of_gpus(described) if described.gpus and use_gpus else _of_cores(described)


def chip_of(gpu: Gpu) -> Chip:
    """The catalogue's chip where name and memory match; else a chip with only these known."""
    known = _in_catalogue(gpu)
    if known is not None:
        return replace(known, memory_bytes=gpu.memory_bytes or known.memory_bytes)
    return Chip(name=_slug(gpu.name), title=gpu.name, vendor=gpu.vendor, kind="gpu", memory_bytes=gpu.memory_bytes)


def _in_catalogue(gpu: Gpu) -> Chip | None:
    words = _slug(gpu.name).split("-")
    while words:
        chip = catalogue.find_chip("-".join(words))
        if chip is None:
            if not _NOT_MODEL_WORDS.fullmatch(words.pop()):
                return None
            continue
        off = abs(gpu.memory_bytes / chip.memory_bytes - 1) if gpu.memory_bytes and chip.memory_bytes else 0.0
        return chip if off <= _SAME_MEMORY else None
    return None


def _slug(name: str) -> str:
    """'NVIDIA GeForce RTX 4090' -> 'rtx-4090'."""
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd", "instinct", "geforce", "tesla"))


def _of_gpus(described: Machine) -> Cluster:
    """A cluster of the most common GPU: all chips of a cluster are alike."""
    name, count = Counter(gpu.name for gpu in described.gpus).most_common(1)[0]
    gpu = next(gpu for gpu in described.gpus if gpu.name == name)
    chip = chip_of(gpu)
    tiers = (Tier(link=_gpu_link(chip, gpu, described.gpu_links), count=count),) if count > 1 else ()
    return Cluster(name="here", chip=chip, tiers=tiers)


def _gpu_link(chip: Chip, gpu: Gpu, links: Mapping[str, str]) -> Link:
    """NVLink where every pair has it, at the speed of the chip's usual node; else the PCIe slot."""
    by_nvlink = bool(links) and all(link.startswith("NV") for link in links.values())
    node = catalogue.nodes().get(chip.node)
    slot = f"pcie{gpu.pcie_generation}-x{gpu.pcie_lanes}"
    name = node.link if by_nvlink and node else chip.host_link if not catalogue.find_link(slot) else slot
    return catalogue.find_link(name) or _UNKNOWN_LINK


def _of_cores(described: Machine) -> Cluster:
    """A cluster with one device per compute thread, which share the memory evenly; peaks are unknown until measured."""
    cpu = described.cpu
    best = next((name for flag, name in _BEST_ISA.items() if flag in cpu.isa), "")
    chip = Chip(
        name=f"cpu-core-{best}".rstrip("-"),
        title=f"core of {cpu.model}",
        vendor=cpu.vendor,
        kind="cpu",
        memory_bytes=described.memory_bytes / cpu.threads,
        memory_type="shared DRAM",
        num_sms=1,
    )
    tiers = (Tier(link=_SHARED_MEMORY, count=cpu.threads),) if cpu.threads > 1 else ()
    return Cluster(name="here", chip=chip, tiers=tiers)
