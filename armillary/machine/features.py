"""CPU features for bf16, fp16 and int8 that torch may use.

Names are the kernel's names in /proc/cpuinfo, on a Mac too. A CPU without native support of a dtype emulates it, up to
300 times slower than fp32 (0.25 GFLOP/s against 73 on a Neoverse-N1): features are an estimate, and a probe decides.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from armillary.machine.system_files import ROOT, cpuinfo_flags, has_proc, sysctl

UNITS: Mapping[str, frozenset[str]] = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
    "int8": frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "i8mm", "svei8mm", "asimddp"}),
}
"""dtype -> features, each of which computes in it"""
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
"""features that set the width of vectors and tiles"""
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
"""levels of oneDNN on x86, lowest first, with the features that each adds (ONEDNN_MAX_CPU_ISA in its docs)"""
_SAME_LEVEL = {
    "avx10_1_512": "avx512_core_fp16",
    "avx10_1_512_amx": "avx512_core_amx",
    "avx10_1_512_amx_fp16": "avx512_core_amx_fp16",
}
_ATEN_LEVELS = {"default": "sse41", "avx2": "avx2"}
"""levels of ATEN_CPU_CAPABILITY; from avx512 on, oneDNN decides about tiles"""
_MAC_FEATURES = {
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
    """Features for dtypes that torch may use: the environment variables of oneDNN and ATen may restrict them."""
    return present_features(root).difference(*map(_above, _levels(environment)))


def present_features(root: Path = ROOT) -> frozenset[str]:
    """Features of the CPU itself, regardless of the environment."""
    if has_proc(root):
        return cpuinfo_flags(root) & KNOWN
    return frozenset(feature for name, feature in _MAC_FEATURES.items() if sysctl(name, root) == "1")


def has_native(dtype: str, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> bool | None:
    """Whether the CPU supports a dtype natively ('bf16', 'fp16', 'int8'; fp32 always); None where it is unknown."""
    if dtype in ("fp32", "fp64"):
        return True
    if not present_features(root):
        return None
    return bool(UNITS.get(dtype, frozenset()) & cpu_features(root, environment))


def restricted_level(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """The level to which the environment restricts torch, where the CPU has more ('avx2'); else ''."""
    return next((level for level in _levels(environment) if present_features(root) & _above(level)), "")


def _levels(environment: Mapping[str, str]) -> list[str]:
    """The levels that the environment sets, lowest first."""
    onednn = (environment.get("ONEDNN_MAX_CPU_ISA") or environment.get("DNNL_MAX_CPU_ISA") or "").lower()
    aten = environment.get("ATEN_CPU_CAPABILITY", "").lower()
    order = [name for name, _ in _LADDER]
    levels = {_SAME_LEVEL.get(onednn, onednn), _ATEN_LEVELS.get(aten, "")}
    of_arm = ["asimd"] if onednn == "asimd" or aten == "default" else []
    return sorted(levels & set(order), key=order.index) + of_arm


def _above(level: str) -> frozenset[str]:
    if level == "asimd":
        return frozenset({"sve", "sve2", "svebf16", "svei8mm", "sme"})
    names = [name for name, _ in _LADDER]
    return frozenset().union(*(adds for _, adds in _LADDER[names.index(level) + 1 :]))
