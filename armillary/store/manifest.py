"""Manifest: the files of a release or a checkpoint with size and checksum, so that any later change is noticed.

The files of a release are hashed while they are copied. Each rank hashes the checkpoint files that it wrote and, before
a run resumes, its share of all of them; older checkpoints have sizes only, or their checksums in a table of their own.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.spec.toml.fields import build
from armillary.store import nan_safe_json
from armillary.store.progress import Progress, silent

NAME = "manifest.json"
_BLOCK = 1 << 20
_HASHED_BLOCK, _THREADS = 16 << 20, 8
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
    """One file of a release or a checkpoint."""

    bytes: int
    sha256: str = ""  # empty where the blocks were hashed
    block_sha256: str = ""  # of the hashes of its 16 MiB blocks, which threads compute in parallel: for checkpoints


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a release consists of and where it comes from."""

    created: float  # unix seconds
    run: str = ""  # id of the run it was exported from
    note: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)  # fields of config.json that describe the model
    files: Mapping[str, FileEntry]  # path inside the release -> entry


def summary(folder: Path) -> dict[str, Any]:
    """The fields of the folder's config.json that describe a model's shape."""
    path = folder / "config.json"
    config = nan_safe_json.read_table(path) if path.is_file() else {}
    return {key: config[key] for key in _SUMMARY if key in config}


def check_source(folder: Path) -> None:
    """An error where the folder to publish is missing or empty."""
    if not folder.is_dir():
        raise NotFound(f"no folder {folder}; give the Hugging Face folder to publish")
    if next(files_in(folder), None) is None:
        raise BadInput(f"{folder} holds no files; give the Hugging Face folder to publish")


def files_in(folder: Path) -> Iterator[Path]:
    """Every file below, hidden ones and a manifest at the top left out; links are followed."""
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and not path.is_dir() and path != folder / NAME:
            yield path


def copy_files(source: Path, target: Path, progress: Progress = silent) -> dict[str, FileEntry]:
    """Copy a folder's files read-only, and hash them meanwhile."""
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
    """Copy block by block, and yield each block."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as from_file, target.open("xb") as to_file:
        while block := from_file.read(_BLOCK):
            to_file.write(block)
            yield block
    target.chmod(0o444)


def changes(folder: Path, files: Mapping[str, FileEntry], progress: Progress = silent) -> list[str]:
    """How the folder differs from its manifest, a few words per file; empty where it does not."""
    present = {path.relative_to(folder).as_posix() for path in files_in(folder)}
    differences = [f"{name} was added" for name in sorted(present - set(files))]
    done, total = 0, sum(entry.bytes for entry in files.values())
    for name, entry in files.items():
        if name not in present:
            differences.append(f"{name} is missing")
        elif (folder / name).stat().st_size != entry.bytes or sha256(folder / name) != entry.sha256:
            differences.append(f"{name} was changed")
        done += entry.bytes
        progress(done, total)
    return differences


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
