"""Rules of the inner loop: is the device doing useful work, or waiting for its own host?

Each rule is a function of the measurement and the plan. Shares of a recorded step become shares of the total time, so
that they compare with waiting for data and for other ranks.
"""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Rule
from armillary.diagnosis.evidence.step_parts import Parts, computing, launch_overhead_share, parts_of
from armillary.diagnosis.evidence.thresholds import (
    BUSY_SHARE,
    DATA_WAIT_SHARE,
    HOST_STALL_SHARE,
    LAUNCH_SHARE,
    SYNC_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.gauges import budget_gauge
from armillary.spec.plan import Plan
from armillary.spec.precision import SIXTEEN_BIT
from armillary.units import seconds_text

WIDE = ("fp32", "tf32")
"""precisions that leave the chip's fastest units idle"""


def data_starvation(reading: Reading, plan: Plan | None) -> Finding | None:
    """The step waits for its batch."""
    parts = parts_of(reading)
    if parts is None:
        share = reading.get("data_wait_fraction")
        return _starved(share, None) if share is not None and share >= DATA_WAIT_SHARE else None
    share = parts.share(parts.data_wait)
    return _starved(share, parts) if share >= DATA_WAIT_SHARE else None


def _starved(share: float, parts: Parts | None) -> Finding:
    each = f"{seconds_text(parts.data_wait)} of {seconds_text(parts.step)}" if parts else f"{share:.0%} of the time"
    evidence = [
        Evidence(gauge="data_wait_fraction", value=share, expected=DATA_WAIT_SHARE, against="most a healthy run has")
    ]
    if parts:
        evidence.append(Evidence(gauge="data_wait_s", value=parts.data_wait))
    return Finding(
        loop="inner",
        cause="data_starvation",
        rule="data_starvation",
        share=share,
        evidence=tuple(evidence),
        says=f"every step waits {each} for its batch: the loader delivers too little",
    )


def launch_overhead(reading: Reading, plan: Plan | None) -> Finding | None:
    """Launching many small operations takes the time, rather than their work."""
    inside = launch_overhead_share(reading, plan)
    share = computing(reading) * (inside or 0.0)
    if inside is None or share < LAUNCH_SHARE or _sync_share(reading) >= SYNC_SHARE:
        return None
    count = reading.get("kernels")
    gauges = ("launch_gap_fraction", "launch_bound_fraction", "kernels")
    evidence = [Evidence(gauge=name, value=value) for name in gauges if (value := reading.get(name)) is not None]
    many = f"{count:,.0f} kernels per step, most too short to be worth a launch" if count else "kernels come too late"
    return Finding(
        loop="inner",
        cause="launch_overhead",
        rule="launch_overhead",
        share=share,
        evidence=tuple(evidence),
        says=f"{share:.0%} of the time goes into launching: {many}",
    )


def sync(reading: Reading, plan: Plan | None) -> Finding | None:
    """Python's own work, or waiting for the device in the middle of a step, holds everything up."""
    inside = max(reading.get("host_stall_fraction") or 0.0, _sync_share(reading))
    if reading.get("host_stall_fraction") is None:
        inside += reading.get("host_fraction") or 0.0
    if _sync_share(reading) >= SYNC_SHARE:
        inside += reading.get("launch_gap_fraction") or 0.0
    parts, share = parts_of(reading), computing(reading) * inside
    between = parts.share(parts.between) if parts else 0.0
    if share + between < HOST_STALL_SHARE:
        return None
    evidence = [
        Evidence(gauge=name, value=value)
        for name in ("host_stall_fraction", "host_fraction", "sync_fraction")
        if (value := reading.get(name)) is not None
    ]
    if parts and between:
        evidence.append(Evidence(gauge="between_steps_s", value=parts.between))
    where = "between steps" if between > share else "inside the step"
    return Finding(
        loop="inner",
        cause="sync",
        rule="sync",
        share=share + between,
        evidence=tuple(evidence),
        says=f"the host holds the device up for {share + between:.0%} of the time, {where}",
    )


def _sync_share(reading: Reading) -> float:
    """Share of a step in which the host waits for the device, or copies."""
    return reading.get("sync_fraction") or 0.0


def precision(reading: Reading, plan: Plan | None) -> Finding | None:
    """GEMMs in a dtype that is not the device's fastest: 32 bits where it has 16-bit units, or 16 bits that it only
    emulates. The finding is kept where a lever, priced by the device's own ceilings, gains something."""
    if plan is None or plan.train is None or plan.layout.precision not in (*WIDE, *SIXTEEN_BIT):
        return None
    dtype, other = plan.layout.precision, "bf16" if plan.layout.precision in WIDE else "fp32"
    now, then = (plan.cluster.chip.flops.get(name) for name in (dtype, other))
    evidence = [Evidence(gauge="step_s", value=reading.get("step_s") or 0.0)]
    if now and then:
        against = f"the chip's {other} peak"
        evidence.append(Evidence(gauge="gemm_flops_per_s", value=now, expected=then, against=against))
    says = f"GEMMs run in {dtype}" + (" where bf16 is there" if dtype in WIDE else ", which is emulated here")
    return Finding(loop="inner", cause="precision", rule="precision", share=0.0, evidence=tuple(evidence), says=says)


def compute(reading: Reading, plan: Plan | None) -> Finding | None:
    """Nothing waits: the time is spent in kernels. Their distance from the roofline is what is left to gain."""
    return _kernels(reading, bound="compute")


def memory_bandwidth(reading: Reading, plan: Plan | None) -> Finding | None:
    """The time is spent in kernels, and most of them are memory-bound."""
    return _kernels(reading, bound="memory")


def _kernels(reading: Reading, *, bound: str) -> Finding | None:
    busy = sum(reading.get(budget_gauge(name)) or 0.0 for name in ("useful", "inefficiency", "unjudged"))
    if busy < BUSY_SHARE or _bound(reading) != bound:
        return None
    reached = reading.get("roofline_fraction")
    evidence = [
        Evidence(gauge=budget_gauge(name), value=value)
        for name in ("useful", "inefficiency", "unjudged")
        if (value := reading.get(budget_gauge(name)))
    ]
    if reached is not None:
        evidence.append(Evidence(gauge="roofline_fraction", value=reached, expected=1.0, against="measured ceiling"))
    at = f" at {reached:.0%} of the {_roofline(reading)} roofline" if reached is not None else ""
    if (reading.get("unjudged_fraction") or 0.0) > busy / 2:
        at = f": kernels take {busy:.0%} of the time, and most of them cannot be judged"
    cause, says = ("compute", "compute-bound") if bound == "compute" else ("memory_bandwidth", "memory-bound")
    return Finding(
        loop="inner",
        cause=cause,  # type: ignore[arg-type]
        rule=cause,
        share=0.0,
        evidence=tuple(evidence),
        says=says + at,
    )


def _roofline(reading: Reading) -> str:
    source = reading.profile.roofline.source if reading.profile else "measured"
    return "catalogue's" if source == "catalogue" else "measured"


def _bound(reading: Reading) -> str:
    """Whether most kernel time is memory- or compute-bound, by the rows of a profile."""
    rows = (reading.profile.kernels or reading.profile.operators) if reading.profile else ()
    passes = ("elementwise", "norm", "softmax", "copy", "embedding", "optimizer")
    unknown = [row for row in rows if row.bound == "unknown"]
    memory = sum(row.seconds for row in rows if row.bound == "memory")
    products = sum(row.seconds for row in rows if row.bound == "compute")
    memory += sum(row.seconds for row in unknown if row.work in passes)
    products += sum(row.seconds for row in unknown if row.work in ("gemm", "conv", "attention"))
    return "memory" if memory > products else "compute"


RULES: tuple[Rule, ...] = (data_starvation, launch_overhead, sync, precision, compute, memory_bandwidth)
