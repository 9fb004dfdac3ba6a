"""A training step's pipeline played through: every pass with its begin and end, on stages that may be unequal, noisy or
slow. A pass begins once its stage is free and what it needs has arrived from the neighbouring stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log1p, sqrt
from random import Random
from typing import NamedTuple

from armillary.planning.simulation.pipeline_order import Pass, PassKind, pipeline_order


class Played(NamedTuple):
    """A pass and when it ran."""

    stage: int
    work: Pass
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """One micro-batch through all layers of a stage."""

    forward_s: float
    inputs_s: float
    weights_s: float

    def of(self, kind: PassKind) -> float:
        parts = {"F": self.forward_s, "I": self.inputs_s, "W": self.weights_s}
        return self.inputs_s + self.weights_s if kind == "B" else parts[kind]


@dataclass(frozen=True, kw_only=True)
class PipelineCase:
    """A step's pipeline."""

    schedule: str
    stages: Sequence[StageSeconds]
    chunks: int
    """of layers per stage"""
    micro_batches: int
    send_s: float = 0.0
    """hidden states of a micro-batch to the next stage, or gradients back"""

    def play(
        self, *, noise: float = 0.0, seed: int = 0, slow: int | None = None, slowdown: float = 1.0
    ) -> list[Played]:
        """`noise`: coefficient of variation of a pass; the stage `slow` computes `slowdown` times as long."""
        by_stage = pipeline_order(self.schedule, len(self.stages), self.chunks, self.micro_batches)
        rng, last = Random(seed), len(self.stages) * self.chunks - 1
        spread = sqrt(log1p(noise * noise))
        done: dict[tuple[str, int, int], tuple[float, int]] = {}  # when a pass was over, and on which stage
        free, at, played = [0.0] * len(by_stage), [0] * len(by_stage), list[Played]()
        left = sum(map(len, by_stage))
        while len(played) < left:
            before = len(played)
            for stage, order in enumerate(by_stage):
                while at[stage] < len(order):
                    work = order[at[stage]]
                    needs = _needs(work, last)
                    if any(need not in done for need in needs):
                        break
                    arrived = [
                        end + (self.send_s if other != stage else 0.0) for end, other in map(done.__getitem__, needs)
                    ]
                    begin = max([free[stage], *arrived])
                    taken = self.stages[stage].of(work.kind) / self.chunks * (slowdown if stage == slow else 1.0)
                    taken *= exp(rng.gauss(-spread * spread / 2, spread)) if noise else 1.0
                    free[stage] = begin + taken
                    done["B" if work.kind == "I" else work.kind, work.chunk, work.batch] = free[stage], stage
                    played.append(Played(stage, work, begin, free[stage]))
                    at[stage] += 1
            assert len(played) > before, "every stage waits for another"
        return played


def _needs(work: Pass, last: int) -> list[tuple[str, int, int]]:
    kind, chunk, batch = work
    if kind == "F":
        return [("F", chunk - 1, batch)] if chunk else []
    if kind == "W":
        return [("B", chunk, batch)]
    return [("F", chunk, batch), *([("B", chunk + 1, batch)] if chunk < last else [])]


def seconds(played: Sequence[Played]) -> float:
    """From the first pass to the end of the last."""
    return max(each.end_s for each in played)


def idle_fraction(played: Sequence[Played], stages: int) -> float:
    """Share of that time in which stages compute nothing."""
    return 1.0 - sum(each.end_s - each.begin_s for each in played) / (stages * seconds(played))
