"""Diagnosis: the verdict as a record: which loop limits, what in it, the evidence, and the levers in their order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from armillary.diagnosis.evidence.finding import Cause, Finding, Lever
from armillary.diagnosis.readings.reading import Kind
from armillary.errors import BadInput, NotFound
from armillary.spec.gauges import Loop
from armillary.spec.toml.fields import build, to_plain

FILE = "diagnosis.json"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found in one run, server or trace."""

    source: str
    """what was read"""
    kind: Kind
    """what it was doing"""
    created: str
    """when, in UTC"""
    loop: Loop | None = None
    """the ring that limits; none: nothing is worth changing"""
    cause: Cause | None = None
    """what in it"""
    headline: str
    """one line for people"""
    gain: float = 0.0
    """what the best lever would add, 0.31 is 31 %"""
    budget: Mapping[str, float] = field(default_factory=dict)
    """where the time went: part -> share"""
    findings: tuple[Finding, ...] = ()
    """causes that were found, what costs most first"""
    levers: tuple[Lever, ...] = ()
    """of all findings, in the order they are numbered: the limiting cause's first, then by what they buy"""
    notes: tuple[str, ...] = ()
    """what could not be read or judged"""

    judged: bool = True
    """whether enough was measured to say anything"""

    @property
    def is_healthy(self) -> bool:
        return self.judged and self.loop is None

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
