"""Requests to be played again: when each came, how long it was and whose beginning it repeats, recorded or drawn.

A recorded request says which earlier text its prompt began like and for how many tokens; so prompts can be made anew
that share exactly as much with each other, without anybody's text being kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from armillary.spec.tables.serve import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request as it came."""

    number: int
    """which one it was; above 0"""
    at_s: float
    """when it came"""
    tokens_in: int
    """of its prompt"""
    tokens_out: int
    """of each answer, the end token included"""
    limit: int
    """tokens that an answer might have had"""
    repeated: int = 0
    """prompt tokens that the text of an earlier request began with too"""
    repeats: int = 0
    """number of that one"""
    answers: int = 1
    """to the same prompt"""


def recorded(requests: Sequence[Mapping[str, Any]]) -> tuple[Arrival, ...]:
    """The requests of gauges.jsonl in the order they came, the first at 0; those that got no token are left out."""
    known = [
        record
        for record in requests
        if record.get("tokens_out") and "arrived_s" in record and "request_number" in record
    ]
    by_number: dict[int, list[Mapping[str, Any]]] = {}
    for record in sorted(known, key=lambda record: float(record["arrived_s"])):
        number, siblings = int(record["request_number"]), by_number.get(int(record["request_number"]))
        if siblings and siblings[0]["arrived_s"] != record["arrived_s"]:
            by_number.clear()  # the engine was started again, and counts anew
        by_number.setdefault(number, []).append(record)
    begin = min((float(many[0]["arrived_s"]) for many in by_number.values()), default=0.0)
    arrivals = [_arrival(number, many, begin) for number, many in by_number.items()]
    return tuple(sorted(arrivals, key=lambda record: (record.at_s, record.number)))


def _arrival(number: int, many: Sequence[Mapping[str, Any]], begin: float) -> Arrival:
    first = max(
        many, key=lambda record: record.get("repeated_tokens", 0)
    )  # of several answers record knows what it repeats
    out = max(1, round(sum(record["tokens_out"] for record in many) / len(many)))
    return Arrival(
        number=number,
        at_s=float(first["arrived_s"]) - begin,
        tokens_in=int(first["tokens_in"]),
        tokens_out=out,
        limit=max(out, int(first.get("tokens_limit", out))),
        repeated=int(first.get("repeated_tokens", 0)),
        repeats=int(first.get("prefix_source_request", 0)),
        answers=len(many),
    )


def drawn(traffic: Traffic, count: int | None = None) -> tuple[Arrival, ...]:
    """Requests of a [traffic] table: lengths vary between half and one and a half times the mean."""
    rng, now, arrivals = Random(f"arrivals {traffic.seed}"), 0.0, []
    total = max(1, round(traffic.requests_per_s * traffic.duration_s)) if count is None else count
    for number in range(1, total + 1):
        tokens_in = max(1, traffic.shared_prefix + 1, round(traffic.tokens_in * rng.uniform(0.5, 1.5)))
        out = max(1, round(traffic.tokens_out * rng.uniform(0.5, 1.5)))
        shared = traffic.shared_prefix if number > 1 else 0
        arrivals.append(
            Arrival(
                number=number,
                at_s=now,
                tokens_in=tokens_in,
                tokens_out=out,
                limit=out,
                repeated=shared,
                repeats=1 if shared else 0,
            )
        )
        now += _gap(traffic, rng)
    return tuple(arrivals)


def _gap(traffic: Traffic, rng: Random) -> float:
    mean = 1 / traffic.requests_per_s
    if traffic.arrival == "constant":
        return mean
    if traffic.arrival == "poisson":
        return rng.expovariate(1 / mean)
    square = traffic.burstiness**2
    return rng.gammavariate(1 / square, square * mean)


class Prompts:
    """Tokens of recorded requests: the number of whoever was the first to say them."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._known = {arrival.number: arrival for arrival in arrivals}
        self._made: dict[int, list[int]] = {}

    def of(self, arrival: Arrival) -> list[int]:
        """The prompt of a request."""
        prompt = self._made.get(arrival.number)
        if prompt is None:
            shared = min(arrival.repeated, arrival.tokens_in) if arrival.repeats != arrival.number else 0
            prompt = [*self._text(arrival.repeats, shared), *[arrival.number] * (arrival.tokens_in - shared)]
            self._made[arrival.number] = prompt
        return prompt

    def _text(self, number: int, tokens: int) -> list[int]:
        """The first tokens of a request's prompt and answer; of one that was not recorded, its own."""
        if not tokens:
            return []
        known = self._known.get(number)
        text = self.of(known) if known is not None else []
        return text[:tokens] + [number] * (tokens - len(text))
