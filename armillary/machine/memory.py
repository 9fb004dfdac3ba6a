"""Host memory: what this process may use (the minimum of the machine, its control groups and its NUMA nodes), and what
it has resident now and had at its peak.

A process that takes more than `limit_bytes` is killed, whatever /proc/meminfo reports for the machine, which is all
that psutil reads: it knows neither cgroup limits nor the memory of allowed NUMA nodes, and on Linux it has no peak.
"""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.cgroup import Group, groups
from armillary.machine.numa import NumaNode, numa_nodes
from armillary.machine.system_files import ROOT, command, has_proc, key_values, sysctl, text


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The memory limit of this process, and its cause; '' for the machine's physical memory."""

    num_bytes: float
    why: str


def limit_bytes(root: Path = ROOT) -> float:
    """The minimum of physical memory and the limits of this process's control groups."""
    return memory_limit(root).num_bytes


def memory_limit(root: Path = ROOT) -> MemoryLimit:
    physical = MemoryLimit(num_bytes=physical_bytes(root), why="")
    return min([physical, *_node_limit(root), *_group_limits(root)], key=lambda limit: limit.num_bytes)


def available_bytes(root: Path = ROOT) -> float | None:
    """Memory that can still be allocated now; None where the system does not report it.

    The minimum of the machine's available memory and, per limited group, limit − (usage − inactive file pages): the
    kernel drops those pages before it kills a process.
    """
    available = _machine_available(root)
    if available is None:
        return None
    nodes = numa_nodes(root)
    free = [sum(node.free_bytes for node in nodes if node.allowed)] if _bound(nodes) else []
    return max(0.0, min([available, *free, *(_left(group) for group in groups("memory", root))]))


def physical_bytes(root: Path = ROOT) -> float:
    size = sysctl("hw.memsize", root)
    total = float(size) if size.isdigit() else meminfo(root).get("MemTotal")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if total is None else total


def meminfo(root: Path = ROOT) -> dict[str, float]:
    """/proc/meminfo in bytes."""
    fields = key_values(text(root / "proc/meminfo"))
    return {key: float(value.split()[0]) * 1024 for key, value in fields if value.endswith(" kB")}


def _machine_available(root: Path) -> float | None:
    """MemAvailable on Linux; free, inactive, speculative and purgeable pages on macOS."""
    if has_proc(root):
        return meminfo(root).get("MemAvailable")
    output = command(root / "usr/bin/vm_stat")
    page = re.search(r"page size of (\d+) bytes", output)
    spare = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", output, re.MULTILINE)
    return float(page.group(1)) * sum(map(int, spare)) if page and spare else None


# --- control groups


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    for group in groups("memory", root):
        for file, limit in _limits(group):
            yield MemoryLimit(num_bytes=limit, why=f"{file} of cgroup {group.name}")


def _limits(group: Group) -> Iterator[tuple[str, float]]:
    """(file, limit) of one group; version 1 writes no limit as a number larger than any memory."""
    if group.version == 2:
        limits = {name: group.number(name) for name in ("memory.max", "memory.high")}
    else:
        limits = {
            "memory.limit_in_bytes": group.number("memory.limit_in_bytes"),
            "hierarchical_memory_limit": group.stat("memory.stat", "hierarchical_memory_limit"),
        }
    yield from ((name, limit) for name, limit in limits.items() if limit is not None)


def _left(group: Group) -> float:
    """Memory that a group may still allocate; infinite where it has no limit or reports no usage."""
    now, cached = {
        1: ("memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.current", "inactive_file"),
    }[group.version]
    used = group.number(now)
    limit = min((limit for _, limit in _limits(group)), default=None)
    if used is None or limit is None:
        return float("inf")
    return limit - max(0.0, used - (group.stat("memory.stat", cached) or 0.0))


# --- NUMA


def _bound(nodes: tuple[NumaNode, ...]) -> bool:
    """Whether this process may allocate on some nodes only."""
    return any(node.allowed for node in nodes) and not all(node.allowed for node in nodes)


def _node_limit(root: Path) -> Iterator[MemoryLimit]:
    nodes = numa_nodes(root)
    if _bound(nodes):
        allowed = [node for node in nodes if node.allowed]
        listed = ", ".join(str(node.index) for node in allowed)
        yield MemoryLimit(num_bytes=sum(node.memory_bytes for node in allowed), why=f"cpuset: NUMA node {listed} only")


# --- resident memory


def resident_bytes() -> float:
    """Resident memory of this process now; its peak on macOS, which has no /proc."""
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident_bytes()


def peak_of(pid: int | str) -> float | None:
    """Peak resident memory of a process; none without /proc, or where the process has ended."""
    try:
        line = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return float(line.group(1)) * 1024 if line else None


def peak_resident_bytes() -> float:
    """Peak resident memory of this program: getrusage also counts the program that the process ran before."""
    if (peak := peak_of("self")) is not None:
        return peak
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)
