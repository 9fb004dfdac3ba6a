"""The requests of a recipe's [traffic] and [load] as arrivals, the same as `armillary load` would send.

Mooncake's traces name the blocks of each prompt; equal names are equal text. So a request shares a prefix with the
last request that had the same first blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from armillary.errors import BadInput
from armillary.planning.simulation.replayed_requests import Arrival
from armillary.serving.load.record import PlannedRequest
from armillary.serving.load.schedule import planned_requests
from armillary.serving.load.trace import BLOCK_TOKENS
from armillary.spec.tables.traffic import Load, Traffic


def arrivals_of(traffic: Traffic, load: Load) -> tuple[Arrival, ...]:
    """All requests by time, warm-up included, numbered from 1."""
    if load.concurrency is not None:
        raise BadInput("a simulation sends requests at their times; leave load.concurrency out, or use armillary load")
    rows = planned_requests(traffic, load, seed=traffic.seed)
    arrivals = _from_blocks(rows) if any(row.blocks for row in rows) else _with_prefixes(rows, traffic, load)
    return tuple(replace(each, temperature=load.temperature) for each in arrivals)


def has_shared_prefixes(arrivals: Sequence[Arrival]) -> bool:
    """Whether a prefix cache can make a difference."""
    return any(arrival.shared_prefix for arrival in arrivals)


def _with_prefixes(rows: Sequence[PlannedRequest], traffic: Traffic, load: Load) -> tuple[Arrival, ...]:
    """Each prompt begins with one of load.prefixes texts of traffic.shared_prefix tokens; a trace has none of its
    own."""
    shared = 0 if load.trace else traffic.shared_prefix
    rng, first = Random(f"prefixes {traffic.seed}"), dict[int, int]()
    arrivals = []
    for number, row in enumerate(rows, start=1):
        if row.is_long:
            arrivals.append(_arrival(number, row, 0, 0))
            continue
        source = first.setdefault(rng.randrange(load.prefixes), number) if shared else number
        own = source == number or not shared
        arrivals.append(_arrival(number, row, 0 if own else min(shared, row.tokens_in), 0 if own else source))
    return tuple(arrivals)


def _from_blocks(rows: Sequence[PlannedRequest]) -> tuple[Arrival, ...]:
    last: dict[int, int] = {}  # block -> the request that had it last
    arrivals = []
    for number, row in enumerate(rows, start=1):
        known = next((i for i, block in enumerate(row.blocks) if block not in last), len(row.blocks))
        source = last[row.blocks[known - 1]] if known else 0
        arrivals.append(_arrival(number, row, min(known * BLOCK_TOKENS, row.tokens_in), source))
        last |= dict.fromkeys(row.blocks, number)
    return tuple(arrivals)


def _arrival(number: int, row: PlannedRequest, shared: int, source: int) -> Arrival:
    assert row.at_s is not None, "an open loop has times"
    return Arrival(
        number=number,
        at_s=row.at_s,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        limit=row.tokens_out,
        shared_prefix=shared,
        prefix_source=source,
        is_long=row.is_long,
    )
