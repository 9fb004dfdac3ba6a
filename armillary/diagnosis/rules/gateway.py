"""Rules on a gateway by its metrics page: replicas that are used unevenly, and guards that take long."""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever, Rule, measured
from armillary.diagnosis.evidence.thresholds import ROUTING_SKEW_RATIO
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import seconds_text


def routing_skew(reading: Reading, plan: Plan | None) -> Finding | None:
    """One replica gets far more requests than the others, and has far more in flight: its requests wait for each other
    while others are free."""
    load = reading.values.get("replica_load_max_over_mean", 0.0)
    now, mean = (reading.values.get(f"replica_in_flight_{name}", 0.0) for name in ("max_over_mean", "mean"))
    if load < ROUTING_SKEW_RATIO or now < ROUTING_SKEW_RATIO or mean < 1:
        return None
    lever = Lever(
        title="route by load",
        action='policy = "least-load" of the model (prefix: only where prompts share their beginnings)',
        speedup=1.0,
        at_most=min(load, now),
        of="e2e_s",
        risk="fewer hits in the prefix caches",
        basis="requests of the busiest replica over their mean",
    )
    return Finding(
        loop="product",
        cause="routing_skew",
        rule="routing_skew",
        share=1 - 1 / min(load, now),
        evidence=measured(reading, "replica_load_max_over_mean", "replica_in_flight_max_over_mean", "replicas"),
        levers=(lever,),
        says=f"{reading.settings['busiest']} gets {load:.1f} times the requests of a mean replica of "
        f"{reading.settings['model']}, and has {now:.1f} times as many in flight",
    )


def guard_latency(reading: Reading, plan: Plan | None) -> Finding | None:
    """Checks by guards take longer than their objective."""
    took, most = reading.values.get("guard_s"), reading.values.get("guard_limit_s")
    if took is None or not most or took <= most:
        return None
    lever = Lever(
        title="quicker guards",
        action="fewer guards, rules before models, or a guard's model on a device of its own (docs/gateway.md)",
        speedup=1.0,
        at_most=took / most,
        of="ttft_s",
        risk="what a guard lets through",
        basis="the time of a check over its objective",
    )
    return Finding(
        loop="product",
        cause="guard_latency",
        rule="guard_latency",
        share=1 - most / took,
        evidence=(Evidence(gauge="guard_s", value=took, expected=most, against="objective"),),
        levers=(lever,),
        says=f"a check by guards takes {seconds_text(took)}, where {seconds_text(most)} is the objective",
    )


RULES: tuple[Rule, ...] = (routing_skew, guard_latency)
