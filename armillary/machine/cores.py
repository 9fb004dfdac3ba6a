"""Cores that this process may use, by affinity, cpuset and CPU quota, and its number of compute threads.

A process with a quota of 1 CPU of 64 that starts 64 threads is throttled by the kernel most of the time. psutil knows
affinity only, neither cpusets nor quotas.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path

from armillary.machine.cgroup import Group, groups
from armillary.machine.system_files import ROOT, has_proc, numbers, sysctl, text

_ROUND_UP = 0.25
"""a quota of 1.75 CPUs counts as 2: two threads lose an eighth of their time, one thread would lose three sevenths"""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The online logical cores of this machine, and those that this process may use."""

    present: int
    allowed: frozenset[int]
    """cores allowed by affinity and cpuset; empty where the system does not list them"""
    quota: float | None
    """CPU quota of the control groups, in CPUs; None without a limit"""
    usable: int
    """cores that can run at the same time"""
    physical: int
    """allowed physical cores; performance cores on an Apple chip; 0 where the system does not report them"""
    threads: int
    """compute threads: one per physical core, within the quota"""
    why: str
    """why usable is less than present; '' where it is not"""


def usable_cores(root: Path = ROOT) -> int:
    """Logical cores that this process may keep busy, at least 1."""
    return read_cores(root).usable


def compute_threads(ranks: int = 1, root: Path = ROOT) -> int:
    """Compute threads per process for `ranks` processes on this machine, at least 1."""
    return max(1, read_cores(root).threads // max(1, ranks))


def read_cores(root: Path = ROOT) -> Cores:
    online = _online(root)
    affinity = _affinity(root) & online or online
    allowed = affinity & _cpuset(root) or affinity
    present = len(online) or _counted(root)
    quota, by = min(_quotas(root), default=(None, ""))
    available = len(allowed) or present
    usable, physical = _within(available, quota), _physical(allowed, root)
    return Cores(
        present=present,
        allowed=allowed,
        quota=quota,
        usable=usable,
        physical=physical,
        threads=_within(physical or available, quota),
        why=_why(present, len(affinity) or present, available, by if usable < available else ""),
    )


def _within(cores: int, quota: float | None) -> int:
    return cores if quota is None else max(1, min(cores, floor(quota + _ROUND_UP)))


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
    """Number of cores where the kernel lists none: from sysctl on macOS, else from Python."""
    count = sysctl("hw.logicalcpu", root)
    return int(count) if count.isdigit() else os.cpu_count() or 1


def _affinity(root: Path) -> frozenset[int]:
    """Affinity of this process, from the kernel; in a test tree from its status file."""
    if root == ROOT and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    listed = re.search(r"^Cpus_allowed_list:\s*(\S+)", text(root / "proc/self/status"), re.MULTILINE)
    return numbers(listed.group(1)) if listed else _online(root)


def _cpuset(root: Path) -> frozenset[int]:
    """Cores of this process's cpuset; a group without one has its parent's."""
    for group in groups("cpuset", root):
        for file in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            if cores := numbers(group.read(file)):
                return cores
    return _online(root)


def _physical(allowed: frozenset[int], root: Path) -> int:
    """Allowed physical cores; performance cores on a Mac; 0 where the system does not report them."""
    if not has_proc(root):
        count = sysctl("hw.perflevel0.physicalcpu", root) or sysctl("hw.physicalcpu", root)
        return int(count) if count.isdigit() else 0
    folder = root / "sys/devices/system/cpu"
    siblings = [numbers(text(folder / f"cpu{core}/topology/thread_siblings_list")) for core in allowed]
    return len({min(threads) for threads in siblings}) if siblings and all(siblings) else 0


# --- quota


def _quotas(root: Path) -> Iterator[tuple[float, str]]:
    """(CPUs, description) of every group with a quota."""
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
