"""The files of a checkpoint with size and checksum, so that any later change is noticed.

Each rank hashes the checkpoint files that it wrote and, before a run resumes, its share of all of them; older
checkpoints have sizes only, or their checksums in a table of their own. Releases use the same entries
(`store/registry`).
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from armillary.errors import ArmillaryError
from armillary.spec.toml.fields import build
from armillary.store import nan_safe_json

NAME = "manifest.json"
_HASHED_BLOCK, _THREADS = 16 << 20, 8


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
    """How the sizes of a checkpoint's files differ from its manifest, a few words per file."""
    try:
        entries = _checkpoint_entries(folder)
    except (ArmillaryError, KeyError) as error:
        return [f"no manifest ({error})"]
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else 0 for name in entries}
    return [
        f"{name} is {sizes[name]} bytes, not {entry.bytes}"
        for name, entry in entries.items()
        if sizes[name] != entry.bytes
    ]


def content_faults(folder: Path, *, share: int = 0, of: int = 1) -> list[str]:
    """Files of a checkpoint whose content is not what was written; of several readers each reads its share."""
    hashed = sorted((name, entry.block_sha256) for name, entry in _checkpoint_entries(folder).items())
    return [
        f"the content of {name} has changed"
        for name, expected in [(name, digest) for name, digest in hashed if digest][share::of]
        if _readable_hash(folder / name) != expected
    ]


def _readable_hash(path: Path) -> str | None:
    """None where the disk fails to read it."""
    try:
        return block_sha256(path)
    except OSError:
        return None


def _checkpoint_entries(folder: Path) -> dict[str, FileEntry]:
    """Older manifests have `files` with sizes only, and the hashes, if any, in `sums`."""
    table = nan_safe_json.read_table(folder / NAME)
    hashes = table.get("sums", {})
    return {
        name: build(FileEntry, entry, name)
        if isinstance(entry, Mapping)
        else FileEntry(bytes=entry, block_sha256=hashes.get(name, ""))
        for name, entry in table["files"].items()
    }
