"""What the CPU has for number formats: units for bf16, fp16 and int8, as torch may use them.

Names are the kernel's of /proc/cpuinfo, on a Mac too. A CPU without units for a format still computes in it, up to
300 times slower than in fp32 (73 GFLOP/s against 0.25 on a Neoverse-N1): the flags say what to expect, and a probe
decides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from armillary.machine import cpuinfo
from armillary.machine.system_files import ROOT, has_proc, sysctl

UNITS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "svei8mm", "asimddp"}),
}
"""format -> the features each of which computes in it"""
VECTORS = frozenset(
    {
        "sse4_1",
        "avx",
        "avx2",
        "fma",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512dq",
        "amx_tile",
        "asimd",
        "sve",
        "sve2",
        "sme",
    }
)
"""features that say how wide the vectors and tiles are"""
KNOWN = VECTORS.union(*UNITS.values())

_LADDER: tuple[tuple[str, frozenset[str]], ...] = (
    ("sse41", frozenset({"sse4_1"})),
    ("avx", frozenset({"avx"})),
    ("avx2", frozenset({"avx2", "fma"})),
    ("avx2_vnni", frozenset({"avx_vnni"})),
    ("avx2_vnni_2", frozenset()),
    ("avx512_core", frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})),
    ("avx512_core_vnni", frozenset({"avx512_vnni"})),
    ("avx512_core_bf16", frozenset({"avx512_bf16"})),
    ("avx512_core_fp16", frozenset({"avx512_fp16"})),
    ("avx512_core_amx", frozenset({"amx_tile", "amx_bf16", "amx_int8"})),
    ("avx512_core_amx_fp16", frozenset({"amx_fp16"})),
)
"""levels of oneDNN on x86, lowest first, with what each adds (ONEDNN_MAX_CPU_ISA of its documentation)"""
_SAME_LEVEL = {
    "avx10_1_512": "avx512_core_fp16",
    "avx10_1_512_amx": "avx512_core_amx",
    "avx10_1_512_amx_fp16": "avx512_core_amx_fp16",
}
_OF_ATEN = {"default": "sse41", "avx2": "avx2"}
"""levels of ATEN_CPU_CAPABILITY; its avx512 and above leave the tiles to oneDNN"""
_OF_A_MAC = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.sse4_1": "sse4_1",
    "hw.optional.avx1_0": "avx",
    "hw.optional.avx2_0": "avx2",
    "hw.optional.fma": "fma",
    "hw.optional.avx512f": "avx512f",
    "hw.optional.avx512vnni": "avx512_vnni",
}


def cpu_features(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Features of this CPU that matter to number formats and that torch may use.

    oneDNN and ATen read how far they may go from the environment; what lies above that is left out.
    """
    found = present_features(root)
    for level in _levels(environment):
        found -= _above(level)
    return found


def present_features(root: Path = ROOT) -> frozenset[str]:
    """The same, of the CPU itself, whatever the environment says."""
    if has_proc(root):
        return cpuinfo.flags(root) & KNOWN
    return frozenset(feature for name, feature in _OF_A_MAC.items() if sysctl(name, root) == "1")


def has_native(dtype: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> bool | None:
    """Whether the CPU has units for a format ('bf16', 'fp16', 'int8'; fp32 always); None where nobody says."""
    if dtype in ("fp32", "fp64"):
        return True
    if not present_features(root):
        return None
    return bool(UNITS.get(dtype, frozenset()) & cpu_features(root, environment))


def held_back(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """The level the environment holds torch to, where the CPU could do more ('avx2'); else ''."""
    for level in _levels(environment):
        if present_features(root) & _above(level):
            return level
    return ""


def _levels(environment: Mapping[str, str]) -> list[str]:
    """The levels asked for, the lowest first."""
    onednn = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").lower()
    aten = environment.get("ATEN_CPU_CAPABILITY", "").lower()
    order = [name for name, _ in _LADDER]
    asked = {_SAME_LEVEL.get(onednn, onednn), _OF_ATEN.get(aten, "")}
    of_arm = ["asimd"] if onednn == "asimd" or aten == "default" else []
    return sorted(asked & set(order), key=order.index) + of_arm


def _above(level: str) -> frozenset[str]:
    """Features that a level leaves unused."""
    if level == "asimd":
        return frozenset({"sve", "sve2", "svebf16", "svei8mm", "sme"})
    names = [name for name, _ in _LADDER]
    return frozenset().union(*(adds for _, adds in _LADDER[names.index(level) + 1 :]))
