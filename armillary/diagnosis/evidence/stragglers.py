"""Stragglers: one rank that needs longer for its own work than the others, step after step.

The work of each rank is timed without its waiting. On a busy machine different ranks are late at different times, often
for seconds, so a straggler must be the slowest rank nearly always, by more than chance, and in every part of the run. A
pipeline stage with more work is not a straggler.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import Literal

from armillary.diagnosis.evidence.step_parts import parts_of, winsorised_mean
from armillary.diagnosis.evidence.thresholds import (
    MIN_SPREAD_STEPS,
    SAME_SLOWEST_RANK_SHARE,
    STRAGGLER_PART_SHARE,
    STRAGGLER_RUN_PARTS,
    STRAGGLER_STANDARD_ERRORS,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.layout_rules.pipeline_split import chunks_of, places, split
from armillary.spec.plan import Plan

MEDIAN_ERROR = 1.2533 * 1.4826
"""standard error of a median of n normal values over their median deviation / √n"""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that is later than the others."""

    rank: int
    seconds: float  # per step, beyond the extra work of its pipeline stage
    often: float  # share of the steps in which it was the slowest
    since: int = 0  # step from which on that holds
    cause: Literal["data", "compute"] = "compute"  # what it takes longer for


def find_straggler(reading: Reading, plan: Plan | None) -> Straggler | None:
    """The rank that is slowest nearly always, and its median lateness; steps in which another rank was slowest count
    against it."""
    spreads = _spreads(reading)
    if len(spreads) < MIN_SPREAD_STEPS:
        return None
    rank, times = Counter(rank for rank, _ in spreads).most_common(1)[0]
    lateness = [seconds if slowest == rank else -seconds for slowest, seconds in spreads]
    often, net = times / len(spreads), median(lateness)
    error = MEDIAN_ERROR * median(abs(seconds - net) for seconds in lateness) / sqrt(len(lateness))
    if often < SAME_SLOWEST_RANK_SHARE or net <= STRAGGLER_STANDARD_ERRORS * error or not _lasts(lateness, net):
        return None
    seconds = net - _given_more(reading, plan, rank)
    if seconds <= 0:
        return None
    since, cause = _since(reading, rank), _cause(reading, rank, seconds)
    return Straggler(rank=rank, seconds=seconds, often=often, since=since, cause=cause)


def recent_straggler(reading: Reading, plan: Plan | None) -> Straggler | None:
    """The straggler of the longest last part of the run that has one: all, a half, a quarter."""
    for parts in (1, 2, 4):
        steps = reading.steps[len(reading.steps) - len(reading.steps) // parts :]
        if (slow := find_straggler(replace(reading, steps=steps), plan)) is not None:
            return replace(slow, since=_since(reading, slow.rank))
    return None


def _since(reading: Reading, rank: int) -> int:
    """The step from which on the rank was the slowest: where the steps in which it was outweigh, twice, those in which
    it was not, by most."""
    known = [record for record in reading.steps if "slowest_rank" in record]
    score, best, first = 0, 0, 0
    for record in reversed(known):
        score += 1 if int(record["slowest_rank"]) == rank else -2
        if score > best:
            best, first = score, int(record["step"])
    return first


def _cause(reading: Reading, rank: int, seconds: float) -> Literal["data", "compute"]:
    """Whether most of its lateness is a wait for its batch."""
    waits = [
        float(record.get("slowest_rank_data_s", 0.0))
        for record in reading.steps
        if int(record.get("slowest_rank", -1)) == rank
    ]
    return "data" if waits and median(waits) > seconds / 2 else "compute"


def _spreads(reading: Reading) -> list[tuple[int, float]]:
    """(slowest rank, seconds by which it was later than the fastest) of every step that has both."""
    return [
        (int(record["slowest_rank"]), float(record["rank_spread_s"]))
        for record in reading.steps
        if "rank_spread_s" in record and "slowest_rank" in record
    ]


def waited_for_others(reading: Reading) -> float:
    """Seconds per step that the main rank waited because any other rank was late; no collective takes that long, and no
    layout makes it shorter."""
    return winsorised_mean([seconds if slowest != 0 else 0.0 for slowest, seconds in _spreads(reading)])


def _lasts(lateness: list[float], net: float) -> bool:
    """Whether the rank was late in every part of the run."""
    ends = [part * len(lateness) // STRAGGLER_RUN_PARTS for part in range(STRAGGLER_RUN_PARTS + 1)]
    return all(median(lateness[begin:end]) >= STRAGGLER_PART_SHARE * net for begin, end in pairwise(ends))


def _given_more(reading: Reading, plan: Plan | None, rank: int) -> float:
    """Seconds that a rank's pipeline stage should take longer than the median stage, by FLOPs relative to the first
    stage, whose work the main rank has measured."""
    parts = parts_of(reading)
    if plan is None or plan.train is None or parts is None or plan.layout.pp == 1:
        return 0.0
    flops = stage_flops(plan)
    usual = sorted(flops)[(len(flops) - 1) // 2]
    stage = min(rank // (plan.layout.num_devices // plan.layout.pp), len(flops) - 1)
    return parts.work * max(0.0, flops[stage] - usual) / flops[0] if flops[0] else 0.0


def stage_flops(plan: Plan) -> list[float]:
    """FLOPs per token of each pipeline stage."""
    assert plan.train is not None
    layout, sequence = plan.layout, plan.train.sequence
    spans = split(plan.model, layout.pp, layout.interleave, sequence=sequence)
    first, *layers, head = (place.flops for place in places(plan.model, sequence))
    chunks = [sum(layers[i] for i in span.layers) + first * span.first + head * span.last for span in spans]
    return [sum(chunks[span.index] for span in chunks_of(spans, stage, layout.pp)) for stage in range(layout.pp)]
