"""Cores from made-up machines: affinity, cpuset, quotas of either version, hyper-threads, a Mac, NUMA."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from armillary.machine.cores import compute_threads, read_cores, usable_cores
from armillary.machine.numa import numa_nodes
from tests.machine.trees import GIB, M1, linux, mac, v1_mounts, v2_groups, write


def test_without_limits_all_cores_count(tmp_path: Path) -> None:
    found = read_cores(linux(tmp_path))
    assert (found.present, found.usable, found.threads, found.quota, found.why) == (64, 64, 64, None, "")


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000", 1), ("50000", 1), ("150000", 1), ("175000", 2), ("6400000", 64), ("max", 64)]
)
def test_a_quota(tmp_path: Path, quota: str, cores: int) -> None:
    root = v2_groups(linux(tmp_path), "/job", {"job/cpu.max": f"{quota} 100000"})
    assert (usable_cores(root), compute_threads(root=root)) == (cores, cores)


def test_the_quota_of_an_ancestor(tmp_path: Path) -> None:
    root = v2_groups(linux(tmp_path), "/pod/box", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"})
    found = read_cores(root)
    assert (found.usable, found.quota, found.why) == (2, 2.0, "quota of 2 CPUs of cgroup /pod")


def test_a_quota_of_version_1_beside_another_controller(tmp_path: Path) -> None:
    root = write(
        linux(tmp_path),
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc",
            "proc/self/mountinfo": v1_mounts("cpu,cpuacct", top="/docker/abc"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 100000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
        },
    )
    assert (usable_cores(root), read_cores(root).why) == (1, "quota of 1 CPU of cgroup /")
    write(root, {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": -1})
    assert usable_cores(root) == 64


def test_affinity_and_cpuset_meet(tmp_path: Path) -> None:
    root = v2_groups(linux(tmp_path), "/job", {"cpuset.cpus.effective": "0-63", "job/cpuset.cpus.effective": "4-11"})
    write(root, {"proc/self/status": "Cpus_allowed_list:\t0-7,60-99"})
    found = read_cores(root)
    assert found.allowed == {4, 5, 6, 7}
    assert (found.usable, found.why) == (4, "affinity allows 12; cpuset allows 4")


def test_one_thread_computes_on_each_physical_core(tmp_path: Path) -> None:
    """Cores 0 and 4 are the two threads of one core, and so on."""
    root = linux(tmp_path, cores=8)
    write(
        root, {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4},{n % 4 + 4}" for n in range(8)}
    )
    assert (usable_cores(root), compute_threads(root=root), compute_threads(2, root)) == (8, 4, 2)
    write(root, {"proc/self/status": "Cpus_allowed_list:\t0,4,5"})
    assert (usable_cores(root), compute_threads(root=root), compute_threads(8, root)) == (3, 2, 1)


def test_a_mac_computes_on_its_performance_cores(tmp_path: Path) -> None:
    root = mac(tmp_path, facts=M1)
    assert (read_cores(root).present, usable_cores(root), compute_threads(root=root)) == (8, 8, 4)


def test_numa_nodes(tmp_path: Path) -> None:
    files = {
        "node0/cpulist": "0-31",
        "node0/meminfo": f"Node 0 MemTotal: {128 * GIB // 1024} kB",
        "node1/cpulist": "32-63",
        "node1/meminfo": f"Node 1 MemTotal: {64 * GIB // 1024} kB",
    }
    root = write(linux(tmp_path), {f"sys/devices/system/node/{name}": content for name, content in files.items()})
    first, second = numa_nodes(root)
    assert (first.index, len(first.cores), first.memory_bytes, first.allowed) == (0, 32, 128 * GIB, True)
    assert (second.index, min(second.cores), second.memory_bytes, second.allowed) == (1, 32, 64 * GIB, False)
    assert numa_nodes(tmp_path / "nowhere") == ()


def test_this_machine() -> None:
    assert 1 <= compute_threads() <= usable_cores() <= (os.cpu_count() or 1)
