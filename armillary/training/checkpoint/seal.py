"""The seal of a checkpoint: a manifest with size and checksum of every file, so that any later change is noticed.

Each rank sums the files it wrote and, before a run goes on, a share of all; a manifest without sums is an older one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError
from armillary.store import strict_json
from armillary.store.manifest import NAME as MANIFEST

_BLOCK = 16 << 20
_THREADS = 8


def manifest(folder: Path, step: int, sums: Mapping[str, str]) -> dict[str, Any]:
    """What a whole folder holds; files that `sums` lacks are summed now."""
    paths = sorted(folder.iterdir())
    sizes = {path.name: path.stat().st_size for path in paths}
    return {"step": step, "files": sizes, "sums": {name: sums.get(name) or file_sum(folder / name) for name in sizes}}


def file_sum(path: Path) -> str:
    """SHA-256 of the SHA-256 sums of a file's blocks, which threads take side by side."""
    starts = range(0, path.stat().st_size, _BLOCK)
    with path.open("rb") as file, ThreadPoolExecutor(_THREADS) as pool:
        return sha256(b"".join(pool.map(partial(_block_sum, file.fileno()), starts))).hexdigest()


def _block_sum(descriptor: int, start: int) -> bytes:
    return sha256(os.pread(descriptor, _BLOCK, start)).digest()


def faults(folder: Path) -> list[str]:
    """What a checkpoint lacks against its manifest by the sizes of its files, a few words a file."""
    try:
        files = strict_json.read_table(folder / MANIFEST)["files"]
    except (ArmillaryError, KeyError) as error:
        return [f"no manifest ({error})"]
    return [
        f"{name} is {_found(folder / name)} bytes, not {size}"
        for name, size in files.items()
        if _found(folder / name) != size
    ]


def changes(folder: Path, *, share: int = 0, of: int = 1) -> list[str]:
    """Files whose content is not what was written; of several readers each looks at its share."""
    sums = strict_json.read_table(folder / MANIFEST).get("sums", {})
    mine = sorted(sums.items())[share::of]
    return [f"the content of {name} has changed" for name, expected in mine if _sum_now(folder / name) != expected]


def _sum_now(path: Path) -> str | None:
    """None where the disk does not give it back."""
    try:
        return file_sum(path)
    except OSError:
        return None


def _found(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
