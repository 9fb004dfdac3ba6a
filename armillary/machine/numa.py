"""NUMA nodes: their cores and memory."""

import re
from dataclasses import dataclass
from pathlib import Path

from armillary.machine.system_files import ROOT, numbers, text


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One NUMA node of this machine; memory without cores (HBM, CXL) has none."""

    index: int
    cores: frozenset[int]
    memory_bytes: float
    free_bytes: float
    """its free memory, with file pages that can be dropped"""
    allowed: bool
    """whether this process may allocate on it (cpuset)"""


def numa_nodes(root: Path = ROOT) -> tuple[NumaNode, ...]:
    """All nodes; none where the system has no NUMA."""
    allowed = _allowed(root)
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        index = int(folder.name.removeprefix("node"))
        memory = _meminfo(text(folder / "meminfo"))
        nodes.append(
            NumaNode(
                index=index,
                cores=numbers(text(folder / "cpulist")),
                memory_bytes=memory.get("MemTotal", 0.0),
                free_bytes=memory.get("MemFree", 0.0) + memory.get("Inactive(file)", 0.0),
                allowed=not allowed or index in allowed,
            )
        )
    return tuple(sorted(nodes, key=lambda node: node.index))


def _allowed(root: Path) -> frozenset[int]:
    listed = re.search(r"^Mems_allowed_list:\s*(\S+)", text(root / "proc/self/status"), re.MULTILINE)
    return numbers(listed.group(1)) if listed else frozenset()


def _meminfo(lines: str) -> dict[str, float]:
    """'Node 0 MemTotal:  8388608 kB' in bytes."""
    fields = re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", lines, re.MULTILINE)
    return {key: float(kilobytes) * 1024 for key, kilobytes in fields}
