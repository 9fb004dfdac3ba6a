"""Rules for a server of which only the metrics page is known, ours or another one; levers name that server's flags.

With no step or request to replay, gains follow from Little's law over the page's means: see evidence/server_load.
"""

from armillary.diagnosis.evidence.finding import Finding, Lever, Rule
from armillary.diagnosis.evidence.server_load import load_of
from armillary.diagnosis.evidence.thresholds import (
    ITL_P99_OVER_P50,
    KV_FULL_SHARE,
    KV_SPARE_SHARE,
    MIN_SPEEDUP,
    PAGE_PREEMPTIONS_PER_REQUEST,
    PAGE_QUEUE_SHARE,
    PREFILL_DOMINATES_SHARE,
    PREFILL_GAP_SHARE,
    PREFILL_SHARE,
    WAITING_PER_RUNNING,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.adapters import adapter_thrashing
from armillary.diagnosis.rules.page_levers import (
    AT_MOST,
    flag_lever,
    fuller_steps,
    largest_batch,
    more_kv,
    more_replicas,
    page_finding,
    queue_share,
    queue_text,
    replica_text,
    smaller_chunks,
    waits,
)
from armillary.diagnosis.rules.speculation import rejected_drafts
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan
from armillary.units import seconds_text


def preemption(reading: Reading, plan: Plan | None) -> Finding | None:
    """Running requests are preempted for lack of KV memory, and recomputed."""
    load, used = load_of(reading), reading.get("kv_used_fraction")
    if (
        load is None
        or load.preempted < PAGE_PREEMPTIONS_PER_REQUEST
        or (used is not None and used < KV_SPARE_SHARE and not load.over)
    ):
        return None
    levers = tuple(more_kv(reading, load))
    share = min(0.95, load.recompute_share + queue_share(load) * (1 - load.recompute_share))
    gauges = ("preemptions_total", "kv_used_fraction", "waiting")
    return page_finding(
        "preemption",
        share,
        f"{load.preempted:.2f} preemptions per request for lack of KV cache; {queue_text(load)}",
        reading,
        gauges,
        levers,
    )


def kv_pressure(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait because the KV cache is full."""
    load, used = load_of(reading), reading.get("kv_used_fraction")
    if (
        load is None
        or used is None
        or used < KV_FULL_SHARE
        or load.preempted >= PAGE_PREEMPTIONS_PER_REQUEST
        or not waits(load)
    ):
        return None
    levers = tuple(more_kv(reading, load))
    return page_finding(
        "kv_pressure",
        queue_share(load),
        f"the KV cache is {used:.0%} full and requests wait for it: {queue_text(load)}",
        reading,
        ("kv_used_fraction", "waiting", "queue_s"),
        levers,
    )


def batch_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait though there is KV memory left and a larger batch would hardly slow a step."""
    load, used = load_of(reading), reading.get("kv_used_fraction")
    if load is None or used is None or used >= KV_SPARE_SHARE or not waits(load) or load.waiting < 1:
        return None
    if adapter_thrashing(reading, plan) is not None:
        return None
    if load.waiting < WAITING_PER_RUNNING * load.running:  # those wait for the prompts before them, or came at once
        return None
    if (
        load.prompts_share >= PREFILL_DOMINATES_SHARE
    ):  # requests are kept out by the prompts before them, not by a limit of the batch
        return None
    batch = largest_batch(load, used)
    lever = flag_lever(
        reading,
        "serve.max_running",
        batch,
        f"batch of {load.running:.0f} → {batch} requests",
        load.gain(batch),
        risk="longer gaps between tokens",
        basis=AT_MOST,
    )
    if lever.speedup <= MIN_SPEEDUP:
        return None
    return page_finding(
        "batch_too_small",
        queue_share(load),
        f"{load.running:.0f} requests run while {load.waiting:.0f} wait, "
        f"and the KV cache is {used:.0%} full: the batch is limited, {queue_text(load)}",
        reading,
        ("running", "waiting", "kv_used_fraction", "queue_s"),
        (lever,),
    )


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait, and neither memory nor a larger batch would help: the device has more than it can do."""
    load = load_of(reading)
    if load is None or not waits(load) or load.waiting < 1:
        return None
    if any(other(reading, plan) is not None for other in (preemption, kv_pressure, adapter_thrashing, batch_too_small)):
        return None
    return page_finding(
        "too_few_replicas",
        queue_share(load),
        f"{load.waiting:.0f} requests wait for {load.running:.0f} that "
        f"run, and a larger batch would slow them as much: {queue_text(load)}",
        reading,
        ("waiting", "running", "queue_s", "kv_used_fraction"),
        (*more_replicas(reading, load), *fuller_steps(reading, load)),
    )


def queueing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests waited long since the server started, although none waits now: bursts."""
    load = load_of(reading)
    if (
        load is None
        or load.waiting >= 1
        or queue_share(load) < PAGE_QUEUE_SHARE
        or load.preempted >= PAGE_PREEMPTIONS_PER_REQUEST
    ):
        return None
    without = Lever(
        title="one more replica for the bursts",
        action=replica_text(reading, 2),
        of="e2e_s",
        speedup=speedup(min(0.95, queue_share(load)), float("inf")),
        risk="a device more",
        basis="at most: no queue at all",
    )
    return page_finding(
        "queueing",
        queue_share(load),
        f"no request waits now, but {queue_text(load)}: requests come in bursts",
        reading,
        ("queue_s", "waiting", "e2e_s"),
        (without,),
    )


def prefill_interference(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prefill in the same step as decodes makes some inter-token latencies many times longer."""
    load, worst = load_of(reading), reading.get("itl_p99_s")
    if load is None or not reading.get("itl_p50_s") or not worst or load.preempted >= PAGE_PREEMPTIONS_PER_REQUEST:
        return None
    usual = load.usual_gap_s
    if worst < ITL_P99_OVER_P50 * usual or load.prompts_share < PREFILL_GAP_SHARE:
        return None
    levers = tuple(smaller_chunks(reading, load, worst))
    if not levers and load.prompts_share >= PREFILL_DOMINATES_SHARE:  # steps are as full of prompts as they must be
        levers = tuple(more_replicas(reading, load))
    if all(lever.speedup <= MIN_SPEEDUP for lever in levers):
        return None
    return page_finding(
        "prefill_interference",
        load.prompts_share,
        f"one gap in a hundred between tokens is "
        f"{worst / usual:.0f} times the usual {seconds_text(usual)}: prompts hold decodes up",
        reading,
        ("itl_p99_s", "itl_p50_s", "prefill_s"),
        levers,
    )


def cache_misses(reading: Reading, plan: Plan | None) -> Finding | None:
    """The prefix cache is off while prompts take much of the engine's time."""
    load = load_of(reading)
    off = reading.settings.get("enable_prefix_caching", reading.settings.get("prefix_cache", "")).lower() == "false"
    if load is None or not off or load.prompts_share < PREFILL_SHARE:
        return None
    asked, seen = reading.get("tokens_in_total"), reading.get("prefix_repeated_total")
    told = seen / asked if asked and seen is not None else None
    share = load.prompts_share * (told or 0.0)
    most = None if told is not None else speedup(min(0.95, load.prompts_share), float("inf"))
    lever = flag_lever(
        reading,
        "serve.prefix_cache",
        True,
        "keep the KV blocks of prompts that begin alike",
        speedup(min(0.95, share), float("inf")),
        risk="none",
        at_most=most,
        basis="Amdahl over the engine's time on prompts that repeat",
    )
    unknown = "" if most is None else "; how much of them repeats the page does not say, and trying costs nothing"
    return page_finding(
        "cache_misses",
        share,
        f"{load.prompts_share:.0%} of the engine's time computes prompts, and the prefix cache is off{unknown}",
        reading,
        ("tokens_in", "prefill_s"),
        (lever,),
    )


RULES: tuple[Rule, ...] = (
    preemption,
    kv_pressure,
    adapter_thrashing,
    batch_too_small,
    too_few_replicas,
    queueing,
    prefill_interference,
    cache_misses,
    rejected_drafts,
)
