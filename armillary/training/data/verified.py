"""Which shards were compared with their checksums already: an empty mark in the cache for each, so that reading a shard
of many gigabytes twice is done once on a machine, by one of its processes, and not at every start.

A mark is of one path, size, time of change and checksum: a file that was written to is compared again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from armillary.store.lock import locked

_LOCKS = 64


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Marks of shards that are what their index says."""

    folder: Path
    """where the marks are"""

    def once(self, path: Path, sha256: str, check: Callable[[Path, str], None]) -> None:
        """`check(path, sha256)`, unless it was done for this state of the file; others wait for who is at it."""
        about = path.stat()
        facts = f"{path.absolute()}\n{about.st_size} {about.st_mtime_ns} {sha256}"
        tag = hashlib.sha256(facts.encode()).hexdigest()[:32]
        mark = self.folder / tag
        if mark.exists():
            return
        if not self._is_writable():
            check(path, sha256)  # there is nowhere to remember it
            return
        with locked(self.folder / f".lock-{int(tag, 16) % _LOCKS:02d}"):
            if not mark.exists():
                check(path, sha256)
                mark.touch()

    def _is_writable(self) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)
