"""Requests to simulate: arrival time, lengths and shared prefix of each, recorded or random.

A recorded request says which earlier request shares a prefix with it and how many tokens. So prompts with the same
shared prefixes can be generated without storing any text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from armillary.engine.request.sampling_params import SamplingParams
from armillary.spec.tables.traffic import Traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request, numbered from 1."""

    number: int
    at_s: float
    tokens_in: int
    tokens_out: int
    """output tokens of each completion, the end token included"""
    limit: int
    shared_prefix: int = 0
    """prompt tokens shared with the earlier request `prefix_source`"""
    prefix_source: int = 0
    answers: int = 1
    temperature: float = 0.0
    is_long: bool = False
    """of the traffic's second stream"""

    @property
    def params(self) -> SamplingParams:
        """As its request has them."""
        return _params(self.limit, self.answers, self.temperature)


@lru_cache(maxsize=4096)
def _params(limit: int, answers: int, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=limit, n=answers, temperature=temperature)


def recorded(requests: Sequence[Mapping[str, Any]]) -> tuple[Arrival, ...]:
    """The requests of gauges.jsonl by arrival, the first at 0; those without an output token are left out."""
    known = [
        record
        for record in requests
        if record.get("tokens_out") and "arrived_s" in record and "request_number" in record
    ]
    by_number: dict[int, list[Mapping[str, Any]]] = {}
    for record in sorted(known, key=lambda record: float(record["arrived_s"])):
        number, siblings = int(record["request_number"]), by_number.get(int(record["request_number"]))
        if siblings and siblings[0]["arrived_s"] != record["arrived_s"]:
            by_number.clear()  # the engine was restarted, and counts from 1
        by_number.setdefault(number, []).append(record)
    begin = min((float(many[0]["arrived_s"]) for many in by_number.values()), default=0.0)
    arrivals = [_arrival(number, many, begin) for number, many in by_number.items()]
    return tuple(sorted(arrivals, key=lambda record: (record.at_s, record.number)))


def _arrival(number: int, many: Sequence[Mapping[str, Any]], begin: float) -> Arrival:
    first = max(
        many, key=lambda record: record.get("repeated_tokens", 0)
    )  # one of several completions has the shared prefix
    out = max(1, round(sum(record["tokens_out"] for record in many) / len(many)))
    return Arrival(
        number=number,
        at_s=float(first["arrived_s"]) - begin,
        tokens_in=int(first["tokens_in"]),
        tokens_out=out,
        limit=max(out, int(first.get("tokens_limit", out))),
        shared_prefix=int(first.get("repeated_tokens", 0)),
        prefix_source=int(first.get("prefix_source_request", 0)),
        answers=len(many),
        temperature=float(first.get("temperature", 0.0)),
    )


def drawn(traffic: Traffic, count: int | None = None) -> tuple[Arrival, ...]:
    """Random requests of a [traffic] table: lengths vary from 0.5 to 1.5 times the mean, in the first stream."""
    rng, now, arrivals = Random(f"arrivals {traffic.seed}"), 0.0, []
    total = max(1, round(traffic.total_per_s * traffic.duration_s)) if count is None else count
    first, long_share = 0, traffic.long_requests_per_s / traffic.total_per_s
    for number in range(1, total + 1):
        is_long = long_share > 0 and rng.random() < long_share
        tokens_in = max(1, traffic.shared_prefix + 1, round(traffic.tokens_in * rng.uniform(0.5, 1.5)))
        out = max(1, round(traffic.tokens_out * rng.uniform(0.5, 1.5)))
        if is_long:
            tokens_in, out = traffic.long_tokens_in, traffic.long_tokens_out
        elif not first:
            first = number
        shared = traffic.shared_prefix if number > first and not is_long else 0
        arrivals.append(
            Arrival(
                number=number,
                at_s=now,
                tokens_in=tokens_in,
                tokens_out=out,
                limit=out,
                shared_prefix=shared,
                prefix_source=first if shared else 0,
                is_long=is_long,
            )
        )
        now += _gap(traffic, rng)
    return tuple(arrivals)


def _gap(traffic: Traffic, rng: Random) -> float:
    mean = 1 / traffic.total_per_s
    if traffic.arrival == "constant":
        return mean
    if traffic.arrival == "poisson":
        return rng.expovariate(1 / mean)
    square = traffic.burstiness**2
    return rng.gammavariate(1 / square, square * mean)


class Prompts:
    """Generated prompts: each token is the number of the request that had it first."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._known = {arrival.number: arrival for arrival in arrivals}
        self._made: dict[int, list[int]] = {}
        self._last_use = {arrival.prefix_source: arrival.number for arrival in arrivals}
        """request whose prefix is repeated -> the last one that repeats it"""

    def of(self, arrival: Arrival) -> list[int]:
        """The prompt of a request."""
        prompt = self._made.get(arrival.number)
        if prompt is None:
            shared = min(arrival.shared_prefix, arrival.tokens_in) if arrival.prefix_source != arrival.number else 0
            prompt = [*self._text(arrival.prefix_source, shared), *[arrival.number] * (arrival.tokens_in - shared)]
            if arrival.number in self._last_use:  # a long trace's prompts do not fit memory together
                self._made[arrival.number] = prompt
            if self._last_use.get(arrival.prefix_source) == arrival.number:
                self._made.pop(arrival.prefix_source, None)
        return prompt

    def _text(self, number: int, tokens: int) -> list[int]:
        """The first tokens of a request's prompt and output; of a request that was not recorded, its own number."""
        if not tokens:
            return []
        known = self._known.get(number)
        text = self.of(known) if known is not None else []
        return text[:tokens] + [number] * (tokens - len(text))
