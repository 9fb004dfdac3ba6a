"""Noise of engine steps: measured over fitted seconds, by kind and size of the step.

Percentiles of gaps depend on it. Short steps are noisier than long ones, and steps with prefill differ from those
without, so a simulated step samples the noise of similar steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import frexp

ENOUGH = 8
"""least steps to sample from; where a size has fewer, the next sizes count too"""
OTHER = 1.5
"""distance between steps with and without prefill, in doublings of size"""
Kind = tuple[bool, int]
"""whether a step has prefill, and the power of two above its seconds"""


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """Ratios of measured to fitted seconds."""

    ratios: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    _near: dict[Kind, Sequence[float]] = field(default_factory=dict, repr=False, compare=False)

    def ratios_near(self, prompts: bool, seconds: float) -> Sequence[float]:
        """Ratios of the steps most similar to one of so many seconds; empty where none were seen."""
        kind = (prompts, _octave(seconds))
        if kind not in self._near:
            self._near[kind] = self._nearest(kind)
        return self._near[kind]

    def _nearest(self, kind: Kind) -> Sequence[float]:
        """Ratios of the nearest kinds, until there are enough."""
        apart = {other: abs(other[1] - kind[1]) + OTHER * (other[0] != kind[0]) for other in self.ratios}
        nearest: list[float] = []
        for distance in sorted(set(apart.values())):
            nearest += [ratio for other, ratios in self.ratios.items() if apart[other] == distance for ratio in ratios]
            if len(nearest) >= ENOUGH:
                break
        return nearest


def step_noise(steps: Iterable[tuple[bool, float, float]]) -> StepNoise:
    """From (whether it has prefill, fitted seconds, measured over fitted seconds) of each step."""
    by_kind: dict[Kind, list[float]] = {}
    for prompts, seconds, ratio in steps:
        by_kind.setdefault((prompts, _octave(seconds)), []).append(float(ratio))
    return StepNoise(ratios={kind: tuple(ratios) for kind, ratios in by_kind.items()})


def _octave(seconds: float) -> int:
    return frexp(seconds)[1]
