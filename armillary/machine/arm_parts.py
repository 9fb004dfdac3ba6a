"""Names of ARM cores by implementer and part, the numbers of their main ID register (MIDR_EL1).

From the kernel's arch/arm64/include/asm/cputype.h and the table of util-linux's lscpu. Server chips are named by their
cores: Graviton 2 and Ampere Altra are Neoverse-N1, Graviton 3 is V1, Graviton 4 and NVIDIA Grace V2.
"""

from __future__ import annotations

from collections.abc import Mapping

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
