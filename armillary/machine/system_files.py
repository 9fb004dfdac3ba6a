"""Readers of /proc and /sys, and of `sysctl` and `vm_stat` on macOS.

Readers of this package take a `root`, the folder that stands for /, so that they are tested on trees of other machines.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")
_TIMEOUT_S = 10


def text(path: Path) -> str:
    """The text of a file of /proc or /sys; empty where it is missing or unreadable (an interface that is down)."""
    try:
        return path.read_text()
    except OSError:
        return ""


def key_values(lines: str) -> list[tuple[str, str]]:
    """'MemTotal:  8 kB' -> ('MemTotal', '8 kB'), per line with a colon."""
    parts = (line.partition(":") for line in lines.splitlines() if ":" in line)
    return [(key.strip(), value.strip()) for key, _, value in parts]


def numbers(listed: str) -> frozenset[int]:
    """The kernel's lists of CPUs and nodes: '0-2,8' -> {0, 1, 2, 8}."""
    members: set[int] = set()
    for piece in listed.strip().split(","):
        first, _, last = piece.partition("-")
        if first.isdigit():
            members |= set(range(int(first), int(last if last.isdigit() else first) + 1))
    return frozenset(members)


def has_proc(root: Path) -> bool:
    """Whether there is a /proc: Linux rather than macOS."""
    return (root / "proc").is_dir()


def sysctl(name: str, root: Path = ROOT) -> str:
    """The output of `sysctl -n NAME` on macOS; empty on other systems and for unknown names."""
    return "" if has_proc(root) else command(root / "usr/sbin/sysctl", "-n", name)


def command(program: Path, *arguments: str) -> str:
    """The output of a system program; empty where it is missing, fails or hangs."""
    if not program.is_file():
        return ""
    try:
        done = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cpuinfo_blocks(root: Path = ROOT) -> list[Mapping[str, str]]:
    """The fields of every logical core; empty where there is no such file."""
    tables = [dict(key_values(block)) for block in text(root / "proc/cpuinfo").strip().split("\n\n")]
    return [block for block in tables if "processor" in block or "flags" in block or "Features" in block]


def cpuinfo_flags(root: Path = ROOT) -> frozenset[str]:
    """Features that all cores have, by the kernel's names ('flags' on x86, 'Features' on ARM)."""
    each = [frozenset((block.get("flags") or block.get("Features") or "").split()) for block in cpuinfo_blocks(root)]
    return frozenset.intersection(*each) if each else frozenset()
