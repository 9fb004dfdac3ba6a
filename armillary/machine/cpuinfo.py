"""/proc/cpuinfo: one block of fields per logical core, whose names depend on the architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from armillary.machine.system_files import ROOT, pairs, text


def blocks(root: Path = ROOT) -> list[Mapping[str, str]]:
    """The fields of every logical core; empty where there is no such file."""
    tables = [dict(pairs(block)) for block in text(root / "proc/cpuinfo").strip().split("\n\n")]
    return [block for block in tables if "processor" in block or "flags" in block or "Features" in block]


def flags(root: Path = ROOT) -> frozenset[str]:
    """Features that all cores have, by the kernel's names ('flags' on x86, 'Features' on ARM)."""
    each = [frozenset((block.get("flags") or block.get("Features") or "").split()) for block in blocks(root)]
    return frozenset.intersection(*each) if each else frozenset()
