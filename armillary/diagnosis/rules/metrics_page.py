"""Rules for a server of which only the metrics page is known, ours or another one; levers name that server's flags.

With no step or request to replay, gains follow from Little's law over the page's means: see evidence/server_load.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever, Rule
from armillary.diagnosis.evidence.server_load import Load, load_of
from armillary.diagnosis.evidence.thresholds import (
    ARRIVALS_OVER_FINISHED,
    ITL_P99_OVER_P50,
    KV_FULL_SHARE,
    KV_SPARE_SHARE,
    MAX_REPLICAS,
    MIN_SPEEDUP,
    MIN_STEP_TOKENS,
    PAGE_PREEMPTIONS_PER_REQUEST,
    PAGE_QUEUE_SHARE,
    PREFILL_DOMINATES_SHARE,
    PREFILL_GAP_SHARE,
    PREFILL_SHARE,
    PROMPT_BURST_RATIO,
    SERVER_MEMORY_SHARE,
    TTFT_QUEUE_SHARE,
    WAITING_PER_RUNNING,
)
from armillary.diagnosis.readings.prometheus import number_of
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.server_metrics import SERVERS
from armillary.diagnosis.rules.speculation import rejected_drafts
from armillary.profiling.analysis.amdahl import speedup
from armillary.spec.plan import Plan
from armillary.units import seconds_text

LITTLE = "Little's law over the page's means"
AT_MOST = f"at most: {LITTLE}, and a decode costs no more than a prompt's token"


def preemption(reading: Reading, plan: Plan | None) -> Finding | None:
    """Running requests are preempted for lack of KV memory, and recomputed."""
    load, used = load_of(reading), reading.get("kv_used_fraction")
    if (
        load is None
        or load.preempted < PAGE_PREEMPTIONS_PER_REQUEST
        or (used is not None and used < KV_SPARE_SHARE and not load.over)
    ):
        return None
    levers = tuple(_more_kv(reading, load))
    share = min(0.95, load.recompute_share + _queued(load) * (1 - load.recompute_share))
    gauges = ("preemptions_total", "kv_used_fraction", "waiting")
    return _finding(
        "preemption",
        share,
        f"{load.preempted:.2f} preemptions per request for lack of KV cache; {_queue_text(load)}",
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
        or not _waits(load)
    ):
        return None
    levers = tuple(_more_kv(reading, load))
    return _finding(
        "kv_pressure",
        _queued(load),
        f"the KV cache is {used:.0%} full and requests wait for it: {_queue_text(load)}",
        reading,
        ("kv_used_fraction", "waiting", "queue_s"),
        levers,
    )


def batch_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait though there is KV memory left and a larger batch would hardly slow a step."""
    load, used = load_of(reading), reading.get("kv_used_fraction")
    if load is None or used is None or used >= KV_SPARE_SHARE or not _waits(load) or load.waiting < 1:
        return None
    if load.waiting < WAITING_PER_RUNNING * load.running:  # those wait for the prompts before them, or came at once
        return None
    if (
        load.prompts_share >= PREFILL_DOMINATES_SHARE
    ):  # requests are kept out by the prompts before them, not by a limit of the batch
        return None
    batch = _batch(load, used)
    lever = _change(
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
    return _finding(
        "batch_too_small",
        _queued(load),
        f"{load.running:.0f} requests run while {load.waiting:.0f} wait, "
        f"and the KV cache is {used:.0%} full: the batch is limited, {_queue_text(load)}",
        reading,
        ("running", "waiting", "kv_used_fraction", "queue_s"),
        (lever,),
    )


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait, and neither memory nor a larger batch would help: the device has more than it can do."""
    load = load_of(reading)
    if load is None or not _waits(load) or load.waiting < 1:
        return None
    if any(other(reading, plan) is not None for other in (preemption, kv_pressure, batch_too_small)):
        return None
    return _finding(
        "too_few_replicas",
        _queued(load),
        f"{load.waiting:.0f} requests wait for {load.running:.0f} that "
        f"run, and a larger batch would slow them as much: {_queue_text(load)}",
        reading,
        ("waiting", "running", "queue_s", "kv_used_fraction"),
        (*_replicas(reading, load), *_fuller_steps(reading, load)),
    )


def queueing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests waited long since the server started, although none waits now: bursts."""
    load = load_of(reading)
    if (
        load is None
        or load.waiting >= 1
        or _queued(load) < PAGE_QUEUE_SHARE
        or load.preempted >= PAGE_PREEMPTIONS_PER_REQUEST
    ):
        return None
    without = Lever(
        title="one more replica for the bursts",
        action=_replica_text(reading, 2),
        of="e2e_s",
        speedup=speedup(min(0.95, _queued(load)), float("inf")),
        risk="a device more",
        basis="at most: no queue at all",
    )
    return _finding(
        "queueing",
        _queued(load),
        f"no request waits now, but {_queue_text(load)}: requests come in bursts",
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
    levers = tuple(_smaller_chunks(reading, load, worst))
    if not levers and load.prompts_share >= PREFILL_DOMINATES_SHARE:  # steps are as full of prompts as they must be
        levers = tuple(_replicas(reading, load))
    if all(lever.speedup <= MIN_SPEEDUP for lever in levers):
        return None
    return _finding(
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
    lever = _change(
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
    return _finding(
        "cache_misses",
        share,
        f"{load.prompts_share:.0%} of the engine's time computes prompts, and the prefix cache is off{unknown}",
        reading,
        ("tokens_in", "prefill_s"),
        (lever,),
    )


# --- what the rules share


def _queued(load: Load) -> float:
    """Share of the latency that limits: of the whole request, or of the first token where only that is felt and there
    is more of a queue than what came since the last step. Means may be of a long history: a queue that is there now
    counts by Little's law, W / (R + W)."""
    of_request = load.queue_s / load.e2e_s if load.e2e_s > 0 else 0.0
    first = load.queue_s / load.ttft_s if load.ttft_s > 0 else 0.0
    felt = first >= TTFT_QUEUE_SHARE and load.waiting >= PAGE_QUEUE_SHARE * load.running
    now = load.waiting / (load.running + load.waiting) if load.waiting >= WAITING_PER_RUNNING * load.running else 0.0
    return max(now, first if felt and of_request < PAGE_QUEUE_SHARE else of_request)


def _waits(load: Load) -> bool:
    return _queued(load) >= PAGE_QUEUE_SHARE


def _queue_text(load: Load) -> str:
    return f"{seconds_text(load.queue_s)} of {seconds_text(load.e2e_s)} per request are queue"


def _batch(load: Load, used: float) -> int:
    """All requests in the system, as far as the KV cache holds them."""
    wanted, fits = load.running + load.waiting, int(load.running * KV_FULL_SHARE / max(0.01, used))
    return max(1, min(_power_of_two(2 * wanted - 1), fits // 8 * 8 if fits > 8 else fits))


def _power_of_two(number: float) -> int:
    """The largest that is not above it."""
    return 1 << max(0, int(number).bit_length() - 1)


def _smaller_chunks(reading: Reading, load: Load, worst: float) -> Iterator[Lever]:
    """A step twice as long as one without prompts, or as long as lets prompts keep up; none where they hardly do."""
    wanted = _power_of_two(max(MIN_STEP_TOKENS, load.running * 2, load.usual_gap_s / load.prompt_token_s))
    least = load.running + PROMPT_BURST_RATIO * load.step_prompts
    tokens = wanted if wanted >= least else _power_of_two(2 * least - 1)
    if tokens <= load.full_step / 2:
        then = load.usual_gap_s + tokens * load.prompt_token_s
        yield _change(
            reading,
            "serve.max_tokens_per_step",
            tokens,
            f"at most {tokens} tokens per step",
            worst / then,
            of="itl_p99_s",
            risk="long prompts take more steps",
            basis="a step's time is its decodes' and its prompt tokens', both from the page",
        )


def _more_kv(reading: Reading, load: Load) -> Iterator[Lever]:
    """A cache that holds more: half the bytes per token, or more of the device's memory; else another replica."""
    enough = load.waiting <= load.running  # else those who wait fill the new space too, and are preempted as now
    no_recompute = 1 / (1 - load.recompute_share) if enough else 1.0
    wide, gain = "8" not in reading.settings.get("cache_dtype", reading.settings.get("kv_dtype", "")), 0.0
    if wide:
        gain = load.gain(min(2 * load.running, load.running + load.waiting)) * no_recompute
        yield _change(
            reading,
            "serve.kv_dtype",
            "fp8",
            "KV cache in 8 bits: twice the tokens",
            gain,
            risk="answers may differ a little",
        )
    share = number_of(reading.settings.get("gpu_memory_utilization"))
    if share is not None and share < SERVER_MEMORY_SHARE:
        yield Lever(
            title=f"more of the device for the cache: {share:g} → {SERVER_MEMORY_SHARE:g}",
            speedup=load.gain(load.running * SERVER_MEMORY_SHARE / share),
            action=f"--gpu-memory-utilization {SERVER_MEMORY_SHARE:g}",
            of="tokens_out_per_s",
            basis=f"at least: {LITTLE}",
            risk="less to spare for long prompts",
        )
    if not wide or gain <= MIN_SPEEDUP:
        yield from _replicas(reading, load, no_recompute)


def _replicas(reading: Reading, load: Load, no_recompute: float = 1.0) -> Iterator[Lever]:
    """As many replicas as finish what arrives, where the queue has only grown; else as many as hold all requests."""
    now = int(reading.get("replicas") or 1)
    if load.demand > ARRIVALS_OVER_FINISHED:
        times = min(MAX_REPLICAS, max(2, ceil(load.demand)))
        gain, basis = min(times, load.demand), "requests that came over requests answered"
    else:
        times = min(MAX_REPLICAS, max(2, ceil((load.running + load.waiting) / load.running)))
        gain, basis = min(float(times), load.gain(load.running, times)) * no_recompute, LITTLE
    yield Lever(
        title=f"replicas {now} → {now * times}",
        action=_replica_text(reading, now * times),
        speedup=gain,
        of="tokens_out_per_s",
        risk=f"{times} times the devices",
        basis=basis,
    )


def _fuller_steps(reading: Reading, load: Load) -> Iterator[Lever]:
    if load.step_tokens and load.prompts_share >= PREFILL_DOMINATES_SHARE and load.fuller_steps(2.0) > MIN_SPEEDUP:
        tokens = 4 * _power_of_two(load.step_tokens - 1)
        yield _change(
            reading,
            "serve.max_tokens_per_step",
            tokens,
            f"up to {tokens} tokens per step",
            load.fuller_steps(2.0),
            risk="longer gaps between tokens",
            basis="what a step costs beside its tokens, paid half as often",
        )


def _replica_text(reading: Reading, count: int) -> str:
    return SERVERS[reading.by].replica.format(value=count)


def _change(
    reading: Reading,
    key: str,
    value: object,
    title: str,
    gain: float,
    *,
    risk: str,
    of: str = "tokens_out_per_s",
    basis: str = LITTLE,
    at_most: float | None = None,
) -> Lever:
    """A lever as the server's own flag; for our server a key of the recipe."""
    flag = SERVERS[reading.by].flags.get(key)
    said = Lever(title=title, speedup=gain, at_most=at_most, of=of, risk=risk, basis=basis)
    return replace(said, change={key: value}) if flag is None else replace(said, action=flag.format(value=value))


def _finding(
    cause: Cause, share: float, says: str, reading: Reading, gauges: tuple[str, ...], levers: tuple[Lever, ...]
) -> Finding:
    limits = {"kv_used_fraction": (KV_FULL_SHARE, "full"), "waiting": (0.0, "no queue")}
    evidence = tuple(
        Evidence(gauge=name, value=value, expected=limits[name][0], against=limits[name][1])
        if name in limits
        else Evidence(gauge=name, value=value)
        for name in gauges
        if (value := reading.get(name)) is not None
    )
    best = tuple(sorted(levers, key=lambda lever: -lever.speedup))
    return Finding(loop="product", cause=cause, rule=cause, says=says, share=share, evidence=evidence, levers=best)


RULES: tuple[Rule, ...] = (
    preemption,
    kv_pressure,
    batch_too_small,
    too_few_replicas,
    queueing,
    prefill_interference,
    cache_misses,
    rejected_drafts,
)
