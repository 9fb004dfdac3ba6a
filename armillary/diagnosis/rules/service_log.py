"""Rules on a service by its autoscaler's decisions: too many replicas, too few, too large ones, and late starts.

What a replica does inside, its own metrics page says; here only their number is judged.
"""

from math import ceil

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever, Rule, measured
from armillary.diagnosis.evidence.thresholds import (
    AT_MOST_SHARE,
    COLD_START_SHARE,
    OVERPROVISIONED_SHARE,
    REPLICA_USED_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import seconds_text

_PAID = "replica-hours: those that were needed over those that ran"


def over_provisioned(reading: Reading, plan: Plan | None) -> Finding | None:
    """Replicas run that the traffic never needed. Those that come too late clear a backlog, and stay for a cooldown:
    they are of the late start."""
    there, needed = reading.values.get("replicas"), reading.values.get("replicas_needed")
    if cold_starts(reading, plan) is not None:
        return None
    if not there or needed is None or 1 - needed / there < OVERPROVISIONED_SHARE:
        return None
    least = int(reading.settings["min_replicas"])
    enough = max(1, ceil(needed))
    if least > enough:
        levers: tuple[Lever, ...] = (_fewer(least, enough, there / max(needed, 1e-9)),)
    else:
        levers = (
            Lever(
                title="stop replicas sooner",
                action="a shorter --set autoscale.cooldown_s, or a higher autoscale.target",
                speedup=1.0,
                at_most=there / max(needed, 1e-9),
                of="million_tokens_usd",
                risk="more starts, and less left for bursts",
                basis=_PAID,
            ),
        )
    return _finding(
        "over_provisioned",
        1 - needed / there,
        f"{there:.1f} replicas run on average where the traffic needed {needed:.1f}",
        reading,
        ("replicas", "replicas_needed"),
        levers,
    )


def _fewer(least: int, enough: int, gain: float) -> Lever:
    return Lever(
        title=f"at least {least} → {enough} replicas",
        action=f"--set autoscale.min_replicas={enough}",
        speedup=gain,
        of="million_tokens_usd",
        risk="bursts wait for a start",
        basis=_PAID,
    )


def replica_too_large(reading: Reading, plan: Plan | None) -> Finding | None:
    """One replica serves far more than the traffic ever asks: a smaller one would do."""
    need, there = reading.values.get("replicas_needed_p95"), reading.values.get("replicas")
    if need is None or not there or not reading.get("requests_per_s") or need > REPLICA_USED_SHARE or there > 1.5:
        return None
    rate = reading.values["requests_per_s_p95"]
    lever = Lever(
        title="a smaller replica",
        action=f"armillary plan search --for serve --set traffic.requests_per_s={rate:.3g}",
        speedup=1.0,
        at_most=1 / max(need, 0.05),
        of="million_tokens_usd",
        risk="the model must fit, and a single stream is slower on fewer devices",
        basis="share of a replica's capacity that is used, 95th percentile",
    )
    return _finding(
        "wrong_replica_size",
        1 - need,
        f"the traffic takes {need:.0%} of one replica, 95 % of the time: it is larger than needed",
        reading,
        ("replicas_needed_p95", "requests_per_s_p95"),
        (lever,),
    )


def cold_starts(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests come while the replicas for them still start."""
    share = reading.values.get("short_starting_fraction", 0.0)
    if share < COLD_START_SHARE:
        return None
    took = reading.values.get("replica_start_s")
    known = f", {seconds_text(took)} each" if took else ""
    lever = Lever(
        title="keep a replica more than is needed",
        action=f"--set autoscale.min_replicas={int(reading.settings['min_replicas']) + 1}, or a lower autoscale.target",
        speedup=1.0,
        at_most=1 / (1 - min(share, 0.95)),
        of="ttft_s",
        risk="a replica more is paid",
        basis="share of the requests that came meanwhile",
    )
    quicker = Lever(
        title="start replicas faster",
        action="weights on a local disk, a compile cache that is kept, or sleeping replicas (docs/service.md)",
        speedup=1.0,
        at_most=1 / (1 - min(share, 0.95)),
        of="ttft_s",
        basis="share of the requests that came meanwhile",
    )
    return _finding(
        "cold_starts",
        share,
        f"{share:.0%} of the requests come while replicas that they need still start{known}",
        reading,
        ("short_starting_fraction", "replica_start_s"),
        (lever, quicker),
    )


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """The traffic needs more replicas than the policy allows."""
    share, wanted = reading.values.get("short_at_most_fraction", 0.0), reading.values.get("replicas_wanted")
    if share < AT_MOST_SHARE or not wanted:
        return None
    most = int(reading.settings["max_replicas"])
    lever = Lever(
        title=f"at most {most} → {wanted:.0f} replicas",
        action=f"--set autoscale.max_replicas={wanted:.0f}",
        speedup=wanted / most,
        of="requests_per_s",
        risk="the price of the replicas",
        basis="replicas that the signals needed, at their highest",
    )
    return _finding(
        "too_few_replicas",
        share,
        f"{share:.0%} of the requests come while more than the allowed {most} replicas are needed, up to {wanted:.0f}",
        reading,
        ("short_at_most_fraction", "replicas_wanted"),
        (lever,),
    )


def _finding(
    cause: Cause, share: float, says: str, reading: Reading, gauges: tuple[str, ...], levers: tuple[Lever, ...]
) -> Finding:
    evidence: tuple[Evidence, ...] = measured(reading, *gauges)
    return Finding(loop="product", cause=cause, rule=cause, says=says, share=share, evidence=evidence, levers=levers)


RULES: tuple[Rule, ...] = (over_provisioned, replica_too_large, cold_starts, too_few_replicas)
