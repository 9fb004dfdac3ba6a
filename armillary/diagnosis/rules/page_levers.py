"""What the rules on a server's metrics page share: how long requests wait, and levers as the server's own flags.

With no step or request to replay, gains follow from Little's law over the page's means: see evidence/server_load.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from armillary.diagnosis.evidence.finding import Cause, Evidence, Finding, Lever
from armillary.diagnosis.evidence.server_load import Load
from armillary.diagnosis.evidence.thresholds import (
    ARRIVALS_OVER_FINISHED,
    KV_FULL_SHARE,
    MAX_REPLICAS,
    MIN_SPEEDUP,
    MIN_STEP_TOKENS,
    PAGE_QUEUE_SHARE,
    PREFILL_DOMINATES_SHARE,
    PROMPT_BURST_RATIO,
    SERVER_MEMORY_SHARE,
    TTFT_QUEUE_SHARE,
    WAITING_PER_RUNNING,
)
from armillary.diagnosis.readings.prometheus import number_of
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.server_metrics import SERVERS
from armillary.units import seconds_text

LITTLE = "Little's law over the page's means"
AT_MOST = f"at most: {LITTLE}, and a decode costs no more than a prompt's token"


def queue_share(load: Load) -> float:
    """Share of the latency that limits: of the whole request, or of the first token where only that is felt and there
    is more of a queue than what came since the last step. Means may be of a long history: a queue that is there now
    counts by Little's law, W / (R + W)."""
    of_request = load.queue_s / load.e2e_s if load.e2e_s > 0 else 0.0
    first = load.queue_s / load.ttft_s if load.ttft_s > 0 else 0.0
    felt = first >= TTFT_QUEUE_SHARE and load.waiting >= PAGE_QUEUE_SHARE * load.running
    now = load.waiting / (load.running + load.waiting) if load.waiting >= WAITING_PER_RUNNING * load.running else 0.0
    return max(now, first if felt and of_request < PAGE_QUEUE_SHARE else of_request)


def waits(load: Load) -> bool:
    return queue_share(load) >= PAGE_QUEUE_SHARE


def queue_text(load: Load) -> str:
    return f"{seconds_text(load.queue_s)} of {seconds_text(load.e2e_s)} per request are queue"


def largest_batch(load: Load, used: float) -> int:
    """All requests in the system, as far as the KV cache holds them."""
    wanted, fits = load.running + load.waiting, int(load.running * KV_FULL_SHARE / max(0.01, used))
    return max(1, min(_power_of_two(2 * wanted - 1), fits // 8 * 8 if fits > 8 else fits))


def _power_of_two(number: float) -> int:
    """The largest that is not above it."""
    return 1 << max(0, int(number).bit_length() - 1)


def smaller_chunks(reading: Reading, load: Load, worst: float) -> Iterator[Lever]:
    """A step twice as long as one without prompts, or as long as lets prompts keep up; none where they hardly do."""
    wanted = _power_of_two(max(MIN_STEP_TOKENS, load.running * 2, load.usual_gap_s / load.prompt_token_s))
    least = load.running + PROMPT_BURST_RATIO * load.step_prompts
    tokens = wanted if wanted >= least else _power_of_two(2 * least - 1)
    if tokens <= load.full_step / 2:
        then = load.usual_gap_s + tokens * load.prompt_token_s
        yield flag_lever(
            reading,
            "serve.max_tokens_per_step",
            tokens,
            f"at most {tokens} tokens per step",
            worst / then,
            of="itl_p99_s",
            risk="long prompts take more steps",
            basis="a step's time is its decodes' and its prompt tokens', both from the page",
        )


def more_kv(reading: Reading, load: Load) -> Iterator[Lever]:
    """A cache that holds more: half the bytes per token, or more of the device's memory; else another replica."""
    enough = load.waiting <= load.running  # else those who wait fill the new space too, and are preempted as now
    no_recompute = 1 / (1 - load.recompute_share) if enough else 1.0
    wide, gain = "8" not in reading.settings.get("cache_dtype", reading.settings.get("kv_dtype", "")), 0.0
    if wide:
        gain = load.gain(min(2 * load.running, load.running + load.waiting)) * no_recompute
        yield flag_lever(
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
        yield from more_replicas(reading, load, no_recompute)


def more_replicas(reading: Reading, load: Load, no_recompute: float = 1.0) -> Iterator[Lever]:
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
        action=replica_text(reading, now * times),
        speedup=gain,
        of="tokens_out_per_s",
        risk=f"{times} times the devices",
        basis=basis,
    )


def fuller_steps(reading: Reading, load: Load) -> Iterator[Lever]:
    if load.step_tokens and load.prompts_share >= PREFILL_DOMINATES_SHARE and load.fuller_steps(2.0) > MIN_SPEEDUP:
        tokens = 4 * _power_of_two(load.step_tokens - 1)
        yield flag_lever(
            reading,
            "serve.max_tokens_per_step",
            tokens,
            f"up to {tokens} tokens per step",
            load.fuller_steps(2.0),
            risk="longer gaps between tokens",
            basis="what a step costs beside its tokens, paid half as often",
        )


def replica_text(reading: Reading, count: int) -> str:
    return SERVERS[reading.by].replica.format(value=count)


def flag_lever(
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


def page_finding(
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
