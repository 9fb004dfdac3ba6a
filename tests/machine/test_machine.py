"""This machine, and machines made of recorded files."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from armillary.machine.gpus import Gpu
from armillary.machine.host_info import read_cpu, read_disks, read_network
from armillary.machine.machine import Machine, chip_of, here, machine
from tests.machine.trees import M1, mac

CPU = """\
processor\t: {n}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu sse2 avx avx2 fma avx512f avx512_bf16 amx_tile amx_bf16 amx_int8

"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two sockets of two cores with two threads each, 8 GiB."""
    text = "".join(CPU.format(n=n, socket=n // 4, core=n // 2 % 2) for n in range(8))
    files = {
        "proc/cpuinfo": text,
        "proc/meminfo": "MemTotal:        8388608 kB\nMemAvailable:    4194304 kB\nHugePages_Total:       0\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def bare(**changes: object) -> Machine:
    """This machine without accelerators, with changes."""
    return replace(machine(), **({"gpus": (), "gpu_links": {}} | changes))  # type: ignore[arg-type]


def gpu(name: str, gib: float | None = None, **fields: object) -> Gpu:
    return Gpu(name=name, vendor="NVIDIA", memory_bytes=gib and gib * 2**30, **fields)  # type: ignore[arg-type]


# --- reading


def test_this_machine_can_be_read() -> None:
    found = machine()
    assert 1 <= found.cpu.usable <= (os.cpu_count() or 1)
    assert found.memory_bytes > 2**28 and found.system


def test_the_processor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cpu = read_cpu(root)
    assert (cpu.model, cpu.sockets, cpu.cores) == ("Intel(R) Xeon(R) Platinum 8480+", 2, 4)
    assert cpu.isa == ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def test_memory_and_cores_are_what_the_container_may_use(root: Path) -> None:
    assert (machine(root).memory_bytes, machine(root).memory_why) == (8 * 2**30, "")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text(f"{2**30}\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    found = machine(root)
    assert (found.memory_bytes, found.memory_why) == (2**30, "memory.max of cgroup /")
    assert (found.cpu.present, found.cpu.usable, found.cpu.why) == (8, 1, "quota of 0.5 CPUs of cgroup /")
    assert here(replace(found, gpus=())).num_devices == 1


def test_a_mac(tmp_path: Path) -> None:
    found = machine(mac(tmp_path, facts=M1))
    assert (found.cpu.model, found.cpu.vendor, found.cpu.present, found.cpu.threads) == ("Apple M1", "Apple", 8, 4)
    assert found.memory_bytes == 8 * 2**30
    assert found.cpu.units == {"bf16": "", "fp16": "asimdhp", "int8": "asimddp"}


def test_network_cards_that_are_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(up: bool, speed: int, flags: str = "up,running") -> SimpleNamespace:
        return SimpleNamespace(isup=up, speed=speed, flags=flags)

    cards = {"ib0": stat(True, 400_000), "eth0": stat(True, 0), "eth1": stat(False, 1000), "lo": stat(True, 0)}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: cards)
    assert {card.name: card.bits_per_s for card in read_network()} == {"ib0": 400e9, "eth0": None}
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert read_network() == ()


def test_disks_are_those_one_can_write_to(root: Path) -> None:
    mounts = ["/dev/nvme0n1p1 / ext4 rw 0 0", "/dev/loop3 /usr squashfs ro 0 0", "proc /proc proc rw 0 0"]
    (root / "proc/mounts").write_text("\n".join(mounts))
    assert [(disk.path, disk.kind) for disk in read_disks(root)] == [("/", "ext4 on nvme")]


def test_a_system_without_these_files_is_still_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_stats", dict)
    found = machine(tmp_path)
    assert found.cpu.cores >= 1 and found.memory_bytes > 0
    assert (found.available_bytes, found.shm_bytes, found.disks, found.network) == (None, None, (), ())


# --- as a cluster


@pytest.mark.parametrize(
    ("name", "gib", "chip"),
    [
        ("NVIDIA H200", 140.4, "h200"),
        ("NVIDIA H100 80GB HBM3", 79.6, "h100-sxm"),
        ("NVIDIA H100 PCIe", 79.6, "h100-pcie"),
        ("NVIDIA H100 NVL", 93.6, "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb-sxm"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb-sxm"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80gb-pcie"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx-6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "rtx-pro-6000"),
        ("Tesla V100-SXM2-16GB", 16, "v100-16gb"),
        ("Tesla T4", 15, "t4"),
        ("AMD Instinct MI300X OAM", 192, "mi300x"),
    ],
)
def test_a_gpu_is_found_in_the_catalogue(name: str, gib: float, chip: str) -> None:
    found = chip_of(gpu(name, gib))
    assert found.name == chip
    assert found.memory_bytes == gib * 2**30  # what the driver reports, not what the box says


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA A100-PCIE-40GB", 40),  # the catalogue has its 80 GB sister only
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA H999", 500),
    ],
)
def test_a_gpu_that_only_resembles_one_is_not_taken_for_it(name: str, gib: float) -> None:
    found = chip_of(gpu(name, gib))
    assert (found.title, found.flops, found.memory_bytes_per_s) == (name, {}, None)


def test_gpus_with_nvlink_between_all_of_them() -> None:
    two = (gpu("NVIDIA H200", 140.4), gpu("NVIDIA H200", 140.4))
    cluster = here(bare(gpus=two, gpu_links={"0-1": "NV18"}))
    assert cluster.num_devices == 2 and cluster.tiers[0].link.name == "nvlink-4"


def test_gpus_without_nvlink_talk_over_their_slots() -> None:
    two = (gpu("NVIDIA L4", 22.5, pcie_generation=4, pcie_lanes=16),) * 2
    assert here(bare(gpus=two, gpu_links={"0-1": "SYS"})).tiers[0].link.name == "pcie4-x16"


def test_a_link_nobody_knows_stays_unknown() -> None:
    tier = here(bare(gpus=(gpu("NVIDIA H999", 500),) * 2)).tiers[0]
    assert tier.link.name == "unknown" and tier.bytes_per_s is None


def test_one_gpu_has_no_tiers() -> None:
    assert here(bare(gpus=(gpu("NVIDIA H200", 140.4),))).tiers == ()


def test_without_gpus_the_cores_are_devices_of_unknown_peak() -> None:
    found = bare()
    found = replace(found, cpu=replace(found.cpu, threads=4, isa=("avx2", "amx_bf16")), memory_bytes=8e9)
    cluster = here(found)
    assert (cluster.chip.name, cluster.num_devices, cluster.chip.memory_bytes) == ("cpu-core-amx", 4, 2e9)
    assert cluster.chip.flops == {} and cluster.tiers[0].bytes_per_s is None
