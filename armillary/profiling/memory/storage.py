"""The storage tiers of this machine in one table: caches and memory, then every place where files can be written.

A place is a folder: the one asked for, and the mounts that hold files of their own (disks, tmpfs, network file
systems). Reads and writes are those of `ceilings.disk`, past the page cache where the file system allows it.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.profiling.ceilings import disk
from armillary.profiling.ceilings.settings import Settings

OPS = (("write", 1), ("read", 1), ("random_read", 1))
_VIRTUAL = frozenset(
    ["proc", "sysfs", "cgroup", "cgroup2", "devpts", "devtmpfs", "mqueue", "debugfs", "tracefs", "securityfs", "pstore"]
)
"""file systems that hold no files of users"""


def places(folders: Sequence[Path], mounts: str) -> dict[Path, str]:
    """Folder -> file system: those asked for, then other writable mounts, each device once. `mounts` is the text of
    /proc/mounts."""
    known = {Path(_unescaped(line.split()[1])): line.split()[2] for line in mounts.splitlines() if line}
    results: dict[Path, str] = {}
    devices: set[int] = set()
    for folder in [*(each.resolve() for each in folders), *sorted(known)]:
        kind = next((known[path] for path in (folder, *folder.parents) if path in known), "")
        if kind in _VIRTUAL or folder.is_relative_to("/sys") or not folder.is_dir() or not os.access(folder, os.W_OK):
            continue
        device = folder.stat().st_dev
        if device not in devices:
            devices.add(device)
            results[folder] = kind
    return results


def _unescaped(path: str) -> str:
    """/proc/mounts writes a space as \\040."""
    return path.replace("\\040", " ")


def measure(settings: Settings, folders: dict[Path, str], watch: Callable[[int, int, str], None]) -> Iterator[Any]:
    """(point of kind disk, with the file system) for each place with enough space, fewer bytes than `ceilings`."""
    for done, (folder, kind) in enumerate(folders.items()):
        watch(done, len(folders), str(folder))
        here = replace(settings, folder=folder, quick=True, budget_s=min(settings.budget_s, 0.1))
        chosen = [case for case in _cases(here) if (case["op"], case["threads"]) in OPS]
        if not chosen:
            continue
        try:
            for _, point in disk.measure([case | {"path": str(folder)} for case in chosen], here):
                yield {**point, "file_system": kind}
        except OSError:  # a mount that takes no files after all
            continue


def _cases(settings: Settings) -> list[dict[str, Any]]:
    """None where a file cannot be made, or too little space is free."""
    try:
        with tempfile.TemporaryFile(dir=settings.folder):
            pass
        shutil.disk_usage(settings.folder)
    except OSError:
        return []
    return disk.cases(settings)
