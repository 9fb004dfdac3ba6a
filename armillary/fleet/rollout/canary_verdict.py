"""The verdict on canaries: promote, roll back, or wait. Time and counts are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from armillary.fleet.rollout.rollout_record import Rollout

Verdict = Literal["wait", "promote", "roll back"]
_SURE = 2.0
"""standard deviations of the error share beyond which it is no chance"""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Requests of a group of replicas since the canaries began."""

    requests: int = 0
    failures: int = 0
    ttft_p50_s: float | None = None
    itl_p50_s: float | None = None

    @property
    def error_fraction(self) -> float:
        return self.failures / self.requests if self.requests else 0.0


def verdict_on(rollout: Rollout, canary: Counts, stable: Counts, now: float) -> tuple[Verdict, str]:
    """The verdict and its reason. Errors end a canary as soon as they are no chance; latencies are compared once there
    are enough requests."""
    limit = rollout.max_error_fraction + stable.error_fraction
    deviation = sqrt(limit * (1 - min(1.0, limit)) / max(1, canary.requests))
    if canary.failures >= 3 and canary.error_fraction > limit + _SURE * deviation:
        return "roll back", f"{canary.error_fraction:.1%} of its {canary.requests} requests failed"
    if canary.requests < rollout.min_requests:
        if now - rollout.began > rollout.timeout_s:
            return "roll back", f"only {canary.requests} requests in {rollout.timeout_s:g} s"
        return "wait", f"{canary.requests} of {rollout.min_requests} requests"
    if canary.error_fraction > limit:
        return "roll back", f"{canary.error_fraction:.1%} of its {canary.requests} requests failed"
    for name, ours, theirs in (
        ("TTFT", canary.ttft_p50_s, stable.ttft_p50_s),
        ("ITL", canary.itl_p50_s, stable.itl_p50_s),
    ):
        if ours is not None and theirs and ours > rollout.max_slowdown * theirs:
            return "roll back", f"its {name} p50 is {ours / theirs:.2f} × that of the others"
    return "promote", f"{canary.requests} requests without more errors or longer latencies"
