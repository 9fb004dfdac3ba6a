"""Disaggregated serving: separate pools for prefill and decode, against replicas that do both.

Prompts then never lengthen the inter-token latency, and each pool has its own layout; the price is one transfer of the
KV cache per request (DistServe, arXiv 2401.09670; Splitwise, arXiv 2311.18677):

    TTFT = wait + prefill + transfer + one decode step
    transfer = KV bytes of the prompt per device / (bandwidth of its link · share)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from armillary.errors import BadInput
from armillary.planning.device_model.network import link_speed
from armillary.planning.serving.capacity import Capacity, capacity
from armillary.planning.serving.queueing import Server
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import sequence_bytes
from armillary.spec.tables.traffic import Objective
from armillary.units import seconds_text

_SAME = 0.1
"""difference of two latencies that says nothing"""


@dataclass(frozen=True, kw_only=True)
class Pools:
    """A pool for prompts and a pool for tokens; `transfer_s` moves a prompt's KV cache between them."""

    prefill: Capacity
    decode: Capacity
    transfer_s: float
    """of the prompts that are most of the requests"""
    transfer_p99_s: float
    """of the longest prompts that more than 1 % of the requests have"""

    @property
    def devices(self) -> int:
        return self.prefill.devices + self.decode.devices

    def predicted(self) -> dict[str, float]:
        """Gauge -> value, of both pools together."""
        first, rest = self.prefill.actual, self.decode.actual
        ttft = {
            "ttft_p50_s": first.ttft_p50_s + self.transfer_s + rest.step_s,
            "ttft_p99_s": first.ttft_p99_s + self.transfer_p99_s + rest.step_s,
        }
        steps = self.decode.server.later_tokens
        return (
            self.decode.predicted()
            | ttft
            | {
                "prefill_s": self.prefill.server.alone_s,
                "e2e_p50_s": ttft["ttft_p50_s"] + steps * rest.step_s,
                "e2e_p99_s": ttft["ttft_p99_s"] + steps * rest.tpot_p99_s,
                "replicas": float(self.prefill.replicas + self.decode.replicas),
                "devices": float(self.devices),
            }
        )

    def verdict(self, colocated: Capacity) -> str:
        """Whether pools pay off beside replicas that do both."""
        devices = self.devices - colocated.devices
        ours, theirs = self.predicted(), colocated.predicted()
        change = f"{abs(devices)} device{'s' if abs(devices) > 1 else ''} {'more' if devices > 0 else 'fewer'}"
        return verdict(-devices, change if devices else "as many devices", ours, theirs)


def verdict(gain: float, change: str, disaggregated: Mapping[str, float], colocated: Mapping[str, float]) -> str:
    """'pays off: 2 devices fewer, ITL p99 5 ms instead of 9 ms, …'; without a gain or loss, where the ITL or the TTFT
    is lower and the other one is not higher."""
    compared = [
        (name, disaggregated[key], colocated[key])
        for name, key in (("ITL", "itl_p99_s"), ("TTFT", "ttft_p99_s"))
        if key in disaggregated and key in colocated  # of completions of a single token there is no ITL
    ]
    lower = [ours < (1 - _SAME) * theirs for _, ours, theirs in compared]
    higher = [ours > (1 + _SAME) * theirs for _, ours, theirs in compared]
    head = "pays off"
    if gain < 0 or (not gain and not any(lower)):
        head = "does not pay off"
    elif not gain and any(higher):
        head = "a trade"
    times = (f"{name} p99 {seconds_text(ours)} instead of {seconds_text(theirs)}" for name, ours, theirs in compared)
    return f"{head}: {', '.join([change, *times])}"


def split_pools(prefill: Server, decode: Server, objective: Objective | None = None) -> Pools:
    """Replicas of each pool for the traffic; both servers must have the same traffic."""
    assert prefill.traffic == decode.traffic, "both pools serve the same requests"
    objective = objective or Objective()
    moved = [(share, transfer_s(prefill.replica, each.traffic.tokens_in)) for share, each in prefill.streams]
    longest_s = max(seconds for share, seconds in moved if share > 0.01)
    tokens = capacity(replace(decode, prefills=False), replace(objective, ttft_p99_s=None))
    first = capacity(replace(prefill, decodes=False), _for_prompts(objective, longest_s + tokens.actual.step_s))
    return Pools(prefill=first, decode=tokens, transfer_s=max(moved)[1], transfer_p99_s=longest_s)


def _for_prompts(objective: Objective, taken_s: float) -> Objective:
    """What is left of the time to first token once the cache has moved and the first step has run."""
    if objective.ttft_p99_s is None:
        return Objective()
    left = objective.ttft_p99_s - taken_s
    if left <= 0:
        raise BadInput(
            f"ttft_p99_s={seconds_text(objective.ttft_p99_s)} leaves no time for a prompt: moving its cache "
            f"takes {seconds_text(taken_s)}; serve prompts and tokens together"
        )
    return Objective(ttft_p99_s=left)


def transfer_s(replica: Replica, tokens: int) -> float:
    """Moving the KV cache of a prompt between replicas: every device sends its part over its link outwards."""
    speed, _ = link_speed(replica.cluster.tiers[-1] if replica.cluster.tiers else None)
    return sequence_bytes(replica, tokens) / (speed * replica.rates.link)
