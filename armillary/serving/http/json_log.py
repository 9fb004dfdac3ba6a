"""A log of one JSON line per request, for the audit log of a gateway and the access log of a server."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec.json import encode

from armillary.errors import ArmillaryError

_FLUSH_S = 1.0
_MOST_LINES = 100_000
"""lines that wait while the disk is full"""


class JsonLog:
    """Collects lines and writes them once per second, so that a disk never delays a request."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise ArmillaryError(f"cannot write the log {path} ({error.strerror}); name another file") from None
        path.chmod(0o600)
        self.path = path
        self._lines: deque[bytes] = deque(maxlen=_MOST_LINES)
        self._failed = False

    def add(self, **fields: Any) -> None:
        fields["time"] = round(time.time(), 3)
        self._lines.append(encode(fields))

    def flush(self) -> None:
        while self._lines:
            self._file.write(self._lines[0] + b"\n")
            self._lines.popleft()
        self._file.flush()

    async def run(self, say: Callable[[str], None]) -> None:
        """Write until cancelled. While the disk takes no lines, the last ones are kept and `say` is told once."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            try:
                await asyncio.to_thread(self.flush)
            except OSError as error:
                if not self._failed:
                    say(f"{self.path} cannot be written ({error.strerror}); the last {_MOST_LINES:,} lines are kept")
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        with suppress(OSError):
            self.flush()
        with suppress(OSError):
            self._file.close()
