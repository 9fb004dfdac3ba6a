"""Which layers a pipeline stage holds: chunks that take equally long, and among these the ones that need least memory.

A chunk's time is its FLOPs a token: a layer's products and attention, and at the end the output projection, which may
outweigh several layers. Its memory is its weights: at the beginning those of the embedding count too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import inf

from armillary.spec.mfu import attention_flops_per_token
from armillary.spec.model import ModelConfig
from armillary.spec.params import layer_parameters, parameters

_EQUAL = 1.05
"""chunks that differ by less than this are taken to be as good, so memory decides"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """What one chunk of a model holds."""

    index: int
    """of the chunk, from 0"""
    layers: range
    """its layers; none where the embedding or the head is a chunk of its own"""
    first: bool
    """it has the embedding"""
    last: bool
    """it has the last norm and the head"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A layer, or one of the ends, as something to be shared out."""

    flops: float
    """a token, forward and backward"""
    weights: float
    """parameters"""


def places(config: ModelConfig, sequence: int) -> list[Place]:
    """Embedding, layers, head."""
    whole = parameters(config)
    attention = {
        kind: 3 * attention_flops_per_token(replace(config, layers=(kind,)), sequence) for kind in set(config.layers)
    }
    found = [layer_parameters(config, i) for i in range(config.num_layers)]
    table = config.vocab * config.hidden
    layers = [
        Place(flops=6 * layer.multiplied + attention[kind], weights=layer.total)
        for layer, kind in zip(found, config.layers, strict=True)
    ]
    return [Place(flops=0.0, weights=table + whole.positions), *layers, Place(flops=6 * table, weights=table)]


def split(config: ModelConfig, num_chunks: int, *, sequence: int) -> tuple[Span, ...]:
    """The chunks of a model, in order; every layer is in one of them."""
    cuts = _cuts(tuple(places(config, sequence)), num_chunks)
    ends = [(0, *cuts)[i : i + 2] for i in range(num_chunks)]
    return tuple(
        Span(
            index=i, first=start == 0, last=stop == config.num_layers + 2,
            layers=range(max(start - 1, 0), min(stop - 1, config.num_layers)),
        )
        for i, (start, stop) in enumerate(ends)
    )  # fmt: skip


def chunks_of(spans: tuple[Span, ...], stage: int, num_stages: int) -> tuple[Span, ...]:
    """Those of a stage: chunks are dealt out in turn, as interleaved schedules want them."""
    return spans[stage::num_stages]


@cache
def _cuts(found: tuple[Place, ...], num_chunks: int) -> tuple[int, ...]:
    """Where chunks end; each has a place at least."""
    longest = _best(found, num_chunks, inf, by_time=True)[0][0]
    return _best(found, num_chunks, longest * _EQUAL, by_time=False)[1]


def _best(
    found: tuple[Place, ...], num_chunks: int, limit: float, *, by_time: bool
) -> tuple[tuple[float, float], tuple[int, ...]]:
    """((largest cost of a chunk, Σ of the squares of times), ends) of the best cut in which no chunk takes longer than
    `limit`: for each number of chunks, over the places from the first on."""
    size = len(found)
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for number in range(1, num_chunks + 1):
        more: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for start, ((cost, squares), ends) in best.items():
            time = weights = 0.0
            for stop in range(start + 1, size - (num_chunks - number) + 1):
                time, weights = time + found[stop - 1].flops, weights + found[stop - 1].weights
                if time > limit:
                    break
                key = (max(cost, time if by_time else weights), squares + time * time)
                if stop not in more or key < more[stop][0]:
                    more[stop] = (key, (*ends, stop))
        best = more
    return best[size]
