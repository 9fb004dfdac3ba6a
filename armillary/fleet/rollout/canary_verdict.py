"""The verdict on canaries: promote, roll back, or wait. Time and counts are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Literal

from armillary.fleet.rollout.rollout_record import Rollout
from armillary.fleet.rollout.sequential_test import decide, is_enough, judge_failures, latency_ratio
from armillary.stats import LogMoments

Verdict = Literal["wait", "promote", "roll back"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Requests of a group of replicas since the canaries began."""

    requests: int = 0
    failures: int = 0
    ttft: LogMoments = field(default_factory=LogMoments)
    tpot: LogMoments = field(default_factory=LogMoments)

    @property
    def outcomes(self) -> tuple[int, int]:
        return self.failures, self.requests

    @property
    def error_fraction(self) -> float:
        return self.failures / self.requests if self.requests else 0.0


def verdict_on(
    rollout: Rollout, canary: Counts, stable: Counts, now: float, *, switched: bool = False
) -> tuple[Verdict, str]:
    """The verdict and its reason: roll back as soon as one test says worse, promote once all say as good. Where
    blue/green has `switched`, the others get no more requests: latencies of which they have too few are left out."""
    usual = stable.error_fraction
    errors = judge_failures(canary.outcomes, stable.outcomes, rollout.max_error_fraction)
    if errors == "worse":
        return "roll back", f"{canary.failures} of its {canary.requests} requests failed, {usual:.2%} of the others'"
    undecided, unknown = [] if errors == "as good" else ["errors"], ""
    for name, ours, theirs in (("TTFT", canary.ttft, stable.ttft), ("TPOT", canary.tpot, stable.tpot)):
        result = decide(latency_ratio(ours, theirs, rollout.max_slowdown))
        if result == "worse":
            return "roll back", f"its {name} is {exp(ours.mean - theirs.mean):.2f} × that of the others"
        if result == "undecided" and ours.count and theirs.count:  # without streams there is no TPOT
            if switched and not is_enough(theirs, rollout.max_slowdown):
                unknown = f"; its latencies were not compared, as the old release has only {theirs.count} of them"
            else:
                undecided.append(name)
    if not undecided and canary.requests >= rollout.min_requests:
        compared = " or longer latencies" if not unknown else ""
        return "promote", f"{canary.requests} requests without more errors{compared}{unknown}"
    if now - rollout.began > rollout.timeout_s:
        open_ = f", {' and '.join(undecided)} undecided" if undecided else ""
        return "roll back", f"{canary.requests} requests in {rollout.timeout_s:g} s{open_}"
    waits = f"{' and '.join(undecided)} undecided" if undecided else f"at least {rollout.min_requests} are wanted"
    return "wait", f"{canary.requests} requests, {waits}"
