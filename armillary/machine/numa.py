"""NUMA nodes: which cores share a memory controller, and how much memory hangs on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.system_files import ROOT, numbers, text


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node of this machine."""

    index: int
    """as the kernel counts"""
    cores: frozenset[int]
    """its logical cores; none for memory without cores (HBM, CXL)"""
    memory_bytes: float
    """memory on it"""
    free_bytes: float
    """of that, unused or holding file pages that can be dropped at once"""
    allowed: bool
    """whether this process may take memory from it (cpuset)"""


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """Every node, or none where the system has no such thing."""
    allowed = _allowed(root)
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        index = int(folder.name.removeprefix("node"))
        memory = _meminfo(text(folder / "meminfo"))
        found.append(
            NumaNode(
                index=index,
                cores=numbers(text(folder / "cpulist")),
                memory_bytes=memory.get("MemTotal", 0.0),
                free_bytes=memory.get("MemFree", 0.0) + memory.get("Inactive(file)", 0.0),
                allowed=not allowed or index in allowed,
            )
        )
    return tuple(sorted(found, key=lambda node: node.index))


def _allowed(root: Path) -> frozenset[int]:
    listed = re.search(r"^Mems_allowed_list:\s*(\S+)", text(root / "proc/self/status"), re.MULTILINE)
    return numbers(listed.group(1)) if listed else frozenset()


def _meminfo(lines: str) -> dict[str, float]:
    """'Node 0 MemTotal:  8388608 kB' in bytes."""
    found = re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", lines, re.MULTILINE)
    return {key: float(kilobytes) * 1024 for key, kilobytes in found}
