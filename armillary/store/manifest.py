"""The files of a checkpoint with size and checksum, so that any later change is noticed.

Each rank hashes the checkpoint files that it wrote and, before a run resumes, its share of all of them; older
checkpoints have sizes only, or their checksums in a table of their own. Releases use the same entries
(`store/registry`).
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from armillary.errors import ArmillaryError, Unreadable
from armillary.spec.toml.fields import build
from armillary.store import nan_safe_json

NAME = "manifest.json"
RETRIES_S = (0.2, 1.0, 4.0)
"""waits before a failed read is tried again"""
_HASHED_BLOCK, _THREADS = 16 << 20, 8
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a release or a checkpoint."""

    bytes: int
    sha256: str = ""  # empty where the blocks were hashed
    block_sha256: str = ""  # of the hashes of its 16 MiB blocks, which threads compute in parallel: for checkpoints


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- checkpoints


def checkpoint_files(folder: Path, hashes: Mapping[str, str]) -> dict[str, FileEntry]:
    """The files of a complete checkpoint; files that `hashes` lacks are hashed now."""
    return {
        path.name: FileEntry(bytes=path.stat().st_size, block_sha256=hashes.get(path.name) or block_sha256(path))
        for path in sorted(folder.iterdir())
    }


def block_sha256(path: Path) -> str:
    starts = range(0, path.stat().st_size, _HASHED_BLOCK)
    with path.open("rb") as file, ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(lambda start: hashlib.sha256(os.pread(file.fileno(), _HASHED_BLOCK, start)).digest(), starts)
        return hashlib.sha256(b"".join(digests)).hexdigest()


def size_faults(folder: Path) -> list[str]:
    """How the sizes of a checkpoint's files differ from its manifest, a few words per file; Unreadable where the disk
    fails."""
    try:
        entries = _checkpoint_entries(folder)
    except Unreadable:
        raise
    except (ArmillaryError, KeyError) as error:
        return [f"no manifest ({error})"]
    sizes = {name: _size(folder / name) for name in entries}
    return [
        f"{name} is {sizes[name]} bytes, not {entry.bytes}"
        for name, entry in entries.items()
        if sizes[name] != entry.bytes
    ]


def content_faults(folder: Path, *, share: int = 0, of: int = 1) -> list[str]:
    """Files of a checkpoint whose content is not what was written; of several readers each reads its share. Unreadable
    where the disk fails."""
    hashed = sorted((name, entry.block_sha256) for name, entry in _checkpoint_entries(folder).items())
    return [
        f"the content of {name} has changed"
        for name, expected in [(name, digest) for name, digest in hashed if digest][share::of]
        if retry_read(folder / name, block_sha256) != expected
    ]


def _size(path: Path) -> int:
    """In bytes; 0 where it is no file."""
    try:
        status = retry_read(path, os.stat)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def retry_read(path: Path, read: Callable[[Path], T]) -> T:
    """`read(path)`, tried again where the disk fails, and then Unreadable: only what was read can be damaged."""
    for wait_s in (*RETRIES_S, None):
        try:
            return read(path)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except (OSError, Unreadable) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if wait_s is None or isinstance(cause, PermissionError):
                why = getattr(cause, "strerror", None) or error
                raise Unreadable(
                    f"{path} cannot be read ({why}); check the disk, or remove that checkpoint to use the one before"
                ) from error
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _checkpoint_entries(folder: Path) -> dict[str, FileEntry]:
    """Older manifests have `files` with sizes only, and the hashes, if any, in `sums`."""
    table = retry_read(folder / NAME, nan_safe_json.read_table)
    hashes = table.get("sums", {})
    return {
        name: build(FileEntry, entry, name)
        if isinstance(entry, Mapping)
        else FileEntry(bytes=entry, block_sha256=hashes.get(name, ""))
        for name, entry in table["files"].items()
    }
