"""gauges.jsonl: one JSON line per step or request, appended by one writer and readable meanwhile.

Each record is a single append, so that a killed writer loses at most its last record; readers ignore a torn last line,
and the next writer removes it. A run that resumes removes the records of the steps that it repeats.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from armillary.errors import BadData, BadInput, NotFound, nearest
from armillary.spec.gauges import GAUGES, RENAMED, current_names
from armillary.store import nan_safe_json
from armillary.store.atomic import plain_errors
from armillary.store.lock import try_lock

Record = dict[str, Any]
KEYS = ("time", "step", "request", "source")
"""Keys of a record besides gauges: unix seconds, its step or request, and the source of the figures."""
_BLOCK = 65_536


class GaugeWriter:
    """The only writer of a file; a second writer is refused."""

    def __init__(self, path: Path, *, step: int | None = None) -> None:
        """`step` is the next step: records of it and of later steps are removed."""
        self.path = path
        self._lock = threading.Lock()
        with plain_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        if not try_lock(self._file):
            self.close()
            raise BadInput(f"{path} is being written by another process; stop that one first or start a new run")
        os.ftruncate(self._file, _end_of_last_line(self._file))
        if step is not None:
            os.ftruncate(self._file, _end_before(self._file, path, step))

    def write(
        self,
        gauges: Mapping[str, Any],
        *,
        step: int | None = None,
        request: str | None = None,
        source: str | Mapping[str, str] | None = None,
        now: float | None = None,
    ) -> None:
        """Append one record; `source` is how the figures were measured, for all or per gauge."""
        for name in gauges:
            check_name(name)
        record: Record = {"time": time.time() if now is None else now}
        keys = {"step": step, "request": request, "source": source}
        record |= {key: value for key, value in keys.items() if value is not None}
        self._append(nan_safe_json.dumps(record | dict(gauges)).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        with self._lock, plain_errors(self.path):
            before = os.fstat(self._file).st_size
            try:
                written = os.write(self._file, line)
                if written < len(line):  # the disk is full: writing the rest raises the reason
                    os.write(self._file, line[written:])
            except OSError:
                os.ftruncate(self._file, before)
                raise

    def keep_last(self, most_bytes: int) -> bool:
        """Remove the older half where the file is larger than `most_bytes`; whether it did. Readers continue at a
        complete line."""
        with self._lock, plain_errors(self.path):
            size = os.fstat(self._file).st_size
            if size <= most_bytes:
                return False
            start = _end_of_last_line(self._file, size - most_bytes // 2)
            newer = os.pread(self._file, size - start, start)
            os.ftruncate(self._file, 0)
            os.write(self._file, newer)
        return True

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_name(name: str) -> None:
    """BadInput where a gauge is not defined, with the nearest name."""
    if name not in GAUGES:
        guess = RENAMED.get(name) or nearest(name, GAUGES)
        hint = f"did you mean {guess}?" if guess else "add it to spec/gauges.py"
        raise BadInput(f"no gauge '{name}'; {hint}")


def read_gauges(
    path: Path,
    *,
    since: int = 0,
    follow: bool = False,
    poll_s: float = 0.2,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Record]:
    """Complete records from byte `since` on; with `follow`, wait for more until `stop()` is true."""
    for record, _ in _records(path, since, follow, poll_s, stop):
        yield record


def last_record(path: Path) -> Record | None:
    """The last complete record; None where there is no file or no record."""
    if not path.is_file():
        return None
    with _open(path) as file:
        line, _ = _last_line(file.fileno(), _end_of_last_line(file.fileno()))
    return _parse(line, path, 0) if line else None


def columns(path: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Each name as a list over the records that have any of the gauges; None where a record lacks one."""
    names = list(names)
    gauges = [name for name in names if name not in KEYS]
    for name in gauges:
        check_name(name)
    wanted = gauges or names
    rows = [record for record in read_gauges(path) if any(name in record for name in wanted)]
    return {name: [row.get(name) for row in rows] for name in names}


def _records(
    path: Path, since: int, follow: bool, poll_s: float, stop: Callable[[], bool]
) -> Iterator[tuple[Record, int]]:
    """(record, byte offset after it)."""
    position = since
    with _open(path) as file:
        while True:
            ending = stop()  # before reading, so that records written until then are still read
            position = _line_start(file.fileno(), position)
            file.seek(position)
            while (line := file.readline()).endswith(b"\n"):
                start, position = position, position + len(line)
                yield _parse(line, path, start), position
            if not follow or ending:
                return
            time.sleep(poll_s)


def _parse(line: bytes, path: Path, offset: int) -> Record:
    try:
        record = nan_safe_json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise BadData(f"{path} has a broken record at byte {offset}; delete that line to read the rest")
    if "request" in record:
        record["request"] = str(record["request"])  # an id that is written "nan" is still an id
    if isinstance(record.get("source"), dict):
        record["source"] = current_names(record["source"])
    return record if RENAMED.keys().isdisjoint(record) else current_names(record)


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise NotFound(f"no gauges at {path}; the run has not taken a step yet") from None


def _line_start(descriptor: int, position: int) -> int:
    """`position`, or the end of a line before it where the file was truncated since the last read."""
    is_start = not position or os.pread(descriptor, 1, position - 1) == b"\n"
    return position if is_start else _end_of_last_line(descriptor, position)


def _end_before(descriptor: int, path: Path, step: int) -> int:
    """Byte after the last record of a step before `step`, searched from the end."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        line, start = _last_line(descriptor, end)
        if _parse(line, path, start).get("step", -1) < step:
            return end
        end = start
    return 0


def _last_line(descriptor: int, end: int) -> tuple[bytes, int]:
    """The line that ends at byte `end`, and where it starts."""
    start = _end_of_last_line(descriptor, end - 1)
    return os.pread(descriptor, max(0, end - start), start), start


def _end_of_last_line(descriptor: int, end: int | None = None) -> int:
    """Byte after the last newline (before `end`); later bytes are a torn line."""
    size = os.fstat(descriptor).st_size
    end = size if end is None else min(end, size)
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
