"""Rules of the training loop: do many devices act as one, and is any work needless?"""

from statistics import median

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever, Rule, measured
from armillary.diagnosis.evidence.step_parts import Parts, parts_of, recompute_share
from armillary.diagnosis.evidence.stragglers import find_straggler, waited_for_others
from armillary.diagnosis.evidence.thresholds import (
    BUBBLE_SHARE,
    COLLAPSED_ROUTER_SHARE,
    EXPOSED_COMM_SHARE,
    MEMORY_FULL_SHARE,
    QUALITY_SHARE,
    ROUTER_SKEW,
    STAGE_SPREAD_SHARE,
    STALL_SHARE,
    STRAGGLER_SHARE,
    UNUSED_EXPERT_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan
from armillary.units import bytes_text, seconds_text


def bad_placement(reading: Reading, plan: Plan | None) -> Finding | None:
    """Ranks that exchange the most, of a tp or ep group, are on more machines than they need, and their communication
    is exposed: machines have different numbers of ranks, or a number that the group does not divide."""
    machines, least = reading.get("group_machines"), reading.get("group_machines_least")
    share = _exposed(reading)[1]
    if machines is None or least is None or machines <= least or share < EXPOSED_COMM_SHARE:
        return None
    lever = Lever(
        title="whole groups on a machine",
        action="as many ranks on every machine, a multiple of the group's: --ntasks-per-node, --nproc-per-node, "
        "nvidia.com/gpu per pod; or a group that divides what a machine has",
        speedup=1.0,
        at_most=1 / (1 - min(0.95, share)),
        risk="a longer wait for whole machines",
        basis="the exposed communication, of which links inside a machine leave little",
    )
    return Finding(
        loop="training",
        cause="bad_placement",
        rule="bad_placement",
        share=share,
        evidence=measured(reading, "group_machines", "group_machines_least"),
        levers=(lever,),
        says=f"a group of ranks that exchanges in every layer is on {machines:.0f} machines where {least:.0f} would "
        f"hold it, and ranks communicate {share:.0%} of the time with no computation beside it",
    )


def _exposed(reading: Reading) -> tuple[float, float]:
    """(seconds per step, share of the time) of exposed communication; waiting for a straggler is the straggler's, and a
    heavier stage is waited for in the bubble."""
    parts = parts_of(reading)
    if parts is None:
        share = reading.get("comm_exposed_fraction") or 0.0
        return share * (reading.get("step_s") or 0.0), share
    seconds = parts.comm_exposed - max(0.0, waited_for_others(reading) - parts.bubble)
    return seconds, parts.share(seconds)


def exposed_communication(reading: Reading, plan: Plan | None) -> Finding | None:
    """Communication that no computation hides."""
    seconds, share = _exposed(reading)
    if share < EXPOSED_COMM_SHARE:
        return None
    expected = reading.predicted("comm_exposed_s")
    evidence = Evidence(gauge="comm_exposed_s", value=seconds, expected=expected, against="plan" if expected else "")
    return Finding(
        loop="training",
        cause="exposed_communication",
        rule="exposed_communication",
        share=share,
        evidence=(evidence,),
        says=f"ranks communicate for {seconds_text(seconds)} per step with no computation "
        f"beside it ({share:.0%} of the time)",
    )


def bubble(reading: Reading, plan: Plan | None) -> Finding | None:
    """Pipeline stages stand idle while the pipeline fills and drains."""
    parts = parts_of(reading)
    if parts is None:
        return None
    slowest = straggler(reading, plan)  # whose stage the others wait for: that is no bubble
    share, expected = parts.share(parts.bubble) - (slowest.share if slowest else 0.0), reading.predicted("bubble_s")
    if share < BUBBLE_SHARE:
        return None
    evidence = [Evidence(gauge="bubble_s", value=parts.bubble, expected=expected, against="plan" if expected else "")]
    count = reading.predicted("micro_batches")
    if count:
        evidence.append(Evidence(gauge="micro_batches", value=count))
    few = f"; {count:.0f} micro-batches per step are few for {plan.layout.pp} stages" if plan and count else ""
    return Finding(
        loop="training",
        cause="bubble",
        rule="bubble",
        share=share,
        evidence=tuple(evidence),
        says=f"pipeline stages stand idle {share:.0%} of the time{few}",
    )


def straggler(reading: Reading, plan: Plan | None) -> Finding | None:
    """The same rank is late in most steps, and all others wait for it."""
    parts, slowest = parts_of(reading), find_straggler(reading, plan)
    if parts is None or slowest is None:
        return None
    # ranks may differ by a share of a whole step, or of a stage's own work where pipeline stages differ
    has_stages = plan is not None and plan.layout.pp > 1
    usual = STAGE_SPREAD_SHARE * parts.work if has_stages else STRAGGLER_SHARE * parts.total
    if slowest.seconds < usual:
        return None
    evidence = (
        Evidence(
            gauge="rank_spread_s", value=slowest.seconds, expected=usual, against="most that equal machines differ by"
        ),
        Evidence(gauge="slowest_rank", value=float(slowest.rank)),
    )
    return Finding(
        loop="training",
        cause="straggler",
        rule="straggler",
        share=parts.share(slowest.seconds),
        evidence=evidence,
        says=f"rank {slowest.rank} takes {seconds_text(slowest.seconds)} longer than the others, in "
        f"{slowest.often:.0%} of the steps since step {slowest.since}, {_LATE_BY[slowest.cause]}; all wait for it",
    )


_LATE_BY = {"data": "because of its data loader", "compute": "in its own work"}


def needless_recompute(reading: Reading, plan: Plan | None) -> Finding | None:
    """Activations are recomputed; the lever says whether they would fit."""
    if plan is None or plan.train is None or plan.layout.recompute == "none":
        return None
    step, share = reading.get("step_s") or reading.predicted("step_s") or 0.0, recompute_share(reading)
    if share is None:
        share = (reading.predicted("recompute_s") or 0.0) / (reading.predicted("step_s") or 1.0)
    if not share or not step:
        return None
    return Finding(
        loop="training",
        cause="needless_recompute",
        rule="needless_recompute",
        share=share,
        evidence=(Evidence(gauge="recompute_s", value=share * step), *_memory(reading, plan)),
        says=f"{seconds_text(share * step)} of a step recompute activations although there is memory to keep them",
    )


def needless_offload(reading: Reading, plan: Plan | None) -> Finding | None:
    """States or activations are offloaded; the lever says whether they would fit."""
    if plan is None or plan.train is None or plan.layout.offload == "none":
        return None
    step, spent = reading.get("step_s"), reading.get("offload_s")
    if not step or spent is None:
        spent, step = reading.predicted("offload_s"), reading.predicted("step_s")
    moved = reading.get("offloaded_bytes") or reading.predicted("offloaded_bytes") or 0.0
    return Finding(
        loop="training",
        cause="needless_offload",
        rule="needless_offload",
        share=min(1.0, (spent or 0.0) / step) if step else 0.0,
        evidence=(Evidence(gauge="offloaded_bytes", value=moved), *_memory(reading, plan)),
        says=f"{bytes_text(moved)} wait in host memory or on disk though the device has room for them",
    )


def memory_pressure(reading: Reading, plan: Plan | None) -> Finding | None:
    """The device is so full that a longer batch, or fragmentation, ends the run."""
    used = reading.get("memory_peak_bytes")  # allocators reserve what they can get
    if plan is None or not used or plan.cluster.chip.kind == "cpu":
        return None
    capacity = plan.cluster.chip.memory_bytes
    if not capacity or used / capacity < MEMORY_FULL_SHARE:
        return None
    return Finding(
        loop="training",
        cause="memory_pressure",
        rule="memory_pressure",
        share=QUALITY_SHARE,
        evidence=tuple(_memory(reading, plan)),
        says=f"{bytes_text(used)} of {bytes_text(capacity)} are taken: the allocator has nothing to spare",
    )


def _memory(reading: Reading, plan: Plan) -> list[Evidence]:
    used, capacity = reading.get("memory_peak_bytes"), plan.cluster.chip.memory_bytes
    if not used:
        return []
    return [Evidence(gauge="memory_peak_bytes", value=used, expected=capacity, against="the device's memory")]


def expert_imbalance(reading: Reading, plan: Plan | None) -> Finding | None:
    """A few experts get most tokens: the others are unused weights, and their ranks wait."""
    heavy, unused = _late_median(reading, "expert_load_max_over_mean"), _late_median(reading, "expert_tail_fraction")
    moe = plan.model.moe if plan is not None else None
    if heavy is None:
        return None
    most = moe.num_experts / max(1, moe.top_k) if moe is not None else max(heavy, 2.0)
    skew = (heavy - 1) / (most - 1) if most > 1 else 0.0
    if skew < ROUTER_SKEW and (unused or 0.0) < UNUSED_EXPERT_SHARE:
        return None
    evidence = [Evidence(gauge="expert_load_max_over_mean", value=heavy, expected=1.0, against="even load")]
    if unused is not None:
        evidence.append(Evidence(gauge="expert_tail_fraction", value=unused, expected=0.0, against="even load"))
    # ranks wait for the rank with the busiest experts; on one rank it costs quality only
    waited = 0.5 * (1 - 1 / heavy) if plan is not None and plan.layout.ep > 1 else 0.0
    return Finding(
        loop="training",
        cause="expert_imbalance",
        rule="expert_imbalance",
        share=max(waited, COLLAPSED_ROUTER_SHARE * max(skew, ROUTER_SKEW)),
        evidence=tuple(evidence),
        says=f"the busiest expert gets {heavy:.1f} times the mean load, {unused or 0.0:.0%} of the experts hardly any",
    )


def _late_median(reading: Reading, gauge: str) -> float | None:
    """Over the second half of the steps: a router begins uneven by chance."""
    values = reading.series(gauge)
    return median(values[len(values) // 2 :]) if values else None


def checkpoint_stall(reading: Reading, plan: Plan | None) -> Finding | None:
    """Checkpoints come so often that the run mostly saves."""
    parts = parts_of(reading)
    job = plan.train if plan is not None else None
    if parts is None or job is None or job.save_every is None or parts.share(parts.checkpoint) < STALL_SHARE:
        return None  # by itself, a run never saves so often
    return _stall("checkpoint_stall", "checkpoint_stall_s", parts, parts.checkpoint, job.save_every, "saving")


def validation_stall(reading: Reading, plan: Plan | None) -> Finding | None:
    """Validation comes so often, or reads so much, that the run mostly validates."""
    parts = parts_of(reading)
    job = plan.train if plan is not None else None
    if parts is None or job is None or parts.share(parts.validation) < STALL_SHARE:
        return None
    return _stall("validation_stall", "validation_s", parts, parts.validation, job.eval_every, "validating")


def _stall(cause: Cause, gauge: str, parts: Parts, each: float, period: int, activity: str) -> Finding:
    share, once = parts.share(each), each * period
    evidence = (
        Evidence(
            gauge=gauge,
            value=once,
            expected=STALL_SHARE * parts.total * period,
            against=f"most a healthy run has in {period} steps",
        ),
        Evidence(gauge="step_s", value=parts.step),
    )
    return Finding(
        loop="training",
        cause=cause,
        rule=cause,
        share=share,
        evidence=evidence,
        says=f"{activity} takes {seconds_text(once)} every {period} steps of {seconds_text(parts.step)}: "
        f"{share:.0%} of the time",
    )


RULES: tuple[Rule, ...] = (
    bad_placement,
    exposed_communication,
    bubble,
    straggler,
    needless_recompute,
    needless_offload,
    memory_pressure,
    expert_imbalance,
    checkpoint_stall,
    validation_stall,
)
