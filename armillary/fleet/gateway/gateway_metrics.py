"""What a gateway counts, for Prometheus and for its own pages."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from armillary.fleet.gateway.model_routers import Models
from armillary.fleet.gateway.response_cache import ResponseCache
from armillary.fleet.gateway.token_usage import TokenUsage
from armillary.spec.gauges import GAUGES, SLO_LIMITS

_BOUNDS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class GatewayMetrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.slo_limits: dict[str, float] = {}  # gauge -> most that its SLO allows
        self.requests: Counter[tuple[str, int]] = Counter()  # model, status
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # key, model, kind
        self.usd: dict[tuple[str, str], float] = {}  # key, model
        self.retries = 0
        self._overhead = [0] * (len(_BOUNDS_S) + 1)
        self._overhead_s = 0.0

    def added(self, seconds: float) -> None:
        """Time from the arrival of a request until it was sent to a replica."""
        self._overhead[bisect_left(_BOUNDS_S, seconds)] += 1
        self._overhead_s += seconds

    def used(self, client: str, model: str, usage: TokenUsage, usd: float) -> None:
        """Tokens and dollars of a response."""
        self.tokens[client, model, "prompt"] += usage.prompt
        self.tokens[client, model, "completion"] += usage.completion
        self.usd[client, model] = self.usd.get((client, model), 0.0) + usd

    def page(self, models: Models, cache: ResponseCache) -> bytes:
        """The page of /metrics."""
        return ("\n".join([*self._lines(models), *_cache_lines(cache)]) + "\n").encode()

    def _lines(self, models: Models) -> Iterator[str]:
        yield from _family("gateway_in_flight", "gauge", "requests in flight")
        yield f"armillary_gateway_in_flight {self.in_flight}"
        yield from _family("gateway_requests_total", "counter", "responses by model and status")
        for (model, status), count in sorted(self.requests.items()):
            yield f'armillary_gateway_requests_total{{model="{_text(model)}",status="{status}"}} {count}'
        yield from _family("gateway_tokens_total", "counter", "tokens by key, model and kind")
        for (key, model, kind), count in sorted(self.tokens.items()):
            yield f'armillary_gateway_tokens_total{{key="{_text(key)}",model="{_text(model)}",kind="{kind}"}} {count}'
        yield from _family("gateway_usd_total", "counter", "dollars by key and model, at the configured prices")
        for (key, model), usd in sorted(self.usd.items()):
            yield f'armillary_gateway_usd_total{{key="{_text(key)}",model="{_text(model)}"}} {usd:.9g}'
        yield from _family("gateway_retries_total", "counter", "attempts beyond the first")
        yield f"armillary_gateway_retries_total {self.retries}"
        yield from _queue_lines(models)
        yield from _guard_lines(models, self.slo_limits)
        yield from self._histogram()
        yield from self._replicas(models)

    def _histogram(self) -> Iterator[str]:
        name = "armillary_gateway_added_seconds"
        yield from _family("gateway_added_seconds", "histogram", "from the arrival of a request until it is sent on")
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._overhead, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._overhead_s:.6f}"
        yield f"{name}_count {total}"

    def _replicas(self, models: Models) -> Iterator[str]:
        kinds = ("replica_in_flight", "replica_up", "replica_requests_total", "replica_failures_total")
        for kind in kinds:
            yield from _family(
                f"gateway_{kind}", "counter" if kind.endswith("total") else "gauge", kind.replace("_", " ")
            )
            for model, replica in models.replicas():
                values = {
                    "replica_in_flight": replica.in_flight,
                    "replica_up": int(replica.up),
                    "replica_requests_total": replica.requests,
                    "replica_failures_total": replica.failures,
                }
                labels = f'model="{_text(model.name)}",url="{_text(replica.link.settings.url)}"'
                yield f"armillary_gateway_{kind}{{{labels}}} {values[kind]}"


def _queue_lines(models: Models) -> Iterator[str]:
    yield from _family("gateway_waiting", "gauge", "requests that wait for a slot of their model")
    for model, queue in models.queues().items():
        yield f'armillary_gateway_waiting{{model="{_text(model)}"}} {queue.num_waiting}'
    yield from _family("gateway_queue_refused_total", "counter", "requests that got no slot")
    for model, queue in models.queues().items():
        yield f'armillary_gateway_queue_refused_total{{model="{_text(model)}"}} {queue.refused}'


def _guard_lines(models: Models, limits: Mapping[str, float]) -> Iterator[str]:
    """Verdicts of guards, and safety SLOs: each gauge of the worst model beside its limit."""
    guards = models.all_guards()
    yield from _family("gateway_guard_verdicts_total", "counter", "texts that guards masked or blocked")
    for model, each in guards.items():
        for (guard, stage, verdict), count in sorted(each.verdicts.items()):
            labels = f'model="{_text(model)}",guard="{_text(guard)}",stage="{stage}",verdict="{verdict}"'
            yield f"armillary_gateway_guard_verdicts_total{{{labels}}} {count}"
    values = [each.slos() for each in guards.values()]
    for name, limit in limits.items() if guards else ():
        limit_name = SLO_LIMITS[name]
        yield from _family(name, "gauge", GAUGES[name].meaning)
        yield f"armillary_{name} {max((each.get(name, 0.0) for each in values), default=0.0):.6g}"
        yield from _family(limit_name, "gauge", GAUGES[limit_name].meaning)
        yield f"armillary_{limit_name} {limit:g}"


def _cache_lines(cache: ResponseCache) -> Iterator[str]:
    yield from _family("gateway_cache_bytes", "gauge", "bytes of kept responses")
    yield f"armillary_gateway_cache_bytes {cache.bytes}"
    yield from _family("gateway_cache_requests_total", "counter", "requests that could be answered by a kept response")
    yield f'armillary_gateway_cache_requests_total{{result="hit"}} {cache.hits}'
    yield f'armillary_gateway_cache_requests_total{{result="miss"}} {cache.misses}'


def _family(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP armillary_{name} {meaning}"
    yield f"# TYPE armillary_{name} {kind}"


def _text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
