"""Byte ranges of files, on a disk or in a store that fsspec reaches, with a count of the bytes that were read.

A file is read with pread, never mapped: mapped pages would count as this process's memory.
"""

from __future__ import annotations

import os
from threading import Lock

from armillary.errors import BadModel
from armillary.store.remote import Remote, is_url


class ByteRanges:
    """Reads ranges of files; threads may read at once."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._files: dict[str, int] = {}
        self._lock = Lock()

    def __enter__(self) -> ByteRanges:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)

    def read(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from byte `offset` on; BadModel where the file ends before."""
        count = self._fetch(path, offset, into) if is_url(path) else self._pread(path, offset, into)
        with self._lock:
            self.bytes_read += count
        if count < len(into):
            raise BadModel(f"{path} ends too early; fetch it again")

    def _pread(self, path: str, offset: int, into: memoryview) -> int:
        file, done = self._open(path), 0
        try:
            while done < len(into) and (count := os.preadv(file, [into[done:]], offset + done)):
                done += count
        except OSError as error:
            raise BadModel(f"{path} cannot be read ({error.strerror}); check the disk") from error
        return done

    def _fetch(self, path: str, offset: int, into: memoryview) -> int:
        folder, _, name = path.rpartition("/")
        content = Remote(url=folder).read_range(name, offset, len(into))
        into[: len(content)] = content
        return len(content)

    def _open(self, path: str) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise BadModel(f"{path} cannot be opened ({error.strerror}); check its permissions") from error
            return self._files[path]
