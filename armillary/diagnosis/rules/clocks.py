"""Rules on what a device's own counters say: clocks held down by heat or power, and devices without work."""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.thresholds import HOT_SHARE, IDLE_DEVICE_SHARE, SLOW_CLOCK_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan


def throttling(reading: Reading, plan: Plan | None) -> Finding | None:
    """A device works at a clock far below its highest, because it is hot or at its power limit."""
    clock, hot = reading.values.get("clock_fraction"), reading.values.get("hot_fraction", 0.0)
    limited = reading.values.get("at_power_limit_fraction", 0.0)
    if clock is None or 1 - clock < SLOW_CLOCK_SHARE or max(hot, limited) < HOT_SHARE:
        return None
    heat = hot >= HOT_SHARE
    lever = Lever(
        title="cool the device" if heat else "raise the power limit",
        action="look at fans, airflow and inlet temperature" if heat else "nvidia-smi -pl WATTS, up to the chip's own",
        speedup=1.0,
        at_most=1 / clock,
        basis="the clock; what is bound by memory does not follow it",
    )
    device, why = reading.values["slowest_device"], "hot" if heat else "at its power limit"
    return Finding(
        loop="inner",
        cause="throttling",
        rule="throttling",
        share=1 - clock,
        evidence=(
            Evidence(gauge="clock_fraction", value=clock, expected=1.0, against="its highest clock"),
            Evidence(gauge="hot_fraction" if heat else "at_power_limit_fraction", value=max(hot, limited)),
        ),
        levers=(lever,),
        says=f"device {device:.0f} works at {clock:.0%} of its clock, and is {why} {max(hot, limited):.0%} of the time",
    )


def idle_device(reading: Reading, plan: Plan | None) -> Finding | None:
    """Devices have no kernel for a good part of the time; their counters do not say what they wait for."""
    busy = reading.values.get("device_busy_fraction")
    if reading.by not in ("nvidia-smi", "dcgm") or busy is None or 1 - busy < IDLE_DEVICE_SHARE:
        return None
    lever = Lever(
        title="see what devices wait for",
        action="a trace of a few steps (torch.profiler), then armillary diagnose TRACE",
        speedup=1.0,
        at_most=1 / max(busy, 0.01),
        basis="the time without a kernel",
    )
    return Finding(
        loop="inner",
        cause="idle_device",
        rule="idle_device",
        share=1 - busy,
        evidence=(
            Evidence(
                gauge="device_busy_fraction",
                value=busy,
                expected=1 - IDLE_DEVICE_SHARE,
                against="least where work is launched ahead",
            ),
        ),
        levers=(lever,),
        says=f"devices run a kernel {busy:.0%} of the time",
    )


RULES: tuple[Rule, ...] = (throttling, idle_device)
