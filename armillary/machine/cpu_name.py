"""The name of the CPU, the key of its measurements and kernel choices.

x86: the brand string; where that names no model, as on many virtual machines, also family, model, stepping and bf16
units, because a Skylake and a Sapphire Rapids may both be an "Intel(R) Xeon(R) Processor". ARM: the names of its cores.
Apple: the brand string. A CPU whose features an environment variable restricts counts as another CPU.
"""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from armillary.machine import cpuinfo
from armillary.machine.arm_parts import VENDORS, part_name
from armillary.machine.features import UNITS, held_back, present_features
from armillary.machine.system_files import ROOT, has_proc, sysctl


def cpu_name(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """'Neoverse-N1 r3p1', 'Apple M1', 'AMD EPYC 7763 64-Core Processor'."""
    level = held_back(root, environment)
    return _own_name(root) + (f", held to {level}" if level else "")


def cpu_vendor(root: Path = ROOT) -> str:
    """The manufacturer; '' where the system does not report it."""
    if not has_proc(root):
        return "Apple" if sysctl("machdep.cpu.brand_string", root).startswith("Apple") else ""
    first = next(iter(cpuinfo.blocks(root)), {})
    return first.get("vendor_id") or VENDORS.get(_number(first.get("CPU implementer", "")), "")


def _own_name(root: Path) -> str:
    cores = cpuinfo.blocks(root)
    if any("CPU part" in core for core in cores):
        return _arm_name(cores)
    if cores and (brand := " ".join(cores[0].get("model name", "").split())):
        return brand if _names_model(brand) else f"{brand} ({_generation(cores[0], root)})"
    return sysctl("machdep.cpu.brand_string", root) or platform.processor() or platform.machine()


def _arm_name(cores: list[Mapping[str, str]]) -> str:
    """The name of the cores; of several kinds, as in big.LITTLE, each with its count."""
    kinds = Counter(_part(core) for core in cores if "CPU part" in core)
    if len(kinds) == 1:
        return next(iter(kinds))
    return " + ".join(f"{count} {name}" for name, count in sorted(kinds.items()))


def _part(core: Mapping[str, str]) -> str:
    name = part_name(_number(core.get("CPU implementer", "")), _number(core["CPU part"]))
    variant, revision = (_number(core.get(f"CPU {field}", "0")) for field in ("variant", "revision"))
    return f"{name} r{variant}p{revision}"


def _names_model(brand: str) -> bool:
    """Whether a brand string names a model: three digits besides the clock ('8480+', '7950X', '155H')."""
    return re.search(r"\d{3}", brand.partition("@")[0]) is not None


def _generation(core: Mapping[str, str], root: Path) -> str:
    """'family 6 model 85 stepping 4, no bf16': distinguishes generations with one brand string."""
    fields = [("family", "cpu family"), ("model", "model"), ("stepping", "stepping")]
    known = " ".join(f"{name} {core[key]}" for name, key in fields if key in core)
    units = " ".join(sorted(present_features(root) & UNITS["bf16"]))
    return f"{known}, {units or 'no bf16'}".lstrip(", ")


def _number(text: str) -> int:
    """'0xd0c' or '1'; 0 where it is neither."""
    return int(text, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", text, re.IGNORECASE) else 0
