"""Rules of the inner loop: is the device doing useful work, or waiting for its own host?

Each rule is a function of the measurement and the plan. Shares of a recorded step become shares of the total time, so
that they compare with waiting for data and for other ranks. In traces of other programs, Python between launches and
GEMMs in 32 bits are looked for as well.
"""

import re

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever, Rule, measured
from armillary.diagnosis.evidence.step_parts import computing, launch_overhead_share, parts_of
from armillary.diagnosis.evidence.thresholds import (
    BUSY_SHARE,
    DATA_WAIT_SHARE,
    HOST_STALL_SHARE,
    LAUNCH_SHARE,
    SYNC_SHARE,
    TRACE_LAUNCH_SHARE,
    WIDE_GEMM_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.gauges import budget_gauge
from armillary.spec.plan import Plan
from armillary.spec.precision import SIXTEEN_BIT
from armillary.units import seconds_text

WIDE = ("fp32", "tf32")
"""precisions that leave the chip's fastest units idle"""
_USUAL_BOUND = {
    **dict.fromkeys(("elementwise", "norm", "softmax", "copy", "embedding", "optimizer"), "memory"),
    **dict.fromkeys(("gemm", "conv", "attention"), "compute"),
}
"""kind of work -> what bounds it where no roofline says"""
_FP32 = re.compile(r"sgemm|gemm_f32f32_f32f32|_S_B_|simt_s|fp32_gemm", re.IGNORECASE)
_TF32 = re.compile(r"tf32|s1688(?!.*(?:bf16|f16))", re.IGNORECASE)
"""cuBLAS, CUTLASS and rocBLAS name the dtype in their kernels"""


def data_starvation(reading: Reading, plan: Plan | None) -> Finding | None:
    """The step waits for its batch."""
    parts = parts_of(reading)
    share = parts.share(parts.data_wait) if parts else reading.get("data_wait_fraction") or 0.0
    if share < DATA_WAIT_SHARE:
        return None
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
    many = f"{count:,.0f} kernels per step, most too short to be worth a launch" if count else "kernels come too late"
    return Finding(
        loop="inner",
        cause="launch_overhead",
        rule="launch_overhead",
        share=share,
        evidence=measured(reading, "launch_gap_fraction", "launch_bound_fraction", "kernels"),
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
    evidence = measured(reading, "host_stall_fraction", "host_fraction", "sync_fraction")
    if parts and between:
        evidence += (Evidence(gauge="between_steps_s", value=parts.between),)
    where = "between steps" if between > share else "inside the step"
    return Finding(
        loop="inner",
        cause="sync",
        rule="sync",
        share=share + between,
        evidence=evidence,
        says=f"the host holds the device up for {share + between:.0%} of the time, {where}",
    )


def _sync_share(reading: Reading) -> float:
    """Share of a step in which the host waits for the device, or copies."""
    return reading.get("sync_fraction") or 0.0


def precision(reading: Reading, plan: Plan | None) -> Finding | None:
    """GEMMs in a dtype that is not the device's fastest: 32 bits where it has 16-bit units, or 16 bits that it only
    emulates. The finding stays where a lever, priced by the device's own ceilings, gains something."""
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
    evidence = [
        Evidence(gauge=budget_gauge(name), value=value)
        for name in ("useful", "inefficiency", "unjudged")
        if (value := reading.get(budget_gauge(name)))
    ]
    at, achieved = "", reading.get("roofline_fraction")
    if achieved is not None:
        catalogue = reading.profile is not None and reading.profile.roofline.source == "catalogue"
        whose = "catalogue's" if catalogue else "measured"
        at = f" at {achieved:.0%} of the {whose} roofline"
        evidence.append(Evidence(gauge="roofline_fraction", value=achieved, expected=1.0, against="measured ceiling"))
    if (reading.get("unjudged_fraction") or 0.0) > busy / 2:
        at = f": kernels take {busy:.0%} of the time, and most of them cannot be judged"
    cause: Cause = "compute" if bound == "compute" else "memory_bandwidth"
    return Finding(
        loop="inner", cause=cause, rule=cause, share=0.0, evidence=tuple(evidence), says=f"{bound}-bound{at}"
    )


def _bound(reading: Reading) -> str:
    """Whether most kernel time is memory- or compute-bound, by the rows of a profile."""
    rows = (reading.profile.kernels or reading.profile.operators) if reading.profile else ()
    bounds = [(_USUAL_BOUND.get(row.work) if row.bound == "unknown" else row.bound, row.seconds) for row in rows]
    memory, compute = (sum(seconds for bound, seconds in bounds if bound == kind) for kind in ("memory", "compute"))
    return "memory" if memory > compute else "compute"


# --- traces of other programs


def late_launches(reading: Reading, plan: Plan | None) -> Finding | None:
    """A trace in which Python between launches, a little each time, leaves the device idle."""
    if reading.plan is not None or reading.profile is None or launch_overhead(reading, plan) is not None:
        return None
    gaps, host = reading.get("launch_gap_fraction") or 0.0, reading.get("host_fraction") or 0.0
    share = computing(reading) * (gaps + max(0.0, host - (reading.get("host_stall_fraction") or 0.0)))
    if share < TRACE_LAUNCH_SHARE:
        return None
    return Finding(
        loop="inner",
        cause="launch_overhead",
        rule="late_launches",
        share=share,
        evidence=measured(reading, "launch_gap_fraction", "host_fraction", "kernels"),
        says=f"the device waits {share:.0%} of the time for Python to come to the next launch",
    )


def wide_gemms(reading: Reading, plan: Plan | None) -> Finding | None:
    """GEMMs in fp32 or tf32, by the names of their kernels, on a chip that is faster in bf16."""
    profile = reading.profile
    if reading.plan is not None or profile is None or not profile.wall_s or "bf16" not in profile.roofline.flops:
        return None
    gain, share = 1.0, 0.0
    for dtype, pattern in (("fp32", _FP32), ("tf32", _TF32)):
        part = sum(row.seconds for row in profile.kernels if pattern.search(row.name)) / profile.wall_s
        peak = profile.roofline.flops.get(dtype)
        if part > share and peak:
            gain, share = speedup(min(1.0, part), profile.roofline.flops["bf16"] / peak), part
    if share < WIDE_GEMM_SHARE:
        return None
    lever = Lever(
        title="GEMMs in bf16",
        action='torch.autocast("cuda", dtype=torch.bfloat16)',
        speedup=gain,
        risk="GEMMs lose digits; weights and sums stay in fp32",
        basis="at most: Amdahl with the ratio of the chip's peaks",
    )
    evidence = Evidence(
        gauge="gemm_flops_per_s",
        value=profile.roofline.flops.get("fp32", 0.0),
        expected=profile.roofline.flops["bf16"],
        against="the chip's bf16 peak",
    )
    return Finding(
        loop="inner",
        cause="precision",
        rule="wide_gemms",
        share=share,
        evidence=(evidence,),
        levers=(lever,),
        says=f"{share:.0%} of the time are 32-bit GEMMs; bf16 is there",
    )


RULES: tuple[Rule, ...] = (data_starvation, launch_overhead, sync, precision, compute, memory_bandwidth)
TRACE_RULES: tuple[Rule, ...] = (late_launches, wide_gemms)
