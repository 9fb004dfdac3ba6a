"""The name of a device in the files of its measurements and kernel choices, the same for every writer and reader.

A GPU has its driver's name, a CPU its model and number of compute threads: two threads of a CPU are another device than
sixty-four. The model of an x86 is the brand string; where that names no model, as on many virtual machines, also
family, model, stepping and bf16 units, because a Skylake and a Sapphire Rapids may both be an "Intel(R) Xeon(R)
Processor". ARM has the names of its cores, Apple the brand string. A CPU whose features an environment variable
restricts counts as another CPU.
"""

import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from armillary.machine.cores import compute_threads
from armillary.machine.features import UNITS, present_features, restricted_level
from armillary.machine.system_files import ROOT, cpuinfo_blocks, has_proc, sysctl

# Names of ARM cores by implementer and part of the main ID register (MIDR_EL1), from the kernel's
# arch/arm64/include/asm/cputype.h and util-linux's lscpu. Server chips are named by their cores: Graviton 2 and Ampere
# Altra are Neoverse-N1, Graviton 3 is V1, Graviton 4 and NVIDIA Grace are V2.
VENDORS: Mapping[int, str] = {
    0x41: "Arm",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x50: "APM",
    0x51: "Qualcomm",
    0x53: "Samsung",
    0x56: "Marvell",
    0x61: "Apple",
    0x6D: "Microsoft",
    0x70: "Phytium",
    0xC0: "Ampere",
}

_ARM = {
    0xD03: "Cortex-A53",
    0xD04: "Cortex-A35",
    0xD05: "Cortex-A55",
    0xD07: "Cortex-A57",
    0xD08: "Cortex-A72",
    0xD09: "Cortex-A73",
    0xD0A: "Cortex-A75",
    0xD0B: "Cortex-A76",
    0xD0C: "Neoverse-N1",
    0xD0D: "Cortex-A77",
    0xD0E: "Cortex-A76AE",
    0xD40: "Neoverse-V1",
    0xD41: "Cortex-A78",
    0xD42: "Cortex-A78AE",
    0xD44: "Cortex-X1",
    0xD46: "Cortex-A510",
    0xD47: "Cortex-A710",
    0xD48: "Cortex-X2",
    0xD49: "Neoverse-N2",
    0xD4A: "Neoverse-E1",
    0xD4B: "Cortex-A78C",
    0xD4C: "Cortex-X1C",
    0xD4D: "Cortex-A715",
    0xD4E: "Cortex-X3",
    0xD4F: "Neoverse-V2",
    0xD80: "Cortex-A520",
    0xD81: "Cortex-A720",
    0xD82: "Cortex-X4",
    0xD83: "Neoverse-V3AE",
    0xD84: "Neoverse-V3",
    0xD85: "Cortex-X925",
    0xD87: "Cortex-A725",
    0xD8E: "Neoverse-N3",
}
_OTHERS = {
    (0x43, 0x0AF): "ThunderX2",
    (0x46, 0x001): "A64FX",
    (0x46, 0x003): "MONAKA",
    (0x48, 0xD01): "Kunpeng-920",
    (0x4E, 0x004): "Carmel",
    (0x4E, 0x010): "Olympus",
    (0x51, 0x001): "Oryon",
    (0x51, 0x804): "Kryo-4XX-Gold",
    (0x51, 0x805): "Kryo-4XX-Silver",
    (0x6D, 0xD49): "Cobalt-100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1A",
    (0xC0, 0xAC5): "Ampere-1B",
}
_APPLE = {
    0x22: "M1",
    0x24: "M1 Pro",
    0x28: "M1 Max",
    0x32: "M2",
    0x34: "M2 Pro",
    0x38: "M2 Max",
    0x42: "M3",
    0x44: "M3 Pro",
    0x48: "M3 Max",
    0x52: "M4",
    0x54: "M4 Pro",
    0x58: "M4 Max",
}
"""parts of the efficiency cores; the performance cores are one higher"""


def part_name(implementer: int, part: int) -> str:
    """'Neoverse-N1', 'Apple M1 P-core'; vendor and number where the table has no name."""
    if implementer == 0x61 and (chip := _APPLE.get(part & ~1)):
        return f"Apple {chip} {'P' if part & 1 else 'E'}-core"
    known = _ARM.get(part) if implementer == 0x41 else _OTHERS.get((implementer, part))
    return known or f"{VENDORS.get(implementer, f'implementer {implementer:#04x}')} part {part:#05x}"


def device_name(device: Any = "cpu", *, threads: int | None = None) -> str:
    """The name of a torch device, or of 'cpu', 'cuda', 'cuda:1'; torch is imported for a GPU only.

    `threads` is the number of compute threads of a CPU; by default one per core that this process may use.
    """
    text = str(device)
    if text.startswith("cpu"):
        count = threads or compute_threads()
        return f"{cpu_name()}, {count} thread{'s' if count > 1 else ''}"
    import torch

    return str(torch.cuda.get_device_name(torch.device(text)))


def cpu_name(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> str:
    """'Neoverse-N1 r3p1', 'Apple M1', 'AMD EPYC 7763 64-Core Processor'."""
    level = restricted_level(root, environment)
    return _own_name(root) + (f", held to {level}" if level else "")


def cpu_vendor(root: Path = ROOT) -> str:
    """The manufacturer; '' where the system does not report it."""
    if not has_proc(root):
        return "Apple" if sysctl("machdep.cpu.brand_string", root).startswith("Apple") else ""
    first = next(iter(cpuinfo_blocks(root)), {})
    return first.get("vendor_id") or VENDORS.get(_number(first.get("CPU implementer", "")), "")


def _own_name(root: Path) -> str:
    cores = cpuinfo_blocks(root)
    if any("CPU part" in core for core in cores):
        return _arm_name(cores)
    if cores and (brand := " ".join(cores[0].get("model name", "").split())):
        names_model = re.search(r"\d{3}", brand.partition("@")[0])  # besides the clock: '8480+', '7950X', '155H'
        return brand if names_model else f"{brand} ({_generation(cores[0], root)})"
    return sysctl("machdep.cpu.brand_string", root) or platform.processor() or platform.machine()


def _arm_name(cores: list[Mapping[str, str]]) -> str:
    """The name of the cores; of several kinds, as in big.LITTLE, each with its count."""
    kinds = Counter(_part(core) for core in cores if "CPU part" in core)
    return " + ".join(f"{count} {name}" if len(kinds) > 1 else name for name, count in sorted(kinds.items()))


def _part(core: Mapping[str, str]) -> str:
    name = part_name(_number(core.get("CPU implementer", "")), _number(core["CPU part"]))
    variant, revision = (_number(core.get(f"CPU {field}", "0")) for field in ("variant", "revision"))
    return f"{name} r{variant}p{revision}"


def _generation(core: Mapping[str, str], root: Path) -> str:
    """'family 6 model 85 stepping 4, no bf16': distinguishes generations with one brand string."""
    fields = [("family", "cpu family"), ("model", "model"), ("stepping", "stepping")]
    known = " ".join(f"{name} {core[key]}" for name, key in fields if key in core)
    units = " ".join(sorted(present_features(root) & UNITS["bf16"]))
    return f"{known}, {units or 'no bf16'}".lstrip(", ")


def _number(text: str) -> int:
    """'0xd0c' or '1'; 0 where it is neither."""
    return int(text, 0) if re.fullmatch(r"0x[0-9a-f]+|\d+", text, re.IGNORECASE) else 0
