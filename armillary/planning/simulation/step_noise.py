"""StepNoise: what engine steps took over what a line says of them, kept by kind and size.

Percentiles of gaps depend on it. Short steps scatter more than long ones, and those with prompts otherwise than those
without, so that a step which is played again gets the luck of steps like it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import frexp

ENOUGH = 8
"""steps whose luck says something; where fewer were of a size, those of the next sizes count too"""
OTHER = 1.5
"""doublings of size that steps with prompts are apart from those without"""
Kind = tuple[bool, int]
"""whether prompts are in a step, and the power of two above its seconds"""


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """Ratios of taken to expected seconds."""

    ratios: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    """of each kind of step"""
    _near: dict[Kind, Sequence[float]] = field(default_factory=dict, repr=False, compare=False)
    """what was asked for before"""

    def ratios_near(self, prompts: bool, seconds: float) -> Sequence[float]:
        """Ratios of the steps that are most like one of so many seconds; none where none were seen."""
        kind = (prompts, _octave(seconds))
        if kind not in self._near:
            self._near[kind] = self._nearest(kind)
        return self._near[kind]

    def _nearest(self, kind: Kind) -> Sequence[float]:
        """Ever less like it until they are enough."""
        apart = {other: abs(other[1] - kind[1]) + OTHER * (other[0] != kind[0]) for other in self.ratios}
        found: list[float] = []
        for distance in sorted(set(apart.values())):
            found += [ratio for other, ratios in self.ratios.items() if apart[other] == distance for ratio in ratios]
            if len(found) >= ENOUGH:
                break
        return found


def step_noise(steps: Iterable[tuple[bool, float, float]]) -> StepNoise:
    """From (whether it had prompts, expected seconds, taken over expected) of each step."""
    by_kind: dict[Kind, list[float]] = {}
    for prompts, seconds, ratio in steps:
        by_kind.setdefault((prompts, _octave(seconds)), []).append(float(ratio))
    return StepNoise(ratios={kind: tuple(ratios) for kind, ratios in by_kind.items()})


def _octave(seconds: float) -> int:
    return frexp(seconds)[1]
