"""The KV cache: too small for those who run, or prompts computed again that it could have kept.

Where running requests lack blocks themselves, what was evicted is no cause of its own.
"""

from __future__ import annotations

from armillary.diagnosis.evidence.finding import Evidence, Finding
from armillary.diagnosis.evidence.serving_run import Service, blocks, prompt_of_ttft, queue, waiting, with_queue
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
    here = Service(reading, plan)
    if here.bottleneck != "blocks" or here.bottlenecks["blocks"] < QUEUE_SHARE or put_back(here):
        return None
    return _blocks_lacking(here, "kv_pressure")


def preemption(reading: Reading, plan: Plan | None) -> Finding | None:
    """Running requests are put back for lack of blocks, and computed again."""
    here = Service(reading, plan)
    if not preempt(here):
        return None
    return _blocks_lacking(here, "preemption")


def prefix_cache_off(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts begin alike and are computed anew each time, because nothing is kept."""
    here = Service(reading, plan)
    return _misses(here, "prefix_cache_off", "the prefix cache is off") if not here.serve.prefix_cache else None


def prefix_cache_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts begin alike, but what was kept had to make room before it was asked for again."""
    here = Service(reading, plan)
    evicted, ended = here.total("prefix_evicted_total"), here.total("requests_total")
    if not here.serve.prefix_cache or evicted < EVICTED_REQUEST_SHARE * max(1.0, ended):
        return None  # what came twice at once was not there to be found
    if (here.bottleneck == "blocks" and here.bottlenecks["blocks"] >= QUEUE_SHARE) or put_back(here):
        return None  # running requests lack blocks themselves: that is the deeper cause
    return _misses(here, "prefix_cache_too_small", "the KV cache is too small to keep them")


def preempt(here: Service) -> bool:
    """Whether preemption is what happens, and not bad luck now and then."""
    times, again = here.total("preemptions_total"), here.total("recomputed_total")
    done = here.total("tokens_in_total") + here.total("tokens_out_total")
    ended = here.total("requests_total") or len(here.reading.requests)
    return bool(times) and (
        times > PREEMPTIONS_PER_REQUEST * max(1.0, ended) or again > RECOMPUTED_TOKEN_SHARE * max(1.0, done)
    )


def _blocks_lacking(here: Service, cause: str) -> Finding | None:
    reading, cost = here.reading, here.cost
    again = here.total("recomputed_total")
    again_s = again * cost.prefill_s / here.whole_s if cost is not None and here.whole_s else 0.0
    saved = min(0.99, here.share_saved(min(here.wanted, here.serve.max_running)) + again_s)
    share = with_queue(here, saved)
    if share < MIN_SAVED_SHARE:
        return None
    times = here.total("preemptions_total")
    how = (
        f"{times:.0f} times a running request was put back, {again:,.0f} tokens computed again"
        if times
        else f"{here.decoding:.0f} of {here.serve.max_running} rows decode while {here.wanted:.0f} requests are there"
    )
    return Finding(
        loop="product",
        cause="preemption" if cause == "preemption" else "kv_pressure",
        rule=cause,
        share=share,
        says=f"the KV cache of {reading.get('kv_capacity_tokens') or 0:,.0f} tokens is too small for what comes: {how}",
        evidence=(blocks(here), Evidence(gauge="preemptions_total", value=times), waiting(here), queue(here)),
    )


def in_vain(here: Service) -> float:
    """Share of the time in steps spent on prompt tokens that were there before."""
    return here.prompt_share * min(1.0, here.not_found / here.computed) if here.computed else 0.0


def _misses(here: Service, rule: str, why: str) -> Finding | None:
    asked = here.total("tokens_in_total") or here.computed
    if here.not_found < MISSED_PREFIX_SHARE * max(1.0, asked):
        return None
    saved = in_vain(here)
    of_first = min(0.99, here.not_found / max(1.0, here.computed)) * prompt_of_ttft(here)
    share = saved if here.batch_job else max(with_queue(here, saved), of_first)
    if share < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="cache_misses",
        rule=rule,
        share=share,
        says=f"{here.not_found / max(1.0, asked):.0%} of prompt tokens were there before and are computed again: {why}",
        evidence=(
            Evidence(
                gauge="prefix_hits_total",
                value=here.total("prefix_hits_total"),
                expected=here.repeated,
                against="prompt tokens that came before",
            ),
            Evidence(gauge="prefix_evicted_total", value=here.total("prefix_evicted_total")),
            Evidence(gauge="tokens_in_total", value=asked),
        ),
    )
