"""The processor, memory, disks and network of this machine, read from the system's own files.

On systems without /proc and /sys what Python itself knows is used, and the rest stays unknown.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ISA_FLAGS = (
    "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx_vnni",
    "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "asimd", "sve", "sve2", "bf16", "i8mm", "sme",
)  # fmt: skip


_IMAGES = ("squashfs", "iso9660", "erofs")
"""file systems that nothing can be written to"""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor, as far as this process may use it."""

    model: str
    """what the system calls it"""
    vendor: str
    """who makes it"""
    sockets: int
    """physical packages"""
    cores: int
    """physical cores"""
    usable: int
    """logical cores this process may run on: affinity and container quota counted"""
    isa: tuple[str, ...]
    """vector and matrix extensions"""


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


# --- processor and memory


def read_cpu(root: Path) -> Cpu:
    cpuinfo = _text(root / "proc/cpuinfo")
    fields = [dict(_pairs(block)) for block in cpuinfo.strip().split("\n\n") if block]
    first = fields[0] if fields else {}
    flags = set((first.get("flags") or first.get("Features") or "").split())
    packages = {(cpu.get("physical id", "0"), cpu.get("core id", str(i))) for i, cpu in enumerate(fields)}
    return Cpu(
        model=first.get("model name") or platform.processor() or platform.machine(),
        vendor=first.get("vendor_id", ""),
        sockets=len({package for package, _ in packages}) or 1,
        cores=len(packages) or os.cpu_count() or 1,
        usable=usable_cores(root),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Logical cores this process may run on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(root / "sys/fs/cgroup/cpu.max").strip().partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def read_memory(root: Path) -> float:
    """Memory this process may use: the machine's, or its container's limit."""
    physical = _meminfo(root).get("MemTotal")
    if physical is None:
        physical = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limits = [_text(root / f"sys/fs/cgroup/{name}").strip() for name in ("memory.max", "memory/memory.limit_in_bytes")]
    return min([physical, *(float(limit) for limit in limits if limit.isdigit())])


def read_available(root: Path) -> float | None:
    """Memory free right now."""
    return _meminfo(root).get("MemAvailable")


def read_shm(root: Path) -> float | None:
    """Size of /dev/shm, or None where there is none."""
    folder = root / "dev/shm"
    return float(shutil.disk_usage(folder).total) if folder.is_dir() else None


def _meminfo(root: Path) -> dict[str, float]:
    """/proc/meminfo in bytes."""
    pairs = _pairs(_text(root / "proc/meminfo"))
    return {key: float(value.split()[0]) * 1024 for key, value in pairs if value.endswith(" kB")}


# --- disks and network


def read_disks(root: Path) -> tuple[Disk, ...]:
    """Real file systems, one for each device; a container's overlay counts as one."""
    seen: dict[str, Disk] = {}
    for line in _text(root / "proc/mounts").splitlines():
        device, path, kind, *_ = line.split(" ")
        real = device.startswith("/dev/") or kind in ("overlay", "nfs", "nfs4", "lustre", "ceph", "fuse.gcsfuse")
        if real and kind not in _IMAGES and device not in seen and Path(path).is_dir():
            usage = shutil.disk_usage(path)
            medium = _medium(root, device)
            text = f"{kind} on {medium}" if medium else kind
            seen[device] = Disk(path=path, kind=text, total_bytes=float(usage.total), free_bytes=float(usage.free))
    return tuple(seen.values())


def _medium(root: Path, device: str) -> str:
    """nvme, ssd, rotating or virtual, where the kernel says so."""
    name = Path(device).name
    if name.startswith("nvme"):
        return "nvme"
    if re.match(r"(vd|xvd)", name):
        return "virtual disk"
    rotating = _text(root / f"sys/block/{name.rstrip('0123456789')}/queue/rotational").strip()
    return {"0": "ssd", "1": "rotating disk"}.get(rotating, "")


def read_network(root: Path) -> tuple[Interface, ...]:
    folder = root / "sys/class/net"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    up = [name for name in names if name != "lo" and _text(folder / name / "operstate").strip() in ("up", "unknown")]
    speeds = {name: _text(folder / name / "speed").strip() for name in up}
    return tuple(
        Interface(name=name, bits_per_s=float(mbit) * 1e6 if mbit.isdigit() and mbit != "0" else None)
        for name, mbit in speeds.items()
    )


# --- reading


def _text(path: Path) -> str:
    """A file of /proc or /sys; what is absent or refuses to be read (an interface that is down) is empty."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = (line.partition(":") for line in text.splitlines() if ":" in line)
    return [(key.strip(), value.strip()) for key, _, value in parts]
