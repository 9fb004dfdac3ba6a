"""Manifest: what a release consists of, with a checksum of every file, so that any later change is noticed.

Files are hashed while they are copied; reading them once is enough.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armillary.errors import BadInput, NotFound
from armillary.store.progress import Progress, silent

NAME = "manifest.json"
_BLOCK = 1 << 20
_SUMMARY = (
    "architectures",
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "dtype",
    "torch_dtype",
)


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a release."""

    bytes: int
    """its size"""
    sha256: str
    """of its content"""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a release consists of and where it comes from."""

    created: float
    """unix seconds"""
    run: str = ""
    """id of the run it was exported from"""
    note: str = ""
    """what its publisher said"""
    config: Mapping[str, Any] = field(default_factory=dict)
    """the telling fields of config.json"""
    files: Mapping[str, FileEntry]
    """path inside the release -> size and checksum"""


def summary(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that tell a model's shape."""
    return {key: config[key] for key in _SUMMARY if key in config}


def check_source(folder: Path) -> None:
    """Refuse to publish what is not there."""
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}; give the Hugging Face folder to publish")
    if next(files_in(folder), None) is None:
        raise BadInput(f"{folder} holds no files; give the Hugging Face folder to publish")


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below, hidden ones and a manifest at the top left out; links are followed."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path != folder / NAME:
                yield path


def copy_files(source: Path, target: Path, progress: Progress = silent) -> dict[str, FileEntry]:
    """Copy a folder's files, read-only, hashing on the way."""
    paths = list(files_in(source))
    done, total, entries = 0, sum(path.stat().st_size for path in paths), {}
    for path in paths:
        name, before = path.relative_to(source).as_posix(), done
        hasher = hashlib.sha256()
        for block in _copy(path, target / name):
            hasher.update(block)
            done += len(block)
            progress(done, total)
        entries[name] = FileEntry(bytes=done - before, sha256=hasher.hexdigest())
    return entries


def _copy(source: Path, target: Path) -> Iterator[bytes]:
    """Copy block by block, giving each block in passing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as from_file, target.open("xb") as to_file:
        while block := from_file.read(_BLOCK):
            to_file.write(block)
            yield block
    target.chmod(0o444)


def changes(folder: Path, files: Mapping[str, FileEntry], progress: Progress = silent) -> list[str]:
    """How the folder differs from its manifest, a few words a file; empty when it does not."""
    present = {path.relative_to(folder).as_posix() for path in files_in(folder)}
    found = [f"{name} was added" for name in sorted(present - set(files))]
    done, total = 0, sum(entry.bytes for entry in files.values())
    for name, entry in files.items():
        if name not in present:
            found.append(f"{name} is missing")
        elif (folder / name).stat().st_size != entry.bytes or sha256(folder / name) != entry.sha256:
            found.append(f"{name} was changed")
        done += entry.bytes
        progress(done, total)
    return found


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
