"""The audit log: one JSON line per request, without prompt or completion text and without keys."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec import DecodeError
from msgspec.json import decode, encode

from armillary.errors import ArmillaryError, NotFound

_FLUSH_S = 1.0
_MOST_LINES = 100_000
"""lines that wait while the disk is full"""
_TOTALS = ("requests", "errors", "prompt_tokens", "completion_tokens", "usd")


class AuditLog:
    """Collects lines and writes them once per second, so that a disk never delays a request."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = path.open("ab")
        except OSError as error:
            raise ArmillaryError(f"cannot write the audit log {path} ({error.strerror}); set gateway.audit") from None
        path.chmod(0o600)
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
        """Write until cancelled. While the disk takes no lines, the last ones are kept and the log says so once."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            try:
                await asyncio.to_thread(self.flush)
            except OSError as error:
                if not self._failed:
                    say(f"the audit log cannot be written ({error.strerror}); the last {_MOST_LINES:,} lines are kept")
                self._failed = True
            else:
                self._failed = False

    def close(self) -> None:
        with suppress(OSError):
            self.flush()
        with suppress(OSError):
            self._file.close()


def usage_by_client(path: Path, since: float = 0.0) -> dict[tuple[str, str], dict[str, float]]:
    """(client, model) -> requests, errors, tokens and dollars, of the lines since a time (unix seconds)."""
    totals: dict[tuple[str, str], dict[str, float]] = {}
    if not path.is_file():
        raise NotFound(f"no audit log {path}; run armillary gateway first")
    with path.open("rb") as file:
        for line in file:
            try:
                row = decode(line)
            except DecodeError:  # the last line of a gateway that was killed
                continue
            if row["time"] < since:
                continue
            client, model = row.get("client") or "", row.get("answered_by") or row.get("model") or ""
            total = totals.setdefault((client, model), dict.fromkeys(_TOTALS, 0))
            total["requests"] += 1
            total["errors"] += row["status"] >= 400
            for name in ("prompt_tokens", "completion_tokens", "usd"):
                total[name] += row.get(name) or 0
    return totals
