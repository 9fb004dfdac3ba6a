"""Units for number formats, from made-up CPUs, and with torch held to less than the CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.machine.features import cpu_features, has_native, present_features, restricted_level
from tests.machine.trees import (
    LAPTOP_FLAGS,
    M1,
    N1_FEATURES,
    SAPPHIRE_FLAGS,
    SKYLAKE_FLAGS,
    V2_FEATURES,
    arm_cores,
    mac,
    write,
    x86_cores,
)

N1 = arm_cores((2, "0x41", "0xd0c", "0x3", "1"), features=N1_FEATURES)
GRACE = arm_cores((4, "0x41", "0xd4f", "0x0", "0"), features=V2_FEATURES)


def x86(flags: str) -> str:
    return x86_cores("Intel(R) Xeon(R) Processor", model=85, stepping=4, flags=flags)


@pytest.mark.parametrize(
    ("cpuinfo", "bf16", "fp16", "int8"),
    [
        (N1, False, True, True),
        (GRACE, True, True, True),
        (x86(LAPTOP_FLAGS), False, False, False),
        (x86(SKYLAKE_FLAGS), False, False, False),
        (x86(SAPPHIRE_FLAGS), True, True, True),
    ],
)
def test_units(tmp_path: Path, cpuinfo: str, bf16: bool, fp16: bool, int8: bool) -> None:
    root = write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert [has_native(name, root, {}) for name in ("bf16", "fp16", "int8")] == [bf16, fp16, int8]
    assert has_native("fp32", root, {}) is True
    assert has_native("fp8", root, {}) is False


def test_a_mac(tmp_path: Path) -> None:
    first, fourth = mac(tmp_path / "m1", facts=M1), mac(tmp_path / "m4", facts=M1 | {"hw.optional.arm.FEAT_BF16": 1})
    assert cpu_features(first, {}) == {"asimd", "asimdhp", "asimddp"}
    assert (has_native("bf16", first, {}), has_native("bf16", fourth, {})) == (False, True)


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert has_native("bf16", tmp_path, {}) is None
    assert cpu_features(tmp_path, {}) == frozenset()


def test_only_what_all_cores_have_counts(tmp_path: Path) -> None:
    little = arm_cores((1, "0x41", "0xd05", "0x1", "0"), features="fp asimd")
    big = arm_cores((1, "0x41", "0xd4d", "0x0", "0"), features="fp asimd bf16")
    root = write(tmp_path, {"proc/cpuinfo": f"{little}\n\n{big}"})
    assert cpu_features(root, {}) == {"asimd"}


@pytest.mark.parametrize(
    ("environment", "level", "left"),
    [
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2", {"sse4_1", "avx", "avx2", "fma"}),
        ({"DNNL_MAX_CPU_ISA": "avx2"}, "avx2", {"sse4_1", "avx", "avx2", "fma"}),
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "avx2", {"sse4_1", "avx", "avx2", "fma"}),
        ({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "sse41", {"sse4_1"}),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"}, "avx512_core_bf16", None),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, "", None),
        ({}, "", None),
    ],
)
def test_held_back(tmp_path: Path, environment: dict[str, str], level: str, left: set[str] | None) -> None:
    root = write(tmp_path, {"proc/cpuinfo": x86(SAPPHIRE_FLAGS)})
    assert restricted_level(root, environment) == level
    if left is not None:
        assert cpu_features(root, environment) == left
        assert has_native("bf16", root, environment) is False
    else:
        assert has_native("bf16", root, environment) is True
    assert "amx_bf16" in present_features(root)


def test_held_back_no_further_than_the_cpu_goes(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": x86(LAPTOP_FLAGS)})
    assert restricted_level(root, {"ONEDNN_MAX_CPU_ISA": "AVX2"}) == ""


def test_sve_held_back(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/cpuinfo": GRACE})
    assert "sve" not in cpu_features(root, {"ONEDNN_MAX_CPU_ISA": "ASIMD"})
    assert has_native("bf16", root, {"ONEDNN_MAX_CPU_ISA": "ASIMD"}) is True
