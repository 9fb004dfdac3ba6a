"""events.jsonl: what a run spends its time on; one JSON line whenever that changes, by its launcher and main rank.

Each line is a single append, so that a killed writer loses at most its last line, and readers ignore a torn one. A line
holds from its time on until the next one, so that no second is missing or counted twice. `goodput.py` adds them up.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from armillary.errors import ArmillaryError
from armillary.store import nan_safe_json

NAME = "events.jsonl"
EventName = Literal[
    "created",  # after `preparing_s` of data preparation; its ranks start
    "resumed",  # by another process, as `created`; `seen` is when the last one was alive
    "loading",  # main rank: model, data, checkpoint
    "steps",  # main rank: `step` are complete, of which `data_wait_s` and `logging_s` went to data and records
    "validation",
    "saving",
    "exporting",
    "restarting",  # launcher: a rank failed, and the ranks are started again
    "waiting",  # launcher: for nodes; `restarting` follows when they are there
    "failed",
    "stopped",  # on request
    "finished",
]
EVENTS: tuple[EventName, ...] = EventName.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """One line of the file; `time` is in unix seconds, `more` are the figures of its event."""

    time: float
    event: EventName
    more: Mapping[str, Any] = field(default_factory=dict)

    def number(self, key: str) -> float:
        """A figure; 0 where there is none."""
        value = self.more.get(key, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0


def add_event(folder: Path, event: EventName, *, now: float | None = None, **more: Any) -> None:
    """Append an event to the run in `folder`. Best effort: an account is no reason for a run to fail."""
    line = nan_safe_json.dumps({"time": time.time() if now is None else now, "event": event, **more}).encode() + b"\n"
    with suppress(OSError):
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(file).st_size
            torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
            os.write(file, b"\n" + line if torn else line)
        finally:
            os.close(file)


def read_events(folder: Path) -> list[RunEvent]:
    """All events, in their order; none where the run is of an older version."""
    path = folder / NAME
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: bytes) -> RunEvent | None:
    """None for a torn line, or an event of a later version."""
    try:
        values = dict(nan_safe_json.loads(line.decode()))
        when, event = float(values.pop("time")), values.pop("event")
    except (ArmillaryError, ValueError, TypeError, KeyError):
        return None
    return RunEvent(time=when, event=event, more=values) if event in EVENTS else None
