"""The CPU, disks and network of this machine, read from the system's own files.

On systems without /proc and /sys what `sysctl` and Python itself know is used, and the rest stays unknown.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from armillary.machine import cpuinfo
from armillary.machine.cores import read_cores
from armillary.machine.cpu_name import cpu_name, cpu_vendor
from armillary.machine.features import UNITS, cpu_features, has_native, present_features
from armillary.machine.system_files import text

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


_IMAGES = ("squashfs", "iso9660", "erofs")
"""file systems that nothing can be written to"""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The CPU, as far as this process may use it."""

    model: str
    """its name, which is the key of what is measured on it"""
    vendor: str
    """who makes it"""
    sockets: int
    """physical packages"""
    cores: int
    """physical cores"""
    present: int
    """logical cores"""
    usable: int
    """logical cores this process may keep busy: affinity, cpuset and quota counted"""
    threads: int
    """threads that should compute: one for each usable physical core"""
    why: str
    """what makes usable less than present; '' where nothing does"""
    isa: tuple[str, ...]
    """vector and matrix extensions"""
    units: Mapping[str, str]
    """number format -> what computes in it; '' where it is emulated; empty where the system does not say"""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A mounted file system."""

    path: str
    """where it is mounted"""
    kind: str
    """file system and medium: 'ext4 on nvme'"""
    total_bytes: float
    """size"""
    free_bytes: float
    """what an ordinary user may still write"""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface that is up."""

    name: str
    """as the system calls it"""
    bits_per_s: float | None
    """link speed; None where the driver does not say"""


# --- CPU and shared memory


def read_cpu(root: Path) -> Cpu:
    """What the system says of its CPU."""
    blocks, cores = cpuinfo.blocks(root), read_cores(root)
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
        units=_units(root),
    )


def _units(root: Path) -> dict[str, str]:
    """Units that torch may use, format by format."""
    usable = cpu_features(root)
    return {
        dtype: " ".join(sorted(known & usable)) for dtype, known in UNITS.items() if has_native(dtype, root) is not None
    }


def read_shm(root: Path) -> float | None:
    """Size of /dev/shm, or None where there is none."""
    folder = root / "dev/shm"
    return float(shutil.disk_usage(folder).total) if folder.is_dir() else None


# --- disks and network


def read_disks(root: Path) -> tuple[Disk, ...]:
    """Real file systems, one for each device; a container's overlay counts as one."""
    seen: dict[str, Disk] = {}
    for line in text(root / "proc/mounts").splitlines():
        device, path, kind, *_ = line.split(" ")
        real = device.startswith("/dev/") or kind in ("overlay", "nfs", "nfs4", "lustre", "ceph", "fuse.gcsfuse")
        if real and kind not in _IMAGES and device not in seen and Path(path).is_dir():
            usage = shutil.disk_usage(path)
            medium = _medium(root, device)
            named = f"{kind} on {medium}" if medium else kind
            seen[device] = Disk(path=path, kind=named, total_bytes=float(usage.total), free_bytes=float(usage.free))
    return tuple(seen.values())


def _medium(root: Path, device: str) -> str:
    """nvme, ssd, rotating or virtual, where the kernel says so."""
    name = Path(device).name
    if name.startswith("nvme"):
        return "nvme"
    if re.match(r"(vd|xvd)", name):
        return "virtual disk"
    rotating = text(root / f"sys/block/{name.rstrip('0123456789')}/queue/rotational").strip()
    return {"0": "ssd", "1": "rotating disk"}.get(rotating, "")


def read_network(root: Path) -> tuple[Interface, ...]:
    folder = root / "sys/class/net"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    up = [name for name in names if name != "lo" and text(folder / name / "operstate").strip() in ("up", "unknown")]
    speeds = {name: text(folder / name / "speed").strip() for name in up}
    return tuple(
        Interface(name=name, bits_per_s=float(mbit) * 1e6 if mbit.isdigit() and mbit != "0" else None)
        for name, mbit in speeds.items()
    )
