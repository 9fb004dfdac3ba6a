"""/proc/cpuinfo: one block of fields for each logical core, with the names each architecture uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from armillary.machine.system_files import ROOT, pairs, text


def blocks(root: Path = ROOT) -> list[Mapping[str, str]]:
    """The fields of every logical core; empty where there is no such file."""
    found = [dict(pairs(block)) for block in text(root / "proc/cpuinfo").strip().split("\n\n")]
    return [block for block in found if "processor" in block or "flags" in block or "Features" in block]


def flags(root: Path = ROOT) -> frozenset[str]:
    """What every core has, as the kernel names it ('flags' on x86, 'Features' on ARM)."""
    each = [frozenset((block.get("flags") or block.get("Features") or "").split()) for block in blocks(root)]
    return frozenset.intersection(*each) if each else frozenset()
