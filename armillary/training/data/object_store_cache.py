"""Local cache of files from object stores: bounded, shared by all ranks, every file complete.

A file is fetched by one process while the others wait for it, checked, and renamed into place. When the folder is full,
what was not used for longest goes; whoever still has such a file open keeps reading it.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.store.atomic import plain_errors
from armillary.store.lock import locked
from armillary.store.remote import Remote
from armillary.units import bytes_text

_LOCKS = 64
_TRIES = 3
_PAUSE_S = 0.2
_ABANDONED_S = 3600
"""a partial file that was not written to for so long was left by a process that died"""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Fetched files in one folder of at most `limit_bytes`, partial files included."""

    folder: Path
    limit_bytes: int

    def get(self, remote: Remote, name: str, *, size: int | None = None, sha256: str | None = None) -> Path:
        """The file on this machine, fetched now or earlier. With a checksum it is compared once, when it arrives."""
        version = sha256 or remote.version(name)
        tag = hashlib.sha256(f"{remote.address(name)}\n{version}".encode()).hexdigest()[:16]
        path = self.folder / f"{tag}-{Path(name).name}"
        if not _touched(path, size):
            with plain_errors(path), locked(self.folder / f".lock-{int(tag, 16) % _LOCKS:02d}"):
                if not _touched(path, size):  # another process may have been quicker
                    self._fetch(remote, name, path, remote.size(name) if size is None else size, sha256)
        return path

    def _fetch(self, remote: Remote, name: str, path: Path, size: int | None, sha256: str | None) -> None:
        partial = path.with_name(f".{path.name}.partial")  # of no other process: the lock is held
        for number in range(1, _TRIES + 1):
            try:
                with self._reserved(remote.address(name), partial, size or 0) as file:
                    _copy(remote, name, file, size, sha256)
                return os.replace(partial, path)
            except ArmillaryError as error:
                hopeless = isinstance(error, BadInput) and not isinstance(error, _Damaged)
                if hopeless or number == _TRIES:
                    raise
                time.sleep(_PAUSE_S * number)

    @contextmanager
    def _reserved(self, address: str, partial: Path, size: int) -> Iterator[IO[bytes]]:
        """The partial file, at its full size from the beginning, so that others see the space is taken."""
        try:
            with partial.open("wb") as file:
                with locked(self.folder / ".lock-room"):
                    self._evict(address, size)
                    file.truncate(size)
                yield file
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _evict(self, address: str, need: int) -> None:
        if need > self.limit_bytes:
            both = f"{bytes_text(need)}, more than the cache of {bytes_text(self.limit_bytes)}"
            raise BadInput(f"{address} has {both}; try --set data.cache_bytes={2 * need}")
        files = sorted(_files(self.folder))
        total = sum(size for _, size, _ in files)
        for used, size, path in files:
            if total + need <= self.limit_bytes:
                return
            if not path.name.startswith(".") or time.time() - used > _ABANDONED_S:
                path.unlink(missing_ok=True)
                total -= size


def _touched(path: Path, size: int | None) -> bool:
    """Whether the file is there, in its full size; then it was used just now."""
    try:
        os.utime(path)
        return size is None or path.stat().st_size == size
    except FileNotFoundError:
        return False


class _Damaged(BadData):
    """A file that came otherwise than it should be: perhaps only this time."""


def _copy(remote: Remote, name: str, file: IO[bytes], size: int | None, sha256: str | None) -> None:
    digest, count = hashlib.sha256(), 0
    for piece in remote.read(name):
        file.write(piece)
        digest.update(piece)
        count += len(piece)
    file.truncate()
    if size is not None and count != size:
        raise _Damaged(f"{remote.address(name)} has {count} bytes instead of {size}; upload it again")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise _Damaged(f"{remote.address(name)} is corrupt (its checksum differs from the index); upload it again")


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each was last used, its size and place; locks and folders (small, of tokenizers) are left out."""
    for path in folder.iterdir():
        if not (path.name.startswith(".lock-") or path.is_dir()):
            with suppress(FileNotFoundError):
                about = path.stat()
                yield about.st_mtime, about.st_size, path
