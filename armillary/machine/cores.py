"""Cores that this process may run on: affinity, cpuset and CPU quota counted, and how many threads should compute.

A process limited to 1 CPU of 64 that starts 64 threads is throttled by the kernel most of the time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path

from armillary.machine.cgroup import Group, groups
from armillary.machine.system_files import ROOT, has_proc, numbers, sysctl, text

_NEARLY = 0.25
"""a quota of 1.75 CPUs counts as 2: two threads then lose an eighth of their time, one would lose three sevenths"""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The logical cores of this machine and what this process may use of them."""

    present: int
    """logical cores that are online"""
    allowed: frozenset[int]
    """those that affinity and cpuset leave to this process; empty where the system cannot say"""
    quota: float | None
    """CPUs' worth of time that control groups grant; None without a limit"""
    usable: int
    """how many can work at once"""
    physical: int
    """physical cores among the allowed ones, performance cores of an Apple chip; 0 where the system does not say"""
    threads: int
    """how many threads should compute: one for each of those, as far as the quota goes"""
    why: str
    """what makes usable less than present; '' where nothing does"""


def usable_cores(root: Path = ROOT) -> int:
    """Logical cores this process may keep busy, at least 1."""
    return read_cores(root).usable


def compute_threads(ranks: int = 1, root: Path = ROOT) -> int:
    """Threads that one of `ranks` processes on this machine should compute with, at least 1."""
    return max(1, read_cores(root).threads // max(1, ranks))


def read_cores(root: Path = ROOT) -> Cores:
    """Read what there is and what limits it."""
    online = _online(root)
    affinity = _affinity(root) & online or online
    allowed = affinity & _cpuset(root) or affinity
    present = len(online) or _counted(root)
    quota, by = min(_quotas(root), default=(None, ""))
    may = len(allowed) or present
    usable, physical = _within(may, quota), _physical(allowed, root)
    return Cores(
        present=present,
        allowed=allowed,
        quota=quota,
        usable=usable,
        physical=physical,
        threads=_within(physical or may, quota),
        why=_why(present, len(affinity) or present, may, by if usable < may else ""),
    )


def _within(cores: int, quota: float | None) -> int:
    return cores if quota is None else max(1, min(cores, floor(quota + _NEARLY)))


def _why(present: int, affinity: int, allowed: int, quota: str) -> str:
    reasons = [
        f"affinity allows {affinity}" if affinity < present else "",
        f"cpuset allows {allowed}" if allowed < affinity else "",
        quota,
    ]
    return "; ".join(reason for reason in reasons if reason)


# --- which cores


def _online(root: Path) -> frozenset[int]:
    listed = numbers(text(root / "sys/devices/system/cpu/online"))
    return listed or frozenset(int(n) for n in re.findall(r"^processor\s*:\s*(\d+)", _cpuinfo(root), re.MULTILINE))


def _cpuinfo(root: Path) -> str:
    return text(root / "proc/cpuinfo")


def _counted(root: Path) -> int:
    """Where the kernel lists no cores: what macOS says, or Python."""
    said = sysctl("hw.logicalcpu", root)
    return int(said) if said.isdigit() else os.cpu_count() or 1


def _affinity(root: Path) -> frozenset[int]:
    """Of this process: asked from the kernel, or in a made-up tree from its status file."""
    if root == ROOT and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", text(root / "proc/self/status"), re.MULTILINE)
    return numbers(listed.group(1)) if listed else _online(root)


def _cpuset(root: Path) -> frozenset[int]:
    """Cores of this process's cpuset; a group with nothing of its own takes its parent's."""
    for group in groups("cpuset", root):
        for file in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if found := numbers(group.read(file)):
                return found
    return _online(root)


def _physical(allowed: frozenset[int], root: Path) -> int:
    """Distinct physical cores among the allowed ones; performance cores on a Mac; 0 where nobody says."""
    if not has_proc(root):
        said = sysctl("hw.perflevel0.physicalcpu", root) or sysctl("hw.physicalcpu", root)
        return int(said) if said.isdigit() else 0
    folder = root / "sys/devices/system/cpu"
    siblings = [numbers(text(folder / f"cpu{core}/topology/thread_siblings_list")) for core in allowed]
    return len({min(together) for together in siblings}) if siblings and all(siblings) else 0


# --- quota


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """(CPUs, who says so) of every group with a quota."""
    for group in groups("cpu", root):
        quota, period = _quota(group)
        if quota.isdigit() and period.isdigit() and int(period):
            cpus = int(quota) / int(period)
            yield cpus, f"quota of {cpus:.4g} CPU{'' if cpus == 1 else 's'} of cgroup {group.name}"


def _quota(group: Group) -> tuple[str, str]:
    if group.version == 1:
        return group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
    quota, _, period = group.read("cpu.max").partition(" ")
    return quota, period
