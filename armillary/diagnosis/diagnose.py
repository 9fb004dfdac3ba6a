"""Diagnosis of one run: every rule is evaluated, its levers are priced, and the verdict names loop, cause and levers.

The cause with the largest share among those that a lever acts on names the loop; where no lever gains anything worth
having, the run is healthy and the verdict says how much is left.
"""

import time
from dataclasses import replace

from armillary.diagnosis.evidence.finding import Finding, Lever, Rule
from armillary.diagnosis.evidence.serving_run import ServingRun
from armillary.diagnosis.evidence.step_parts import parts_of
from armillary.diagnosis.evidence.thresholds import (
    BASELINE_SPEEDUP_CPU,
    BASELINE_SPEEDUP_GPU,
    BUDGET_SUM_TOLERANCE,
    MIN_SPEEDUP,
    MIN_TIMED,
    NAME_WITHOUT_LEVER_SHARE,
)
from armillary.diagnosis.levers import advice, serving, training
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.autoscaler_log import AUTOSCALER
from armillary.diagnosis.readings.gateway_page import GATEWAY
from armillary.diagnosis.readings.job_events import KUBERNETES, SLURM
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.run_folder import is_disturbed
from armillary.diagnosis.rules import clocks as clock_rules
from armillary.diagnosis.rules import device as device_rules
from armillary.diagnosis.rules import gateway as gateway_rules
from armillary.diagnosis.rules import goodput as goodput_rules
from armillary.diagnosis.rules import job_attempts as job_rules
from armillary.diagnosis.rules import scraped_server as page_rules
from armillary.diagnosis.rules import service_log as service_rules
from armillary.diagnosis.rules import serving as serving_rules
from armillary.diagnosis.rules import training as training_rules
from armillary.diagnosis.rules import training_logs as log_rules
from armillary.diagnosis.rules import wasted_work as waste_rules
from armillary.profiling.profile import BUDGET
from armillary.spec.gauges import budget_gauge
from armillary.store.home import Home

NEEDS_LEVER = ("needless_recompute", "needless_offload", "precision")
"""causes that are dropped where no lever acts on them: what looked needless was needed"""
BASELINE_CAUSES = ("compute", "memory_bandwidth")
"""causes that only say what the time is spent on: any other cause of the same lever goes first"""
PRICED_CAUSES = (*BASELINE_CAUSES, *NEEDS_LEVER)
"""causes whose share is what their best lever would save, where that is more than was seen"""
COUNTED_CAUSES = (
    "throttling",
    "idle_device",
    "bad_placement",
    "adapter_thrashing",
    "over_provisioned",
    "wrong_replica_size",
    "cold_starts",
    "routing_skew",
    "guard_latency",
)
"""causes that counters show, of a device or of a service, and whose gain only a trial or a trace can tell"""
LOOPS = {"inner": "inner loop", "training": "training loop", "product": "product loop"}


def diagnose(reading: Reading, home: Home) -> Diagnosis:
    """The verdict on one reading."""
    findings = [finding for rule in rules_for(reading) if (finding := rule(reading, reading.plan)) is not None]
    findings = [replace(finding, levers=finding.levers or _levers(finding, reading, home)) for finding in findings]
    priced = serving.assign_queue([_priced(finding, reading) for finding in _without_shared_levers(findings)])
    findings = [finding for finding in priced if finding.cause not in NEEDS_LEVER or is_worth(finding, reading)]
    findings.sort(key=lambda finding: _order(finding, reading))
    enough = is_enough(reading) or not reading.steps  # of a step or two, warm-up is all there is
    limiting = findings[0] if findings and enough and limits(findings[0], reading) else None
    return _verdict(reading, findings, limiting)


def rules_for(reading: Reading) -> tuple[Rule, ...]:
    """The rules for this kind of reading."""
    if reading.by in (SLURM, KUBERNETES):
        return job_rules.RULES
    if reading.kind != "serving":
        of_steps = (*training_rules.RULES, *goodput_rules.RULES, *waste_rules.RULES, *log_rules.RULES)
        return (*device_rules.RULES, *clock_rules.RULES, *of_steps)
    if reading.by == AUTOSCALER:
        return service_rules.RULES
    if reading.by == GATEWAY:
        return gateway_rules.RULES
    return serving_rules.RULES if reading.steps else page_rules.RULES


def limits(finding: Finding, reading: Reading) -> bool:
    """Whether a cause may name the loop: a lever acts on it, or it costs so much that it is named without one."""
    heavy = finding.share >= NAME_WITHOUT_LEVER_SHARE and finding.cause not in PRICED_CAUSES
    return heavy or finding.cause in COUNTED_CAUSES or is_worth(finding, reading)


def is_worth(finding: Finding, reading: Reading) -> bool:
    """Whether any lever against it gains enough. Kernels limit a training run only where much can be gained."""
    if finding.cause not in BASELINE_CAUSES or reading.kind != "training":
        return any(lever.speedup > MIN_SPEEDUP for lever in finding.levers)
    enough = BASELINE_SPEEDUP_CPU if _on_cpu(reading) else BASELINE_SPEEDUP_GPU
    # kernels that wait for a core look slow
    return not is_disturbed(reading) and any(lever.speedup > enough for lever in finding.levers)


def is_enough(reading: Reading) -> bool:
    """Whether there is enough to judge: timed steps or requests, a page with traffic, or a recorded budget."""
    timed = len(reading.series("step_s")) or len(reading.series("engine_step_s")) or len(reading.requests)
    figures = ("useful_fraction", "step_s", "e2e_s", "ttft_s", "e2e_p50_s")
    counted = ("clock_fraction", "device_busy_fraction", "replicas_needed", "gateway_added_s", "job_attempts")
    known = any(name in reading.values for name in (*figures, *counted))
    return timed >= MIN_TIMED or known


# --- ranking


def _order(finding: Finding, reading: Reading) -> tuple[bool, bool, float]:
    """Sort key. Causes of a server overlap, so one that a lever acts on goes before the others; in a planned training
    run a wrong setting goes before what its kernels could do better."""
    unpriced = reading.kind == "serving" and not is_worth(finding, reading)
    return not limits(finding, reading), unpriced or _is_baseline(finding, reading), -finding.share


def _is_baseline(finding: Finding, reading: Reading) -> bool:
    """Whether a planned training run merely computes. On a CPU every operator is a call, so calls are part of that
    unless they are a large share of the time."""
    if reading.kind != "training" or reading.plan is None:
        return False
    calls = finding.cause == "launch_overhead" and _on_cpu(reading) and finding.share < NAME_WITHOUT_LEVER_SHARE
    return calls or finding.cause in BASELINE_CAUSES


def _on_cpu(reading: Reading) -> bool:
    return reading.plan is not None and reading.plan.cluster.chip.kind == "cpu"


# --- levers


def _levers(finding: Finding, reading: Reading, home: Home) -> tuple[Lever, ...]:
    if reading.kind == "serving":
        return serving.levers_for(finding, reading, home)
    if reading.plan is None or reading.plan.train is None:
        return advice.levers_for(finding, reading)
    return training.levers_for(finding, reading, home)


def _without_shared_levers(findings: list[Finding]) -> list[Finding]:
    """Each lever belongs to one cause: baseline causes lose the levers that another cause has."""
    owned = {lever.sets for finding in findings if finding.cause not in BASELINE_CAUSES for lever in finding.levers} - {
        ""
    }
    return [
        replace(finding, levers=tuple(lever for lever in finding.levers if lever.sets not in owned))
        if finding.cause in BASELINE_CAUSES
        else finding
        for finding in findings
    ]


def _priced(finding: Finding, reading: Reading) -> Finding:
    """The finding with the share that its levers would save, where only they tell it."""
    throughput = max((lever.speedup for lever in finding.levers if lever.of == "tokens_out_per_s"), default=0.0)
    if throughput and ServingRun(reading, reading.plan).batch_job:  # one rate measures all causes of a batch job
        return replace(finding, share=max(0.0, 1 - 1 / throughput))
    if finding.cause not in PRICED_CAUSES:
        return finding
    best = max((lever.speedup for lever in finding.levers if lever.of == "step_s"), default=1.0)
    return replace(finding, share=max(finding.share, 1 - 1 / best))


def _ranked_levers(findings: list[Finding], limiting: Finding | None) -> tuple[Lever, ...]:
    """The best lever of the limiting cause first, then all others by their gain; each once."""
    first = limiting.levers[:1] if limiting else ()
    of = first[0].of if first else "step_s"
    candidates = [lever for finding in findings for lever in finding.levers]
    candidates.sort(key=lambda lever: (lever.of != of, -lever.speedup))
    unique: dict[str, Lever] = {}
    for lever in (*first, *candidates):
        unique.setdefault(lever.sets or lever.title, lever)
    return tuple(unique.values())


# --- the verdict


def _verdict(reading: Reading, findings: list[Finding], limiting: Finding | None) -> Diagnosis:
    levers = _ranked_levers(findings, limiting)
    gain = _gain(levers, limiting)
    judged = limiting is not None or is_enough(reading)
    unit = "requests" if reading.kind == "serving" else "steps"
    return Diagnosis(
        source=reading.source,
        kind=reading.kind,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        loop=limiting.loop if limiting else None,
        cause=limiting.cause if limiting else None,
        headline=_headline(limiting, findings, gain)
        if judged
        else f"cannot be judged: {reading.source} has measured too few {unit}; let it run on",
        judged=judged,
        gain=gain,
        budget=budget_of(reading),
        findings=tuple(findings),
        levers=levers,
        notes=reading.notes,
    )


def _gain(levers: tuple[Lever, ...], limiting: Finding | None) -> float:
    """What the best lever adds to the gauge that limits, or to the speed where none does."""
    of = limiting.levers[0].of if limiting and limiting.levers else "step_s"
    speedups = [lever.speedup for lever in levers if lever.of == of] or [lever.speedup for lever in levers]
    return max(0.0, max(speedups, default=1.0) - 1)


def _headline(limiting: Finding | None, findings: list[Finding], gain: float) -> str:
    if limiting is not None:
        return f"{LOOPS[limiting.loop]} limits this run · {limiting.says}"
    state = next((f" · {finding.says}" for finding in findings if finding.cause in BASELINE_CAUSES), "")
    return f"healthy: nothing to gain beyond {max(gain, 0.01):.0%}{state}"


def budget_of(reading: Reading) -> dict[str, float]:
    """Where the time went, as shares of all of it; empty where nothing was recorded."""
    parts = parts_of(reading)
    budget = {part: share for part in BUDGET if (share := reading.get(budget_gauge(part))) is not None}
    total = sum(budget.values())
    if abs(total - 1) < BUDGET_SUM_TOLERANCE:
        budget = {part: share / total for part, share in budget.items()}
    if parts is None:
        return budget
    step = parts.share(parts.step - parts.data_wait)
    outside = {
        "data_wait": parts.data_wait,
        "checkpoints": parts.checkpoint,
        "validation": parts.validation,
        "between_steps": parts.between,
    }
    return {part: share * step for part, share in budget.items()} | {
        name: parts.share(seconds) for name, seconds in outside.items()
    }
