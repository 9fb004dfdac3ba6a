"""The track record: predictions of levers and their outcomes, kept in the store.

One JSON line per prediction or outcome. Lines are only ever added: the first prediction of a lever counts, and the last
outcome of each pair of runs.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from armillary.errors import BadData, BadInput
from armillary.spec.toml.fields import build, to_plain
from armillary.store import nan_safe_json
from armillary.store.atomic import plain_errors
from armillary.store.home import Home


@dataclass(frozen=True, kw_only=True)
class LoggedPrediction:
    """The prediction of one lever, and its outcome once it was applied."""

    run: str  # the run that was diagnosed
    title: str  # of the lever
    change: Mapping[str, Any] = field(default_factory=dict)  # key of the recipe -> value
    of: str = "step_s"  # the gauge that the speed-ups are about
    value: float | None = None  # that gauge in the run that was diagnosed
    predicted: float  # speed-up
    expected: float | None = None  # the gauge as predicted with the lever applied
    predicted_at: float  # unix seconds
    obtained: float | None = None  # measured speed-up; None: not pulled yet
    by: str = ""  # the run with the lever applied
    recipe: str = ""  # the file that the changed recipe was written to

    @property
    def error(self) -> float | None:
        """|obtained / predicted − 1|."""
        return abs(self.obtained / self.predicted - 1) if self.obtained is not None else None

    @property
    def lever(self) -> tuple[str, str, str]:
        """Key of the prediction: run, change, gauge."""
        return self.run, json.dumps(to_plain(self.change), sort_keys=True), self.of

    @property
    def is_sound(self) -> bool:
        figures = [self.predicted] if self.obtained is None else [self.predicted, self.obtained]
        return all(math.isfinite(figure) and figure > 0 for figure in figures)


@dataclass(frozen=True, kw_only=True)
class TrackRecord:
    """Every line that could be read, oldest first, and notes on those that could not."""

    lines: tuple[LoggedPrediction, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def levers(self) -> tuple[LoggedPrediction, ...]:
        """Each pair of runs once, as last compared, and each prediction that waits for its outcome."""
        done = {line.lever for line in self.lines if line.by}
        latest: dict[tuple[str, ...], LoggedPrediction] = {}
        for line in self.lines:
            if line.by:
                latest[(*line.lever, line.by)] = line
            elif line.lever not in done:
                latest.setdefault(line.lever, line)
        return tuple(latest.values())

    @property
    def median_error(self) -> float | None:
        errors = [line.error for line in self.levers if line.error is not None]
        return median(errors) if errors else None

    @property
    def summary(self) -> str:
        """'15 levers, median error 8 %'."""
        count = sum(line.error is not None for line in self.levers)
        if self.median_error is None:
            return "no lever was measured yet"
        return f"{count} lever{'s' if count > 1 else ''}, median error {self.median_error:.0%}"


def path_of(home: Home) -> Path:
    return home.work / "track-record.jsonl"


def read_record(home: Home) -> TrackRecord:
    """Every line; a broken one is left out with a note."""
    path = path_of(home)
    if not path.is_file():
        return TrackRecord()
    try:
        texts = path.read_bytes().splitlines()
    except OSError as error:
        raise BadData(f"{path} cannot be read ({error.strerror}); check who may read it") from None
    parsed = {number: _parse(text, path) for number, text in enumerate(texts, 1) if text.strip()}
    return TrackRecord(
        lines=tuple(line for line in parsed.values() if line is not None),
        notes=tuple(
            f"line {number} of {path} is broken and left out; delete it"
            for number, line in parsed.items()
            if line is None
        ),
    )


def _parse(text: bytes, path: Path) -> LoggedPrediction | None:
    try:
        values = nan_safe_json.loads(text)
        line = build(LoggedPrediction, values, str(path)) if isinstance(values, dict) else None
    except (ValueError, RecursionError, BadInput):
        return None
    return line if line is not None and line.is_sound else None


def log_prediction(home: Home, prediction: LoggedPrediction) -> LoggedPrediction:
    """Append a prediction, unless the same lever was predicted before; returns the one that counts."""
    before = next((line for line in read_record(home).lines if line.lever == prediction.lever), None)
    if before is None:
        _append(path_of(home), prediction)
    return before or prediction


def log_outcome(home: Home, outcome: LoggedPrediction) -> None:
    """Append an outcome, unless it is there already."""
    assert outcome.by and outcome.obtained is not None, "an outcome names its run and what it brought"
    key = (outcome.lever, outcome.by)
    last = next((line for line in reversed(read_record(home).lines) if (line.lever, line.by) == key), None)
    if last is None or last.obtained != outcome.obtained:
        _append(path_of(home), outcome)


def _append(path: Path, entry: LoggedPrediction) -> None:
    line = nan_safe_json.dumps(to_plain(entry)).encode() + b"\n"
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - 1))
            torn = end > 0 and file.read(1) != b"\n"  # a writer was killed: its line stays broken, ours does not
            file.write(b"\n" + line if torn else line)
