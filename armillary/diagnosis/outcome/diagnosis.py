"""Diagnosis: the verdict as a record: which loop limits, what in it, the evidence, and the levers in their order."""

from __future__ import annotations

import calendar
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.outcome.track_record import read_record
from armillary.diagnosis.readings.reading import ReadingKind
from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.spec.gauges import Loop
from armillary.spec.toml.fields import build, to_plain
from armillary.store.atomic import write_text
from armillary.store.gauges import last_record
from armillary.store.home import Home
from armillary.store.runs import Run

FILE = "diagnosis.json"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found in one run, server or trace."""

    source: str
    kind: ReadingKind
    created: str  # UTC
    loop: Loop | None = None  # the loop that limits; None: nothing is worth changing
    cause: Cause | None = None
    headline: str
    gain: float = 0.0  # what the best lever would add: 0.31 is 31 %
    budget: Mapping[str, float] = field(default_factory=dict)  # where the time went: part -> share
    findings: tuple[Finding, ...] = ()  # what costs most first
    levers: tuple[Lever, ...] = ()  # of all findings, as numbered: the limiting cause's first, then by gain
    notes: tuple[str, ...] = ()  # what could not be read or judged

    judged: bool = True  # whether enough was measured to say anything

    @property
    def is_healthy(self) -> bool:
        return self.judged and self.loop is None

    @property
    def created_s(self) -> float:
        """Unix seconds at which it existed: the end of the second that `created` names."""
        try:
            return calendar.timegm(time.strptime(self.created, "%Y-%m-%dT%H:%M:%SZ")) + 1.0
        except ValueError:
            return float("inf")

    def lever(self, number: int) -> Lever:
        """By the number it is shown with, from 1."""
        if not 1 <= number <= len(self.levers):
            there = f"levers are 1 to {len(self.levers)}" if self.levers else "there is none to apply"
            raise BadInput(f"no lever {number}; {there}: armillary diagnose shows them")
        return self.levers[number - 1]

    def to_json(self) -> str:
        return json.dumps(to_plain(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str, where: str = FILE) -> Diagnosis:
        try:
            values = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{where} is not JSON ({error}); diagnose again") from None
        if not isinstance(values, dict) or "headline" not in values:
            raise BadInput(f"{where} holds no diagnosis; diagnose again")
        return build(Diagnosis, values, where)


def read_diagnosis(folder: Path) -> Diagnosis:
    """What was found in the run of this folder."""
    path = folder / FILE
    try:
        return Diagnosis.from_json(path.read_text(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no diagnosis in {folder}; make one with armillary diagnose {folder.name}") from None


def save(run: Run, diagnosis: Diagnosis, home: Home) -> None:
    """Write diagnosis.json into the run's folder, unless the one that is there is frozen."""
    if not is_frozen(run, home):
        write_text(run.folder / FILE, diagnosis.to_json())


def is_frozen(run: Run, home: Home) -> bool:
    """Whether a saved diagnosis stays: one of its levers was applied, or nothing was measured since. The first verdict
    on a measurement is its prediction; a later one is not."""
    try:
        saved = read_diagnosis(run.folder)
    except ArmillaryError:  # none yet, or a broken one
        return False
    measured = float((last_record(run.gauges) or {}).get("time", 0.0))
    return any(line.run == run.id for line in read_record(home).lines) or (saved.judged and measured < saved.created_s)
