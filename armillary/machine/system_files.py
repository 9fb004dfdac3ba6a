"""Reading the system's own files: /proc and /sys, and on macOS what `sysctl` and `vm_stat` print.

Every reader of this package takes a `root`, the folder that stands for /, so that it can be tried on made-up trees.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path("/")
_TIMEOUT_S = 10


def text(path: Path) -> str:
    """A file of /proc or /sys; what is absent or refuses to be read (an interface that is down) is empty."""
    try:
        return path.read_text()
    except OSError:
        return ""


def pairs(lines: str) -> list[tuple[str, str]]:
    """'MemTotal:  8 kB' -> ('MemTotal', '8 kB'), of every line with a colon."""
    parts = (line.partition(":") for line in lines.splitlines() if ":" in line)
    return [(key.strip(), value.strip()) for key, _, value in parts]


def numbers(listed: str) -> frozenset[int]:
    """The kernel's lists of CPUs and nodes: '0-2,8' -> {0, 1, 2, 8}."""
    found: set[int] = set()
    for piece in listed.strip().split(","):
        first, _, last = piece.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last if last.isdigit() else first) + 1))
    return frozenset(found)


def has_proc(root: Path) -> bool:
    """Whether there is a /proc at all: Linux, as opposed to macOS."""
    return (root / "proc").is_dir()


def sysctl(name: str, root: Path = ROOT) -> str:
    """What `sysctl -n NAME` prints on macOS; empty on other systems and for names this Mac does not know."""
    return "" if has_proc(root) else command(root / "usr/sbin/sysctl", "-n", name)


def command(program: Path, *arguments: str) -> str:
    """What a program of the system prints; empty where it is absent, fails or hangs."""
    if not program.is_file():
        return ""
    try:
        done = subprocess.run(
            [str(program), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
