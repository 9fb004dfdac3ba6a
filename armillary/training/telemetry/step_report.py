"""The report of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step measured; the keys of `gauges` are gauge names."""

    step: int
    gauges: dict[str, float]
    sources: dict[str, str] = field(default_factory=dict)
    """how gauges were measured that are not measured in the usual way"""
    save: bool = False
    """whether the ranks agreed on a checkpoint after it"""
