"""CPUs by name: what tells two of them apart, on ARM, Apple and x86."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.machine.device_name import cpu_name, cpu_vendor
from tests.machine.trees import M1, SAPPHIRE_FLAGS, SKYLAKE_FLAGS, arm_cores, mac, write, x86_cores

GENERIC = "Intel(R) Xeon(R) Processor @ 2.50GHz"


def named(root: Path, cpuinfo: str, environment: dict[str, str] | None = None) -> str:
    return cpu_name(write(root, {"proc/cpuinfo": cpuinfo}), environment or {})


@pytest.mark.parametrize(
    ("implementer", "part", "variant", "revision", "name"),
    [
        ("0x41", "0xd0c", "0x3", "1", "Neoverse-N1 r3p1"),
        ("0x41", "0xd40", "0x1", "1", "Neoverse-V1 r1p1"),
        ("0x41", "0xd4f", "0x0", "0", "Neoverse-V2 r0p0"),
        ("0x41", "0xd08", "0x0", "3", "Cortex-A72 r0p3"),
        ("0xc0", "0xac3", "0x0", "0", "Ampere-1 r0p0"),
        ("0x46", "0x001", "0x1", "0", "A64FX r1p0"),
        ("0x51", "0x001", "0x1", "1", "Oryon r1p1"),
        ("0x41", "0xfff", "0x0", "0", "Arm part 0xfff r0p0"),
        ("0x7a", "0x123", "0x2", "5", "implementer 0x7a part 0x123 r2p5"),
    ],
)
def test_arm_by_its_part(tmp_path: Path, implementer: str, part: str, variant: str, revision: str, name: str) -> None:
    assert named(tmp_path, arm_cores((2, implementer, part, variant, revision))) == name


def test_all_parts_of_a_mix(tmp_path: Path) -> None:
    little, big = (4, "0x41", "0xd05", "0x1", "0"), (2, "0x41", "0xd0b", "0x4", "0")
    assert named(tmp_path, arm_cores(little, big)) == "4 Cortex-A55 r1p0 + 2 Cortex-A76 r4p0"
    asahi = arm_cores((4, "0x61", "0x022", "0x1", "1"), (4, "0x61", "0x023", "0x1", "1"))
    assert named(tmp_path, asahi) == "4 Apple M1 E-core r1p1 + 4 Apple M1 P-core r1p1"
    assert cpu_vendor(tmp_path) == "Apple"


def test_a_mac_by_its_brand(tmp_path: Path) -> None:
    assert cpu_name(mac(tmp_path, facts=M1), {}) == "Apple M1"


def test_x86_by_its_model(tmp_path: Path) -> None:
    name = "AMD EPYC 7763 64-Core Processor"
    assert named(tmp_path, x86_cores(f"{name}   ", model=1, stepping=1, flags=SKYLAKE_FLAGS)) == name
    laptop = "Intel(R) Core(TM) Ultra 7 155H"
    assert named(tmp_path, x86_cores(laptop, model=170, stepping=4, flags="avx2")) == laptop


def test_two_generations_behind_one_brand_string(tmp_path: Path) -> None:
    skylake = named(tmp_path, x86_cores(GENERIC, model=85, stepping=4, flags=SKYLAKE_FLAGS))
    sapphire = named(tmp_path, x86_cores(GENERIC, model=143, stepping=8, flags=SAPPHIRE_FLAGS))
    assert skylake == f"{GENERIC} (family 6 model 85 stepping 4, no bf16)"
    assert sapphire == f"{GENERIC} (family 6 model 143 stepping 8, amx_bf16 avx512_bf16)"


def test_a_cpu_that_torch_is_held_back_on_is_another(tmp_path: Path) -> None:
    cpuinfo = x86_cores("Intel(R) Xeon(R) Platinum 8480+", model=143, stepping=8, flags=SAPPHIRE_FLAGS)
    plain = named(tmp_path, cpuinfo)
    assert named(tmp_path, cpuinfo, {"ONEDNN_MAX_CPU_ISA": "AVX2"}) == f"{plain}, held to avx2"
