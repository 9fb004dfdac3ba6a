"""The log of an autoscaler: one JSON line per decision with its signals and reason, from which it can be replayed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from armillary.errors import BadData, NotFound
from armillary.fleet.autoscale.policy import Autoscaler, Decision
from armillary.fleet.autoscale.signals import Signals


def log_line(signals: Signals, decision: Decision, started_s: float | None = None) -> dict[str, Any]:
    """One line; `started_s`: how long the start of a replica took that has become ready since the last line."""
    line = {"signals": asdict(signals), "decision": decision.plain()}
    return line if started_s is None else {**line, "started_s": started_s}


def append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Its lines; a last line that was cut off is left out."""
    if not path.is_file():
        raise NotFound(f"no decision log '{path}'; armillary up writes one into its folder")
    lines = path.read_text(encoding="utf-8").splitlines()
    read: list[dict[str, Any]] = []
    for number, text in enumerate(lines, start=1):
        if (line := _parsed(text)) is not None:
            read.append(line)
        elif number < len(lines):
            raise BadData(f"{path}:{number} is not a decision; correct or remove the line")
    return read


def newest(path: Path, *, most_bytes: int = 256 << 10) -> list[dict[str, Any]]:
    """The lines at the end of a log that may be large and is being written."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        texts = file.read().decode("utf-8", errors="replace").splitlines()
    return [line for text in texts if (line := _parsed(text)) is not None]


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
        return {**line, "signals": Signals(**line["signals"])}
    except (ValueError, TypeError, KeyError):
        return None


def replay(lines: Iterable[dict[str, Any]], autoscaler: Autoscaler) -> Iterator[tuple[dict[str, Any], Decision]]:
    """Each logged decision, and what this autoscaler decides from the same signals."""
    for line in lines:
        if line.get("started_s") is not None:
            autoscaler.started(float(line["started_s"]))
        yield line["decision"], autoscaler.decide(line["signals"])
