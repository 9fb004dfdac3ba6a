"""The files of a split's shards as memory maps: on disk, or in an object store and fetched on access.

Sizes are checked when they are opened, offsets when they are first read, checksums when first opened or when fetched.
"""

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData
from armillary.store.atomic import Taken, staged_folder
from armillary.store.lock import locked
from armillary.store.remote import Remote
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.shard_index import Index, Shard, Split

OFFSET = np.dtype("<u8")
ANSWER = np.dtype("u1")
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class _File:
    """What the index says of a file."""

    name: str
    dtype: Any
    count: int
    sha256: str

    @property
    def size(self) -> int:
        return int(self.count * self.dtype.itemsize)


def _files(shard: Shard, dtype: Any) -> list[_File]:
    files = [
        _File(name=shard.file, dtype=dtype, count=shard.tokens, sha256=shard.sha256),
        _File(name=shard.offsets_file, dtype=OFFSET, count=shard.documents + 1, sha256=shard.offsets_sha256),
    ]
    if shard.answers_sha256:
        files.append(_File(name=shard.answers_file, dtype=ANSWER, count=shard.tokens, sha256=shard.answers_sha256))
    return files


class ShardFiles:
    """Ids, document offsets and, where there are any, answer masks of each shard."""

    def __init__(self, place: Path | Remote, index: Index, split: Split, *, cache: Cache | None, verify: bool) -> None:
        assert isinstance(place, Path) or cache is not None, "a store needs a cache"
        self._place, self._cache, self._verify = place, cache, verify
        dtype = np.dtype(index.dtype).newbyteorder("<")
        self._shards = [_files(shard, dtype) for shard in index.splits[split]]
        self._maps: dict[str, tuple[Path, np.ndarray]] = {}

    def check_sizes(self) -> None:
        """Name the first file that is missing or has another size than it should, as far as a store reports it."""
        files = [file for files in self._shards for file in files]
        if isinstance(self._place, Path):
            for file in files:
                _check_size(self._place / file.name, file.size)
            return
        sizes = self._place.sizes([file.name for file in files])
        for file in files:
            if sizes[file.name] not in (None, file.size):
                both = f"{sizes[file.name]} bytes instead of {file.size}"
                raise BadData(f"{self._address(file.name)} has {both}; upload it again")

    def ids(self, number: int) -> np.ndarray:
        return self._mapped(self._shards[number][0])

    def offsets(self, number: int) -> np.ndarray:
        """Where each document starts, and where the last one ends."""
        ids, file, *_ = self._shards[number]
        seen = file.name in self._maps
        offsets = self._mapped(file)
        if not seen and (int(offsets[0]) or int(offsets[-1]) != ids.count or (offsets[1:] < offsets[:-1]).any()):
            raise BadData(f"{self._address(file.name)} is corrupt (offsets out of order); prepare the data again")
        return offsets

    def answers(self, number: int) -> np.ndarray:
        return self._mapped(self._shards[number][2])

    def name(self, number: int) -> str:
        """Path or URL of a shard's ids, for messages."""
        return self._address(self._shards[number][0].name)

    def num_bytes(self, number: int) -> int:
        """Size of a shard's files."""
        return sum(file.size for file in self._shards[number])

    def fetch(self, number: int) -> None:
        """Have a shard on this machine, to be read soon."""
        for file in self._shards[number]:
            self._path(file)

    def verify(self, number: int) -> None:
        """Compare the files of a shard with the checksums of the index."""
        for file in self._shards[number]:
            check_sum(self._path(file), file.sha256)

    def _mapped(self, file: _File) -> np.ndarray:
        known = self._maps.get(file.name)
        if known is not None and self._still_sound(known[0], file.size):
            return known[1]
        # files that the cache has deleted are unmapped here too, or the disk would not get its space back
        self._maps = {name: (path, ids) for name, (path, ids) in self._maps.items() if path.exists()}
        self._maps[file.name] = self._open(file)
        return self._maps[file.name][1]

    def _still_sound(self, path: Path, size: int) -> bool:
        """Reading a map of a file that was truncated kills the process, so its size is checked again. A
        file of ours that was removed can still be read; one of the cache that was given up is fetched again."""
        try:
            return os.stat(path).st_size == size
        except FileNotFoundError:
            return isinstance(self._place, Path)

    def _open(self, file: _File) -> tuple[Path, np.ndarray]:
        for left in reversed(range(_TRIES)):
            path = self._path(file)
            try:
                _check_size(path, file.size)
                self._compare(path, file.sha256)
                mapped = np.memmap(path, dtype=file.dtype, mode="r", shape=(file.count,))
                return path, mapped.view(np.ndarray)  # slices of a memmap proper take twice as long to make
            except (FileNotFoundError, _Missing):
                if not left or isinstance(self._place, Path):
                    raise
                # another process made room in the cache just then
        raise AssertionError("the loop returns or raises")

    def _compare(self, path: Path, sha256: str) -> None:
        """With its checksum, if requested: files from a store were compared as they were fetched."""
        if not self._verify or not isinstance(self._place, Path):
            return
        if self._cache is None:
            check_sum(path, sha256)
        else:
            _check_sum_once(path, sha256, self._cache.folder / "verified")

    def _path(self, file: _File) -> Path:
        if isinstance(self._place, Path):
            return self._place / file.name
        assert self._cache is not None
        return self._cache.get(self._place, file.name, size=file.size, sha256=file.sha256)

    def _address(self, name: str) -> str:
        return str(self._place / name) if isinstance(self._place, Path) else self._place.address(name)


class _Missing(BadData):
    """A file that is not there."""


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise _Missing(f"{path} is missing; prepare the data again")
    size_now = path.stat().st_size
    if size_now != size:
        raise BadData(f"{path} has {size_now} bytes instead of {size}; prepare the data again")


def check_sum(path: Path, sha256: str) -> None:
    """Raise where the file is not there or not what it was."""
    if not path.is_file():
        raise _Missing(f"{path} is missing; prepare the data again")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise BadData(f"{path} is corrupt (its checksum differs from the index); prepare the data again")


def fetched_tokenizer(remote: Remote, cache: Cache, sha256: str) -> Path:
    """A folder with the tokenizer of shards in a store; its other files may be missing."""
    folder = cache.folder / "tokenizers" / sha256[:16]
    if folder.is_dir():
        return folder
    files = [cache.get(remote, "tokenizer/tokenizer.json", sha256=sha256)]
    for name in ("tokenizer_config.json", "generation_config.json"):
        if remote.exists(f"tokenizer/{name}"):
            files.append(cache.get(remote, f"tokenizer/{name}"))
    with suppress(Taken), staged_folder(folder) as staged:  # another rank may be quicker
        for file in files:
            shutil.copyfile(file, staged / file.name.partition("-")[2])
    return folder


_LOCKS = 64


def _check_sum_once(path: Path, sha256: str, marks: Path) -> None:
    """`check_sum`, unless a mark in the folder `marks` shows that it was done for this state of the file; other
    processes wait for the one that checks."""
    about = path.stat()
    facts = f"{path.absolute()}\n{about.st_size} {about.st_mtime_ns} {sha256}"
    tag = hashlib.sha256(facts.encode()).hexdigest()[:32]
    mark = marks / tag
    if mark.exists():
        return
    with suppress(OSError):
        marks.mkdir(parents=True, exist_ok=True)
    if not (marks.is_dir() and os.access(marks, os.W_OK)):
        return check_sum(path, sha256)  # there is nowhere to remember it
    with locked(marks / f".lock-{int(tag, 16) % _LOCKS:02d}"):
        if not mark.exists():
            check_sum(path, sha256)
            mark.touch()
