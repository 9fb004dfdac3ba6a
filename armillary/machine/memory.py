"""Memory that this process may use: the machine's, a control group's limit, or that of its NUMA nodes if less.

Nothing here imports torch: host memory only. A process that takes more than `limit_bytes` is killed, whatever
/proc/meminfo says of the machine as a whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.cgroup import Group, groups
from armillary.machine.numa import NumaNode, numa_nodes
from armillary.machine.system_files import ROOT, command, has_proc, pairs, sysctl, text


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """The most memory this process may hold, and who says so."""

    num_bytes: float
    """the limit"""
    why: str
    """'' where it is all that the machine has; else what limits it, in words"""


def limit_bytes(root: Path = ROOT) -> float:
    """The least of physical memory and the limits of this process's own control group and all above it."""
    return memory_limit(root).num_bytes


def memory_limit(root: Path = ROOT) -> MemoryLimit:
    """The same, with what sets it."""
    physical = MemoryLimit(num_bytes=physical_bytes(root), why="")
    return min([physical, *_node_limit(root), *_group_limits(root)], key=lambda limit: limit.num_bytes)


def available_bytes(root: Path = ROOT) -> float | None:
    """What can still be taken now; None where the system does not say.

    The least of what the machine has to spare and, for each limited group, limit - (usage - inactive file pages):
    the kernel drops those pages before it kills anything.
    """
    of_machine = _machine_available(root)
    if of_machine is None:
        return None
    nodes = numa_nodes(root)
    free = [sum(node.free_bytes for node in nodes if node.allowed)] if _bound(nodes) else []
    return max(0.0, min([of_machine, *free, *(_left(group) for group in groups("memory", root))]))


def physical_bytes(root: Path = ROOT) -> float:
    """Memory of the machine."""
    if has_proc(root):
        total = meminfo(root).get("MemTotal")
    else:
        said = sysctl("hw.memsize", root)
        total = float(said) if said.isdigit() else None
    if total is not None:
        return total
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def meminfo(root: Path = ROOT) -> dict[str, float]:
    """/proc/meminfo in bytes."""
    found = pairs(text(root / "proc/meminfo"))
    return {key: float(value.split()[0]) * 1024 for key, value in found if value.endswith(" kB")}


def _machine_available(root: Path) -> float | None:
    """MemAvailable of Linux; on macOS free, inactive, speculative and purgeable pages."""
    if has_proc(root):
        return meminfo(root).get("MemAvailable")
    said = command(root / "usr/bin/vm_stat")
    page = re.search(r"page size of (\d+) bytes", said)
    spare = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)", said, re.MULTILINE)
    return float(page.group(1)) * sum(map(int, spare)) if page and spare else None


# --- control groups


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    for group in groups("memory", root):
        for file, limit in _limits(group):
            yield MemoryLimit(num_bytes=limit, why=f"{file} of cgroup {group.name}")


def _limits(group: Group) -> Iterator[tuple[str, float]]:
    """(file, limit) of one group; version 1 writes 'none' as a number beyond any memory."""
    if group.version == 2:
        named = {name: group.number(name) for name in ("memory.max", "memory.high")}
    else:
        named = {
            "memory.limit_in_bytes": group.number("memory.limit_in_bytes"),
            "hierarchical_memory_limit": group.stat("memory.stat", "hierarchical_memory_limit"),
        }
    yield from ((name, limit) for name, limit in named.items() if limit is not None)


def _left(group: Group) -> float:
    """What a group may still take; without end where it has no limit or does not tell its use."""
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
    """Whether this process may take memory from some nodes only."""
    return any(node.allowed for node in nodes) and not all(node.allowed for node in nodes)


def _node_limit(root: Path) -> Iterator[MemoryLimit]:
    nodes = numa_nodes(root)
    if _bound(nodes):
        mine = [node for node in nodes if node.allowed]
        listed = ", ".join(str(node.index) for node in mine)
        yield MemoryLimit(num_bytes=sum(node.memory_bytes for node in mine), why=f"cpuset: NUMA node {listed} only")
