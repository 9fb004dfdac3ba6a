"""Cores that this process may use, by affinity, cpuset and CPU quota, its number of compute threads, and the cores that
other processes keep busy.

A process with a quota of 1 CPU of 64 that starts 64 threads is throttled by the kernel most of the time. psutil knows
affinity only, neither cpusets nor quotas. Ceilings of a CPU that other processes use are far too low, and consistently
so: their spread does not show it.
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor
from pathlib import Path

from armillary.machine.cgroup import groups
from armillary.machine.system_files import ROOT, has_proc, numbers, sysctl, text

BUSY_CORES = 0.3
"""with more cores busy, figures of a CPU are not stored as ceilings"""
_ROUND_UP = 0.25
"""a quota of 1.75 CPUs counts as 2: two threads lose an eighth of their time, one thread would lose three sevenths"""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """The online logical cores of this machine, and those that this process may use: `usable` can run at the same
    time."""

    present: int
    allowed: frozenset[int]
    """cores allowed by affinity and cpuset; empty where the system does not list them"""
    quota: float | None
    """CPU quota of the control groups, in CPUs; None without a limit"""
    usable: int
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
    return listed or frozenset(
        int(n) for n in re.findall(r"^processor\s*:\s*(\d+)", text(root / "proc/cpuinfo"), re.MULTILINE)
    )


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
        if group.version == 1:
            quota, period = group.read("cpu.cfs_quota_us"), group.read("cpu.cfs_period_us")
        else:
            quota, _, period = group.read("cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            cpus = int(quota) / int(period)
            yield cpus, f"quota of {cpus:.4g} CPU{'' if cpus == 1 else 's'} of cgroup {group.name}"


# --- other processes


class BackgroundLoad:
    """Cores that other processes keep busy, counted from its creation."""

    def __init__(self) -> None:
        self._at, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float | None:
        """Cores that other processes used on average so far; None where psutil is not installed."""
        busy, took = _busy_s(), time.monotonic() - self._at
        if busy is None or self._busy is None or took <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_s() - self._own)) / took)


def _busy_s() -> float | None:
    """CPU seconds of user and system work on all cores since boot."""
    try:
        import psutil
    except ModuleNotFoundError:
        return None
    times = psutil.cpu_times()
    return float(times.user + getattr(times, "nice", 0.0) + times.system)


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
