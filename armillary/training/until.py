"""`--until val_loss=3.2`: a run may end before its last step, once it is as good as was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from armillary.errors import BadInput

GAUGES = ("val_loss", "loss")


@dataclass(frozen=True, kw_only=True)
class Until:
    """A goal."""

    gauge: str
    """val_loss or loss"""
    value: float
    """reached at or below"""

    @classmethod
    def parse(cls, text: str) -> Until:
        name, _, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if name not in GAUGES or not isfinite(value):
            raise BadInput(f"--until {text} is no goal; write it like --until val_loss=3.2 (or loss=3.2)")
        return cls(gauge=name, value=value)

    def reached(self, gauges: Mapping[str, float]) -> bool:
        return gauges.get(self.gauge, float("inf")) <= self.value
