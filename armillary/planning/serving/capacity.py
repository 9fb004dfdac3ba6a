"""Capacity: the highest request rate of a replica, and the number of replicas that meet the objectives.

Bisection finds the highest rate: every latency grows with the rate. Devices follow from
replicas = ⌈rate / highest rate⌉, money from devices · price / tokens.
"""

from dataclasses import dataclass
from math import ceil, isfinite

from armillary.errors import BadInput
from armillary.planning.serving.generation import Generation, offline
from armillary.planning.serving.queueing import KV_HEADROOM, OperatingPoint, Server, most, operating_point
from armillary.planning.serving.serving_memory import ServingMemory, concurrency, kv_capacity_tokens, serving_memory
from armillary.spec.tables.traffic import Objective
from armillary.units import seconds_text

_HEADROOM = 1 - 1e-4
"""bisection ends this close below the highest rate"""
_BISECTIONS = 40
LIMITS = ("ttft_p99_s", "itl_p99_s", "tpot_p99_s", "e2e_p99_s")
"""fields of Objective and of OperatingPoint"""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Replicas for some traffic, and the latencies of its requests."""

    server: Server
    memory: ServingMemory
    highest: OperatingPoint
    """a replica at the highest rate of random arrivals that meets every objective, with rows to spare for bursts"""
    replicas: int
    actual: OperatingPoint
    """a replica at its share of the traffic"""

    @property
    def devices(self) -> int:
        return self.replicas * self.server.replica.split.num_devices

    @property
    def saturated(self) -> Generation:
        """A replica with all of its rows busy and more requests queued, whatever the objectives."""
        return saturated(self.server, self.server.most_running)

    @property
    def rows_limit(self) -> bool:
        """Whether the rows of a step, with those that bursts need, limit the highest rate."""
        return most(self.highest.running, KV_HEADROOM) > 0.97 * self.server.most_running

    def predicted(self) -> dict[str, float]:
        """Gauge -> value of the deployment; latencies are per request."""
        traffic, now, memory = self.server.traffic, self.actual, self.memory
        tokens = traffic.running_tokens_in + traffic.running_tokens_out
        fits = concurrency(self.server.replica, memory, tokens, self.server.serve.block_tokens)
        return {
            "ttft_p50_s": now.ttft_p50_s,
            "ttft_p99_s": now.ttft_p99_s,
            "itl_p50_s": now.itl_p50_s,
            "itl_p99_s": now.itl_p99_s,
            "tpot_p50_s": now.step_s,
            "tpot_p99_s": now.tpot_p99_s,
            "e2e_p50_s": now.e2e_p50_s,
            "e2e_p99_s": now.e2e_p99_s,
            "prefill_s": self.server.alone_s,
            "running": now.running,
            "concurrency": float(fits),
            "kv_used_fraction": min(1.0, now.running / fits) if fits else 0.0,
            "kv_capacity_tokens": float(kv_capacity_tokens(self.server.replica, memory)),
            "requests_per_s": traffic.total_per_s,
            "tokens_in_per_s": traffic.tokens_in_per_s,
            "tokens_out_per_s": traffic.tokens_out_per_s,
            "replicas": float(self.replicas),
            "devices": float(self.devices),
            "memory_weights_bytes": memory.weights_bytes,
            "memory_kv_bytes": memory.kv_bytes,
            "memory_other_bytes": memory.working_bytes,
            "memory_peak_bytes": memory.weights_bytes + memory.kv_bytes + memory.working_bytes,
        }


def capacity(server: Server, objective: Objective | None = None) -> Capacity:
    """Replicas that the server's traffic needs; BadInput where even an idle replica misses an objective."""
    objective = objective or Objective()
    highest = sustainable(server, objective)
    rate = server.traffic.total_per_s
    replicas = max(1, ceil(rate / highest.requests_per_s))
    actual = operating_point(server, rate / replicas)
    assert actual is not None, "a rate below the highest is sustainable"
    memory = serving_memory(server.replica, server.serve)
    return Capacity(server=server, memory=memory, highest=highest, replicas=replicas, actual=actual)


def saturated(server: Server, requests: int) -> Generation:
    """A replica that gets `requests` at once, without a limit of latencies: as many run as fit."""
    (tokens_in, tokens_out), budget = server.traffic.tokens_per_request, server.serve.max_tokens_per_step
    return offline(
        server.replica,
        requests,
        server.most_running,
        round(tokens_in),
        round(tokens_out),
        chunk=budget,
        cached=max(0, round(tokens_in) - server.prompt),
    )


def sustainable(server: Server, objective: Objective) -> OperatingPoint:
    """The replica at the highest rate that meets `objective`, with nothing lost."""
    _refuse_impossible(server, objective)
    low, high = 0.0, _above(server)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _meets(operating_point(server, middle), objective) else (low, middle)
        if high - low <= (1 - _HEADROOM) * high:
            break
    highest = operating_point(server, low)
    if highest is None or low == 0:
        raise BadInput(
            f"{server.replica.config.name} with {server.replica.split.text()} sustains no traffic of "
            "these lengths; raise layout.tp or relax the objectives"
        )
    return highest


def _above(server: Server) -> float:
    """A rate no replica sustains: all of its time in prompts, or its largest batch at the fastest step."""
    steps = max(1, server.traffic.tokens_per_request[1] - 1) * server.decode_s(1.0)
    by_decode = 2 * server.most_running / steps if server.decodes and steps > 0 else float("inf")
    by_prefill = 1 / server.prefill_s if server.prefill_s else float("inf")
    rate = min(by_decode, by_prefill)
    assert isfinite(rate), "a server that neither prefills nor decodes"
    return rate


def _meets(point: OperatingPoint | None, objective: Objective) -> bool:
    return point is not None and all(
        getattr(objective, name) is None or getattr(point, name) <= getattr(objective, name) for name in LIMITS
    )


def _refuse_impossible(server: Server, objective: Objective) -> None:
    """BadInput where a single request on an idle replica misses an objective."""
    name = server.replica.config.name
    if server.most_running < 1:
        tokens = server.traffic.running_tokens_in + server.traffic.running_tokens_out
        raise BadInput(
            f"the KV cache of {name} with {server.replica.split.text()} holds no request of {tokens:,} "
            "tokens; raise layout.tp or shorten traffic.tokens_in"
        )
    idle = operating_point(server, 1e-9)
    assert idle is not None, "an idle replica sustains a request"
    for limit in LIMITS:
        wanted, least = getattr(objective, limit), getattr(idle, limit)
        if wanted is not None and least > wanted:
            raise BadInput(
                f"{limit}={seconds_text(wanted)} cannot be met: {name} with {server.replica.split.text()} "
                f"needs {seconds_text(least)} for a single request; raise layout.tp or "
                f"--set objective.{limit}={least * 1.2:.2g}"
            )
