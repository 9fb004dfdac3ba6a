"""Rules on the KV cache: too small for the running requests, or for prefixes that are computed again.

Where running requests lack blocks themselves, evicted prefixes are not a cause of their own.
"""

from typing import Literal

from armillary.diagnosis.evidence.finding import Evidence, Finding
from armillary.diagnosis.evidence.serving_run import ServingRun, blocks, prompt_of_ttft, queue, waiting, with_queue
from armillary.diagnosis.evidence.thresholds import (
    EVICTED_REQUEST_SHARE,
    MIN_SAVED_SHARE,
    MISSED_PREFIX_SHARE,
    PREEMPTIONS_PER_REQUEST,
    QUEUE_SHARE,
    RECOMPUTED_TOKEN_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan


def kv_pressure(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait for blocks of the KV cache while rows and budget are free."""
    run = ServingRun(reading, plan)
    if run.bottleneck != "blocks" or run.bottlenecks["blocks"] < QUEUE_SHARE or is_preempting(run):
        return None
    return _blocks_lacking(run, "kv_pressure")


def preemption(reading: Reading, plan: Plan | None) -> Finding | None:
    """Running requests are preempted for lack of blocks, and recomputed."""
    run = ServingRun(reading, plan)
    return _blocks_lacking(run, "preemption") if is_preempting(run) else None


def prefix_cache_off(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts share prefixes and are computed anew each time, because the prefix cache is off."""
    run = ServingRun(reading, plan)
    return _misses(run, "prefix_cache_off", "the prefix cache is off") if not run.serve.prefix_cache else None


def prefix_cache_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts share prefixes, but cached blocks are evicted before they are needed again."""
    run = ServingRun(reading, plan)
    evicted, ended = run.total("prefix_evicted_total"), run.total("requests_total")
    if not run.serve.prefix_cache or evicted < EVICTED_REQUEST_SHARE * max(1.0, ended):
        return None  # what came twice at once was not there to be found
    if (run.bottleneck == "blocks" and run.bottlenecks["blocks"] >= QUEUE_SHARE) or is_preempting(run):
        return None  # running requests lack blocks themselves: that is the deeper cause
    return _misses(run, "prefix_cache_too_small", "the KV cache is too small to keep them")


def is_preempting(run: ServingRun) -> bool:
    """Whether preemption is frequent enough to be a cause."""
    times, recomputed = run.total("preemptions_total"), run.total("recomputed_total")
    tokens = run.total("tokens_in_total") + run.total("tokens_out_total")
    ended = run.total("requests_total") or len(run.reading.requests)
    often = times > PREEMPTIONS_PER_REQUEST * max(1.0, ended)
    return times > 0 and (often or recomputed > RECOMPUTED_TOKEN_SHARE * max(1.0, tokens))


def _blocks_lacking(run: ServingRun, cause: Literal["kv_pressure", "preemption"]) -> Finding | None:
    cost, tokens = run.cost, run.total("recomputed_total")
    recompute = tokens * cost.prefill_s / run.total_busy_s if cost is not None and run.total_busy_s else 0.0
    share = with_queue(run, min(0.99, run.share_saved(min(run.wanted, run.serve.max_running)) + recompute))
    if share < MIN_SAVED_SHARE:
        return None
    times, capacity = run.total("preemptions_total"), run.reading.get("kv_capacity_tokens") or 0.0
    how = (
        f"{times:.0f} preemptions, {tokens:,.0f} tokens recomputed"
        if times
        else f"{run.decoding:.0f} of {run.serve.max_running} rows decode while {run.wanted:.0f} requests are there"
    )
    return Finding(
        loop="product",
        cause=cause,
        rule=cause,
        share=share,
        says=f"the KV cache of {capacity:,.0f} tokens is too small for what comes: {how}",
        evidence=(blocks(run), Evidence(gauge="preemptions_total", value=times), waiting(run), queue(run)),
    )


def repeated_prefill_share(run: ServingRun) -> float:
    """Share of the time in steps spent on prefill of repeated prefixes."""
    return run.prompt_share * min(1.0, run.not_found / run.computed) if run.computed else 0.0


def _misses(run: ServingRun, rule: str, why: str) -> Finding | None:
    asked = run.total("tokens_in_total") or run.computed
    if run.not_found < MISSED_PREFIX_SHARE * max(1.0, asked):
        return None
    saved = repeated_prefill_share(run)
    of_first = min(0.99, run.not_found / max(1.0, run.computed)) * prompt_of_ttft(run)
    share = saved if run.batch_job else max(with_queue(run, saved), of_first)
    if share < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="cache_misses",
        rule=rule,
        share=share,
        says=f"{run.not_found / max(1.0, asked):.0%} of prompt tokens were there before and are computed again: {why}",
        evidence=(
            Evidence(
                gauge="prefix_hits_total",
                value=run.total("prefix_hits_total"),
                expected=run.repeated,
                against="prompt tokens that came before",
            ),
            Evidence(gauge="prefix_evicted_total", value=run.total("prefix_evicted_total")),
            Evidence(gauge="tokens_in_total", value=asked),
        ),
    )
