"""Sequential tests: is a canary as good as the others, or worse by more than is tolerated? Asked after every request.

Wald's sequential probability ratio test (Annals of Mathematical Statistics 16, 1945): the log likelihood ratio of
"worse" to "as good" is compared with two bounds after each look. However often one looks, a good canary is called worse
with a probability of at most FALSE_ALARM / (1 - MISS), and a bad one as good with at most MISS / (1 - FALSE_ALARM).
A fixed limit that is looked at every second has no such bound. tests/fleet/rollout/test_sequential_test.py draws both
error rates by simulation.
"""

from __future__ import annotations

from math import log
from typing import Literal

from armillary.stats import LogMoments

Result = Literal["undecided", "as good", "worse"]
FALSE_ALARM = 0.01
"""a canary as good as the others is rolled back in at most so many rollouts, by each of the three tests"""
MISS = 0.05
"""a canary worse by the tolerance is promoted in at most so many rollouts"""
LEAST = 30
"""latencies of each group before they are compared: means of fewer skewed values are not nearly normal"""
_GOOD = 0.1
"""share of the tolerance by which a canary that is called as good may still be worse"""


def decide(log_ratio: float) -> Result:
    """By a log likelihood ratio of "worse" to "as good"."""
    if log_ratio >= log((1 - MISS) / FALSE_ALARM):
        return "worse"
    return "as good" if log_ratio <= log(MISS / (1 - FALSE_ALARM)) else "undecided"


def judge_failures(ours: tuple[int, int], stable: tuple[int, int], tolerance: float) -> Result:
    """Of (failures, requests) of a canary and of the others. A canary that fails in less than the tolerance of all its
    requests is as good as any others, however little is known of them: after blue/green has switched, nothing is added
    to that."""
    result = decide(failures_ratio(ours, stable, tolerance))
    perfect = (0, 10**9)
    if result == "undecided" and decide(failures_ratio(ours, perfect, tolerance)) == "as good":
        return "as good"
    return result


def failures_ratio(ours: tuple[int, int], stable: tuple[int, int], tolerance: float) -> float:
    """Of (failures, requests) of a canary and of the others: as good is the others' share and a tenth of the tolerance;
    worse is their share and the tolerance, or half as much again where failures are common. The others' share is an
    estimate too, so that the information is that of both samples together: n m / (n + m) requests instead of n."""
    (failed, requests), (usual_failed, known) = ours, stable
    if not requests or not known:
        return 0.0
    usual = usual_failed / known
    more = max(tolerance, 0.5 * usual)
    good, bad = min(0.98, usual + _GOOD * more), min(0.99, usual + more)
    ratio = failed * log(bad / good) + (requests - failed) * log((1 - bad) / (1 - good))
    return ratio * known / (known + requests)


def latency_ratio(ours: LogMoments, stable: LogMoments, slowdown: float) -> float:
    """Of geometric mean latencies: as good is those of the others, worse is `slowdown` times them. The difference of
    mean logarithms is normal, its variance that of both samples (Welch)."""
    if min(ours.count, stable.count) < LEAST:
        return 0.0
    variance = max(1e-12, ours.variance / ours.count + stable.variance / stable.count)
    worse = log(slowdown)
    return worse * (ours.mean - stable.mean - worse / 2) / variance


def is_enough(stable: LogMoments, slowdown: float) -> bool:
    """Whether these latencies of the others tell "as good" from "worse" once the canary has enough, if no more come."""
    if stable.count < LEAST:
        return False
    spread = max(1e-12, stable.variance / stable.count)
    return log(slowdown) ** 2 / 2 / spread >= -log(MISS / (1 - FALSE_ALARM))
