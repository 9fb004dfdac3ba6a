"""Rules for traces of other programs: Python between launches, and GEMMs in 32 bits."""

import re

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.step_parts import computing
from armillary.diagnosis.evidence.thresholds import TRACE_LAUNCH_SHARE, WIDE_GEMM_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.device import launch_overhead
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan

_FP32 = re.compile(r"sgemm|gemm_f32f32_f32f32|_S_B_|simt_s|fp32_gemm", re.IGNORECASE)
_TF32 = re.compile(r"tf32|s1688(?!.*(?:bf16|f16))", re.IGNORECASE)
"""cuBLAS, CUTLASS and rocBLAS name the dtype in their kernels"""


def late_launches(reading: Reading, plan: Plan | None) -> Finding | None:
    """A trace in which Python between launches, a little each time, leaves the device idle."""
    if reading.plan is not None or reading.profile is None or launch_overhead(reading, plan) is not None:
        return None
    gaps, host = reading.get("launch_gap_fraction") or 0.0, reading.get("host_fraction") or 0.0
    share = computing(reading) * (gaps + max(0.0, host - (reading.get("host_stall_fraction") or 0.0)))
    if share < TRACE_LAUNCH_SHARE:
        return None
    evidence = tuple(
        Evidence(gauge=name, value=value)
        for name in ("launch_gap_fraction", "host_fraction", "kernels")
        if (value := reading.get(name)) is not None
    )
    return Finding(
        loop="inner",
        cause="launch_overhead",
        rule="late_launches",
        share=share,
        evidence=evidence,
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


RULES: tuple[Rule, ...] = (late_launches, wide_gemms)
