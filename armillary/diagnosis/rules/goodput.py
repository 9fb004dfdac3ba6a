"""Rule of the whole job: how much of its time do failures cost?"""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Rule
from armillary.diagnosis.evidence.thresholds import FAILURE_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import seconds_text


def failures(reading: Reading, plan: Plan | None) -> Finding | None:
    """Steps are repeated and ranks started again for a good part of the time; nobody waits for idle time here."""
    account = reading.goodput
    if account is None or not account.num_failures:
        return None
    ran_s = account.total_s - account.seconds["idle"]
    lost_s = account.seconds["repeated"] + account.restart_s
    if ran_s <= 0 or lost_s / ran_s < FAILURE_SHARE:
        return None
    times = "once" if account.num_failures == 1 else f"{account.num_failures} times"
    return Finding(
        loop="training",
        cause="failures",
        rule="failures",
        share=lost_s / ran_s,
        evidence=(
            Evidence(gauge="repeated_fraction", value=account.seconds["repeated"] / ran_s),
            Evidence(gauge="restart_fraction", value=account.restart_s / ran_s),
            Evidence(gauge="failures_total", value=float(account.num_failures)),
        ),
        says=f"the run failed {times}, which cost {seconds_text(account.seconds['repeated'])} of repeated steps and "
        f"{seconds_text(account.restart_s)} of restarts: {lost_s / ran_s:.0%} of the time it ran",
    )


RULES: tuple[Rule, ...] = (failures,)
