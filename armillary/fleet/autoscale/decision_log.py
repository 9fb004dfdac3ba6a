"""The log of an autoscaler, from which its decisions can be replayed: JSON lines.

The first line of a process has its policy and what a replica is planned to serve; every other line is one decision with
its signals and reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadData, NotFound
from armillary.fleet.autoscale.policy import Autoscaler, Decision
from armillary.fleet.autoscale.replica_capacity import Limits
from armillary.fleet.autoscale.signals import Signals
from armillary.spec.tables.fleet import Autoscale


@dataclass(frozen=True, kw_only=True)
class AutoscalerStart:
    """An autoscaler began with this policy."""

    settings: Autoscale
    limits: Limits
    start_s: float | None = None
    """given time of a start; none: as measured"""

    def autoscaler(self, settings: Autoscale | None = None) -> Autoscaler:
        """As it was at its begin, or with other settings."""
        return Autoscaler(settings or self.settings, self.limits, start_s=self.start_s)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """One decision."""

    signals: Signals
    decision: Decision
    started_s: float | None = None
    """how long the start of a replica took that has become ready since the last line"""


Line = AutoscalerStart | Logged


def append(path: Path, line: Line) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(line, AutoscalerStart):
        plain = {"settings": asdict(line.settings), "limits": asdict(line.limits), "start_s": line.start_s}
    else:
        plain = {"signals": asdict(line.signals), "decision": line.decision.plain(), "started_s": line.started_s}
    begin = "\n" if isinstance(line, AutoscalerStart) and path.exists() else ""  # after a line that was cut off
    with path.open("a", encoding="utf-8") as file:
        file.write(begin + json.dumps(plain) + "\n")


def read_log(path: Path) -> list[Line]:
    """Its lines; the last line of a process, which may be cut off where that was killed, is then left out."""
    if not path.is_file():
        raise NotFound(f"no decision log '{path}'; armillary up writes decisions.jsonl into its folder")
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    read: list[Line] = []
    for number, line in enumerate(lines):
        try:
            read.append(_line(json.loads(line)))
        except (ValueError, TypeError, KeyError):
            if not all('"settings"' in following for following in lines[number + 1 : number + 2]):
                raise BadData(f"line {number + 1} of {path} is no decision; correct or remove it") from None
    return read


def _line(plain: dict[str, Any]) -> Line:
    if "settings" in plain:
        settings, limits = Autoscale(**plain["settings"]), Limits(**plain["limits"])
        return AutoscalerStart(settings=settings, limits=limits, start_s=plain["start_s"])
    return Logged(
        signals=Signals(**plain["signals"]), decision=Decision(**plain["decision"]), started_s=plain["started_s"]
    )


def newest(path: Path, *, most_bytes: int = 256 << 10) -> list[Logged]:
    """The decisions at the end of a log that may be large and is being written."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most_bytes))
        texts = file.read().decode("utf-8", errors="replace").splitlines()
    lines = []
    for text in texts:
        with suppress(ValueError, TypeError, KeyError):
            lines.append(_line(json.loads(text)))
    return [line for line in lines if isinstance(line, Logged)]


def replay(lines: Sequence[Line], settings: Autoscale | None = None) -> Iterator[tuple[Logged, Decision]]:
    """Each logged decision, and what the autoscaler decides from the same signals: with its own settings the same, with
    others what it would have decided. Signals stay as logged: what other decisions would have changed, they do not
    show."""
    if not lines or not isinstance(lines[0], AutoscalerStart):
        raise BadData("the log does not begin with an autoscaler's start; give the whole decisions.jsonl")
    autoscaler = lines[0].autoscaler(settings)
    for line in lines:
        if isinstance(line, AutoscalerStart):
            autoscaler = line.autoscaler(settings)
            continue
        if line.started_s is not None:
            autoscaler.started(line.started_s)
        yield line, autoscaler.decide(line.signals)
