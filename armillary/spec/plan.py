"""Plan: a resolved recipe with its predictions; every rank and engine reads this file.

Predictions have gauge names, so that each can be compared with its measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from armillary.errors import BadInput, unknown
from armillary.spec.gauges import GAUGES, current_names
from armillary.spec.hardware import Cluster
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.train import Data, TrainJob
from armillary.spec.toml.fields import build, to_plain

VERSION = 1
"""increased when an older armillary could misread the file"""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will run, where and how, and its predictions by gauge name. A plan for serving has no `train` and `data`,
    one for training no `serve`; `weights` is the Hugging Face folder that training starts from, empty from scratch."""

    version: int = VERSION
    created: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    model: ModelConfig
    cluster: Cluster
    layout: Layout
    train: TrainJob | None = None
    data: Data | None = None
    serve: Serve | None = None
    weights: str = ""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """recipe key that was "auto" -> its value and the reason"""
    predicted: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in self.predicted.items():
            if name not in GAUGES:
                raise unknown("gauge", name, GAUGES, where="docs/gauges.md lists them")
            if not isfinite(value):
                raise BadInput(f"predicted {name}={value} is not a number; leave out what cannot be predicted")

    def to_json(self) -> str:
        """The plan as text; from_json gives the same plan back."""
        return json.dumps(to_plain(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "plan.json") -> Plan:
        """The plan that to_json wrote."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{where} is not JSON ({error}); make a new plan") from None
        if not isinstance(values, dict):
            raise BadInput(f"{where} has no plan; make a new plan")
        return Plan.from_dict(values, where)

    @staticmethod
    def from_dict(values: Mapping[str, Any], where: str = "plan.json") -> Plan:
        """The plan from parsed JSON; one written by a newer armillary is refused."""
        version = values.get("version")
        if not isinstance(version, int) or version < 1:
            raise BadInput(f"{where} has no plan; make a new plan")
        if version > VERSION:
            raise BadInput(f"{where} has version {version} and this armillary reads up to {VERSION}; upgrade armillary")
        if isinstance(values.get("predicted"), dict):
            values = {**values, "predicted": current_names(values["predicted"])}
        return build(Plan, values, where)
