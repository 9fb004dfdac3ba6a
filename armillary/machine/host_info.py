"""The CPU, disks and network of this machine.

The CPU is read from the system's files, because psutil knows neither its features nor cgroup limits; disks too, because
psutil leaves out the overlay of a container and network file systems. What the system does not report stays unknown.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.cores import read_cores
from armillary.machine.device_name import cpu_name, cpu_vendor
from armillary.machine.features import UNITS, cpu_features, has_native, present_features
from armillary.machine.system_files import cpuinfo_blocks, text

ISA_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "amx_fp16",
    "asimd",
    "asimdhp",
    "asimddp",
    "sve",
    "sve2",
    "bf16",
    "i8mm",
    "sme",
)


_READ_ONLY = ("squashfs", "iso9660", "erofs")


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The CPU, as far as this process may use it; `cores` are physical, `present` and `usable` logical."""

    model: str
    """its name, the key of its measurements"""
    vendor: str
    sockets: int
    cores: int
    present: int
    usable: int
    """logical cores that this process may keep busy, by affinity, cpuset and quota"""
    threads: int
    """compute threads: one per usable physical core"""
    why: str
    """why usable is less than present; '' where it is not"""
    isa: tuple[str, ...]
    units: Mapping[str, str]
    """dtype -> features that compute in it; '' where it is emulated; empty where the system does not report them"""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A mounted file system; `kind` is file system and medium ('ext4 on nvme'), free is what an ordinary user may
    still write."""

    path: str
    kind: str
    total_bytes: float
    free_bytes: float


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up; its speed is None where the driver does not report it."""

    name: str
    bits_per_s: float | None


# --- CPU and shared memory


def read_cpu(root: Path) -> Cpu:
    blocks, cores = cpuinfo_blocks(root), read_cores(root)
    features = cpu_features(root)
    packages = {(block.get("physical id", "0"), block.get("core id", str(i))) for i, block in enumerate(blocks)}
    return Cpu(
        model=cpu_name(root),
        vendor=cpu_vendor(root),
        sockets=len({package for package, _ in packages}) or 1,
        cores=len(packages) or cores.physical or cores.present,
        present=cores.present,
        usable=cores.usable,
        threads=cores.threads,
        why=cores.why,
        isa=tuple(flag for flag in ISA_FLAGS if flag in present_features(root)),
        units={
            dtype: " ".join(sorted(known & features))
            for dtype, known in UNITS.items()
            if has_native(dtype, root) is not None
        },
    )


def read_shm(root: Path) -> float | None:
    """Size of /dev/shm, or None where there is none."""
    folder = root / "dev/shm"
    return float(shutil.disk_usage(folder).total) if folder.is_dir() else None


# --- disks and network


def read_disks(root: Path) -> tuple[Disk, ...]:
    """Writable file systems, one per device; a container's overlay counts as one."""
    seen: dict[str, Disk] = {}
    for line in text(root / "proc/mounts").splitlines():
        device, path, kind, *_ = line.split(" ")
        real = device.startswith("/dev/") or kind in ("overlay", "nfs", "nfs4", "lustre", "ceph", "fuse.gcsfuse")
        if real and kind not in _READ_ONLY and device not in seen and Path(path).is_dir():
            usage = shutil.disk_usage(path)
            medium = _medium(root, device)
            kind = f"{kind} on {medium}" if medium else kind
            seen[device] = Disk(path=path, kind=kind, total_bytes=float(usage.total), free_bytes=float(usage.free))
    return tuple(seen.values())


def _medium(root: Path, device: str) -> str:
    """nvme, ssd, rotating or virtual disk, where the kernel reports it."""
    name = Path(device).name
    if name.startswith("nvme"):
        return "nvme"
    if re.match(r"(vd|xvd)", name):
        return "virtual disk"
    rotating = text(root / f"sys/block/{name.rstrip('0123456789')}/queue/rotational").strip()
    return {"0": "ssd", "1": "rotating disk"}.get(rotating, "")


def read_network() -> tuple[Interface, ...]:
    """The interfaces that are up, without the loopback; none where psutil is not installed."""
    try:
        import psutil
    except ModuleNotFoundError:
        return ()
    stats = sorted(psutil.net_if_stats().items())
    return tuple(
        Interface(name=name, bits_per_s=stat.speed * 1e6 or None)
        for name, stat in stats
        if stat.isup and "loopback" not in getattr(stat, "flags", "") and name != "lo"
    )
