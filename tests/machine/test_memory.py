"""Memory limits from made-up machines: none, nested groups of version 1 and 2, both at once, NUMA, a Mac."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.machine.memory import available_bytes, limit_bytes, memory_limit
from tests.machine.trees import GIB, M1, NO_LIMIT_V1, linux, mac, v1_mounts, v2_groups, write


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    root = linux(tmp_path)
    assert (limit_bytes(root), memory_limit(root).why, available_bytes(root)) == (256 * GIB, "", 200 * GIB)


def test_an_ancestor_of_the_own_group_limits(tmp_path: Path) -> None:
    root = v2_groups(
        linux(tmp_path),
        "/slice/job/step",
        {
            "slice/memory.max": 4 * GIB,
            "slice/memory.current": 3 * GIB,
            "slice/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5",
            "slice/job/memory.max": "max",
            "slice/job/step/memory.max": 9 * GIB,
        },
    )
    assert memory_limit(root).num_bytes == 4 * GIB
    assert memory_limit(root).why == "memory.max of cgroup /slice"
    assert available_bytes(root) == 3 * GIB  # 4 - (3 - 2 that the kernel can drop)


def test_memory_high_counts_as_a_limit(tmp_path: Path) -> None:
    root = v2_groups(linux(tmp_path), "/a", {"a/memory.max": 4 * GIB, "a/memory.high": 3 * GIB})
    assert limit_bytes(root) == 3 * GIB
    assert available_bytes(root) == 200 * GIB  # the group does not tell its use


def test_a_sibling_group_does_not_limit(tmp_path: Path) -> None:
    root = v2_groups(linux(tmp_path), "/mine", {"other/memory.max": GIB})
    assert limit_bytes(root) == 256 * GIB


def test_version_1_in_a_container(tmp_path: Path) -> None:
    """The mount's root is the container's group, so its files lie at the mount point."""
    root = write(
        linux(tmp_path),
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n1:name=systemd:/docker/abc",
            "proc/self/mountinfo": v1_mounts("memory", "cpu,cpuacct", top="/docker/abc"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {8 * GIB}\ntotal_inactive_file {GIB}",
        },
    )
    assert limit_bytes(root) == 8 * GIB
    assert available_bytes(root) == 3 * GIB


def test_nested_version_1(tmp_path: Path) -> None:
    root = write(
        linux(tmp_path),
        {
            "proc/self/cgroup": "4:memory:/slurm/job7/step0",
            "proc/self/mountinfo": v1_mounts("memory"),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "sys/fs/cgroup/memory/slurm/job7/memory.limit_in_bytes": 16 * GIB,
            "sys/fs/cgroup/memory/slurm/job7/step0/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )
    assert (limit_bytes(root), memory_limit(root).why) == (16 * GIB, "memory.limit_in_bytes of cgroup /slurm/job7")


def test_hybrid_reads_the_controller_where_it_is(tmp_path: Path) -> None:
    root = write(
        linux(tmp_path),
        {
            "proc/self/cgroup": "4:memory:/job\n0::/elsewhere",
            "proc/self/mountinfo": v1_mounts("memory")
            + "\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 2 * GIB,
            "sys/fs/cgroup/unified/elsewhere/cgroup.procs": "1",
        },
    )
    assert limit_bytes(root) == 2 * GIB


def test_a_group_outside_the_namespace_falls_back_to_the_mount_point(tmp_path: Path) -> None:
    root = v2_groups(linux(tmp_path), "/../other", {"memory.max": 5 * GIB})
    assert limit_bytes(root) == 5 * GIB


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_usual_places_where_proc_says_nothing_of_groups(tmp_path: Path, file: str) -> None:
    assert limit_bytes(write(linux(tmp_path), {f"sys/fs/cgroup/{file}": GIB})) == GIB


def test_bound_to_one_numa_node(tmp_path: Path) -> None:
    nodes = {
        f"sys/devices/system/node/node{n}/meminfo": f"Node {n} MemTotal:  {128 * GIB // 1024} kB\n"
        f"Node {n} MemFree:  {100 * GIB // 1024} kB\nNode {n} Inactive(file):  {GIB // 1024} kB"
        for n in (0, 1)
    }
    root = write(linux(tmp_path), nodes | {"proc/self/status": "Mems_allowed_list:\t1"})
    assert memory_limit(root).why == "cpuset: NUMA node 1 only"
    assert (limit_bytes(root), available_bytes(root)) == (128 * GIB, 101 * GIB)


def test_a_mac(tmp_path: Path) -> None:
    said = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:     1000.\nPages active:   9000.\n"
        "Pages inactive:     500.\nPages speculative:      20.\nPages wired down:   9.\nPages purgeable:  4."
    )
    root = mac(tmp_path, facts=M1, vm_stat=said)
    assert (limit_bytes(root), available_bytes(root)) == (8 * GIB, 1524 * 16384)


def test_a_system_that_says_nothing_of_what_is_free(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert limit_bytes(tmp_path) > 0


def test_this_machine() -> None:
    free = available_bytes()
    assert free is None or 0 < free <= limit_bytes()
