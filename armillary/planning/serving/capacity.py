"""What a replica can bear, and how many of them a traffic needs to meet its objectives.

The highest rate is found by bisection on `load`: every time it gives grows with the rate. Devices follow from
replicas = ⌈rate / highest rate⌉, money from devices · price / tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, isfinite

from armillary.errors import BadInput
from armillary.planning.serving.queueing import Load, Server, load
from armillary.planning.serving.serving_memory import ServingMemory, concurrency, kv_capacity_tokens, serving_memory
from armillary.spec.tables.serve import Objective
from armillary.units import seconds_text

_HEADROOM = 1 - 1e-4
"""of the highest rate found: bisection ends just below it"""
_BISECTIONS = 40
LIMITS = {"ttft_p99_s": "ttft_p99_s", "itl_p99_s": "itl_p99_s", "tpot_p99_s": "tpot_p99_s", "e2e_p99_s": "e2e_p99_s"}
"""field of Objective -> field of Load"""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Replicas for a traffic, and what each request then sees."""

    server: Server
    """one replica and its requests"""
    memory: ServingMemory
    """of each device"""
    highest: Load
    """a replica at the highest rate that meets every objective"""
    replicas: int
    """copies needed for the traffic"""
    actual: Load
    """a replica at its share of the traffic"""

    @property
    def devices(self) -> int:
        return self.replicas * self.server.replica.split.num_devices

    def predicted(self) -> dict[str, float]:
        """Gauge -> value, of the whole deployment; times are of one request."""
        traffic, now, memory = self.server.traffic, self.actual, self.memory
        rate = traffic.requests_per_s
        lengths = traffic.tokens_in + traffic.tokens_out
        fits = concurrency(self.server.replica, memory, lengths, self.server.serve.block_tokens)
        used = now.running / fits if fits else 0.0
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
            "kv_used_fraction": min(1.0, used),
            "kv_capacity_tokens": float(kv_capacity_tokens(self.server.replica, memory)),
            "requests_per_s": rate,
            "tokens_in_per_s": rate * traffic.tokens_in,
            "tokens_out_per_s": rate * traffic.tokens_out,
            "replicas": float(self.replicas),
            "devices": float(self.devices),
            "memory_weights_bytes": memory.weights_bytes,
            "memory_kv_bytes": memory.room_bytes,
            "memory_other_bytes": memory.working_bytes,
            "memory_peak_bytes": memory.weights_bytes + memory.room_bytes + memory.working_bytes,
        }


def capacity(server: Server, objective: Objective | None = None) -> Capacity:
    """Replicas that the server's traffic needs; BadInput where even an idle replica misses an objective."""
    objective = objective or Objective()
    memory = serving_memory(server.replica, server.serve)
    highest = sustainable(server, objective)
    rate = server.traffic.requests_per_s
    replicas = max(1, ceil(rate / highest.requests_per_s))
    actual = load(server, rate / replicas)
    assert actual is not None, "a rate below the highest is borne"
    return Capacity(server=server, memory=memory, highest=highest, replicas=replicas, actual=actual)


def sustainable(server: Server, objective: Objective) -> Load:
    """The replica at the highest rate that meets `objective`, with nothing lost."""
    _refuse_hopeless(server, objective)
    low, high = 0.0, _above(server)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _meets(load(server, middle), objective) else (low, middle)
        if high - low <= (1 - _HEADROOM) * high:
            break
    found = load(server, low)
    if found is None or low == 0:
        raise BadInput(
            f"{server.replica.config.name} with {server.replica.split.text()} bears no steady traffic of "
            "these lengths; raise layout.tp or relax the objectives"
        )
    return found


def _above(server: Server) -> float:
    """A rate no replica bears: all of its time in prompts, or its largest batch at the quickest step."""
    steps = max(1, server.traffic.tokens_out - 1) * server.decode_s(1.0)
    by_decode = 2 * server.most_running / steps if server.decodes and steps > 0 else float("inf")
    by_prefill = 1 / server.prefill_s if server.prefill_s else float("inf")
    found = min(by_decode, by_prefill)
    assert isfinite(found), "a server that neither prefills nor decodes"
    return found


def _meets(found: Load | None, objective: Objective) -> bool:
    return found is not None and all(
        getattr(objective, name) is None or getattr(found, gauge) <= getattr(objective, name)
        for name, gauge in LIMITS.items()
    )


def _refuse_hopeless(server: Server, objective: Objective) -> None:
    """One sentence where a single request on an idle replica misses an objective already."""
    name = server.replica.config.name
    if server.most_running < 1:
        tokens = server.traffic.tokens_in + server.traffic.tokens_out
        raise BadInput(
            f"the KV cache of {name} with {server.replica.split.text()} holds no request of {tokens:,} "
            "tokens; raise layout.tp or shorten traffic.tokens_in"
        )
    idle = load(server, 1e-9)
    assert idle is not None, "an idle replica bears a request"
    for limit, gauge in LIMITS.items():
        wanted, least = getattr(objective, limit), getattr(idle, gauge)
        if wanted is not None and least > wanted:
            raise BadInput(
                f"{limit}={seconds_text(wanted)} cannot be met: {name} with {server.replica.split.text()} "
                f"needs {seconds_text(least)} for a single request; raise layout.tp or "
                f"--set objective.{limit}={least * 1.2:.2g}"
            )


def at_rate(server: Server, requests_per_s: float) -> Server:
    """The same server asked for another total rate."""
    return replace(server, traffic=replace(server.traffic, requests_per_s=requests_per_s))
