"""Layers per pipeline stage: chunks of equal time, and among these the split that needs the least memory.

The time of a chunk is its FLOPs per token: GEMMs and attention of layers, and at the end the output projection, which
may outweigh several layers. Its memory is its weights, at the beginning those of the embedding too. Training builds its
stages by this rule, and the planner prices them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf

from armillary.spec.arithmetic.mfu import attention_flops_per_token
from armillary.spec.arithmetic.params import layer_parameters, parameters
from armillary.spec.model import ModelConfig

_EQUAL = 1.05
"""chunks whose times differ by less are equally good, so memory decides"""
_HALVINGS = 50
"""bisections of the smallest possible maximum"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One chunk of a model; the first has the embedding, the last the final norm and the head. Its range of layers is
    empty where embedding or head is a chunk of its own."""

    index: int
    layers: range
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layer, the embedding or the head, as a unit of the split; FLOPs are per token, forward and backward."""

    flops: float
    weights: float


@cache
def places(config: ModelConfig, sequence: int) -> tuple[Place, ...]:
    """Embedding, layers, head."""
    table = config.vocab * config.hidden
    kinds = {}
    for kind in set(config.layers):
        layer = layer_parameters(config, config.layers.index(kind))
        attention = 3 * attention_flops_per_token(replace(config, layers=(kind,)), sequence)
        kinds[kind] = Place(flops=6 * layer.multiplied + attention, weights=layer.total)
    return (
        Place(flops=0.0, weights=table + parameters(config).positions),
        *(kinds[kind] for kind in config.layers),
        Place(flops=6 * table, weights=table),
    )


def split(config: ModelConfig, num_stages: int, interleave: int = 1, *, sequence: int) -> tuple[Span, ...]:
    """The chunks of a model, in order."""
    ends = pairwise((0, *_cuts(places(config, sequence), num_stages, interleave)))
    return tuple(
        Span(
            index=i,
            first=start == 0,
            last=stop == config.num_layers + 2,
            layers=range(max(start - 1, 0), min(stop - 1, config.num_layers)),
        )
        for i, (start, stop) in enumerate(ends)
    )


def chunks_of(spans: tuple[Span, ...], stage: int, num_stages: int) -> tuple[Span, ...]:
    """Chunks of a stage: they are assigned round-robin, as interleaved schedules need."""
    return spans[stage::num_stages]


def layers_by_stage(config: ModelConfig, num_stages: int, interleave: int, *, sequence: int) -> tuple[int, ...]:
    """Layers per stage, over all its chunks."""
    spans = split(config, num_stages, interleave, sequence=sequence)
    return tuple(sum(len(span.layers) for span in chunks_of(spans, i, num_stages)) for i in range(num_stages))


@cache
def _cuts(units: tuple[Place, ...], num_stages: int, interleave: int) -> tuple[int, ...]:
    """Where chunks end; each has at least one place."""
    flops, weights = _sums([place.flops for place in units]), _sums([place.weights for place in units])
    num_chunks = num_stages * interleave
    assert 1 <= num_chunks <= len(units), "layout_rules refuses more chunks than places"
    longest = _EQUAL * _least(flops, num_chunks, lambda limit: _Row(flops, weights, limit, inf))
    heaviest = _least(weights, num_chunks, lambda limit: _Row(flops, weights, longest, limit))
    ends = _Row(flops, weights, longest, heaviest).even(num_chunks)
    return ends if interleave == 1 else _Row(flops, weights, longest, inf).level(ends, num_stages)


def _sums(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _least(sums: list[float], num_chunks: int, row: Callable[[float], _Row]) -> float:
    """The smallest limit with which `num_chunks` chunks hold all places."""
    low, high = sums[-1] / num_chunks, sums[-1]
    if num_chunks == 1:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if row(middle).fits(num_chunks) else (middle, high)
    return high


class _Row:
    """Places in a row, with limits on the time and the weights of a chunk."""

    def __init__(self, flops: list[float], weights: list[float], longest: float, heaviest: float) -> None:
        self.flops, self.weights, self.longest, self.heaviest = flops, weights, longest, heaviest
        self.size = len(flops) - 1

    def reach(self, start: int) -> int:
        """The latest end of a chunk that begins at `start`."""
        end = bisect_right(self.flops, self.flops[start] + self.longest) - 1
        if self.heaviest == inf:
            return end
        return min(end, bisect_right(self.weights, self.weights[start] + self.heaviest) - 1)

    def fits(self, num_chunks: int) -> bool:
        """Whether the longest possible chunks suffice: fewer of them can always be split further."""
        flops, weights, at = self.flops, self.weights, 0
        for _ in range(num_chunks):  # `reach` written out: a search of layouts comes here ten thousand times
            before, at = at, bisect_right(flops, flops[at] + self.longest) - 1
            if self.heaviest != inf:
                at = min(at, bisect_right(weights, weights[before] + self.heaviest) - 1)
            if at in (self.size, before):
                break
        return at == self.size

    def even(self, num_chunks: int) -> tuple[int, ...]:
        """Ends of chunks: each as near to its share of the rest as both limits and the chunks behind it allow."""
        needs = [0] * (self.size + 1)
        for start in range(self.size - 1, -1, -1):
            needs[start] = 1 + needs[self.reach(start)] if self.reach(start) > start else self.size + 1
        at, ends = 0, []
        for left in range(num_chunks, 0, -1):
            share = self.flops[at] + (self.flops[-1] - self.flops[at]) / left
            stops = [
                stop for stop in range(at + 1, min(self.reach(at), self.size - left + 1) + 1) if needs[stop] < left
            ]
            at = min(stops, key=lambda stop: abs(self.flops[stop] - share))
            ends.append(at)
        return tuple(ends)

    def level(self, ends: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
        """Ends moved by single places, from a chunk of a longer stage to its neighbour of a shorter one, while that
        brings their times closer and leaves no chunk empty or too long."""
        bounds = [0, *ends]
        times = [self.flops[stop] - self.flops[start] for start, stop in pairwise(bounds)]
        stages = [sum(times[stage::num_stages]) for stage in range(num_stages)]
        for _ in range(self.size):
            before = list(bounds)
            for i in range(1, len(ends)):
                for step in (-1, +1):
                    self._shift(bounds, times, stages, i, step)
            if bounds == before:
                break
        return tuple(bounds[1:])

    def _shift(self, bounds: list[int], times: list[float], stages: list[float], i: int, step: int) -> None:
        """Move the end between chunks i - 1 and i one place back (the first gives) or on (the second gives)."""
        giver, taker = (i - 1, i) if step < 0 else (i, i - 1)
        place = bounds[i] - 1 if step < 0 else bounds[i]
        time = self.flops[place + 1] - self.flops[place]
        from_, to = giver % len(stages), taker % len(stages)
        empties = bounds[giver + 1] - bounds[giver] == 1
        if empties or not 0 < time < stages[from_] - stages[to] or times[taker] + time > self.longest:
            return
        bounds[i] += step
        times[giver], times[taker] = times[giver] - time, times[taker] + time
        stages[from_], stages[to] = stages[from_] - time, stages[to] + time
