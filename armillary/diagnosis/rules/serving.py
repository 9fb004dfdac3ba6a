"""The product loop: what keeps requests waiting, stretches gaps between tokens or computes in vain.

Several of these show as the same queue. A rule fires where its cause is the deepest that explains it: batches that are
put together, then rows, blocks and budgets that are too small; only where a server is set well and still cannot keep up
are there too few of them.
"""

from __future__ import annotations

from armillary.diagnosis.evidence.finding import Evidence, Finding, Rule
from armillary.diagnosis.evidence.serving_run import (
    Service,
    blocks,
    mean_of,
    prompt_of_ttft,
    queue,
    waiting,
    with_queue,
)
from armillary.diagnosis.evidence.thresholds import (
    MIN_SAVED_SHARE,
    OVERLOADED_QUEUE_SHARE,
    QUEUE_CLEARING_SHARE,
    QUEUE_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.engine_step import deciding_alone, graphs_off, prefill_interference
from armillary.diagnosis.rules.kv_cache import (
    in_vain,
    kv_pressure,
    preemption,
    prefix_cache_off,
    prefix_cache_too_small,
)
from armillary.spec.plan import Plan


def static_batching(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait for a batch to end, or to be put together, while rows are free."""
    here = Service(reading, plan)
    if here.serve.batching == "continuous" or max(here.queued_share, here.queue_share) < QUEUE_SHARE:
        return None  # where a window is waited for, there are no steps
    saved = here.share_saved(min(here.serve.max_running, max(here.wanted, here.decoding)))
    share = saved if here.batch_job else max(saved, here.queue_share)  # it makes the queue, however many come
    if share < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="static_batching",
        rule="static_batching",
        share=share,
        says=f"batching is {here.serve.batching}: {here.decoding:.1f} of {here.serve.max_running} rows decode while "
        f"{here.wanted:.0f} requests are there",
        evidence=(
            Evidence(
                gauge="decode_tokens",
                value=here.decoding,
                expected=float(here.serve.max_running),
                against="rows of the batch",
            ),
            waiting(here),
            queue(here),
        ),
    )


def batch_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """Every row is taken, requests wait, and more rows would make steps little longer."""
    here = Service(reading, plan)
    if here.serve.batching != "continuous" or here.bottleneck != "rows" or here.bottlenecks["rows"] < QUEUE_SHARE:
        return None
    saved = here.share_saved(min(here.wanted, _rows_that_fit(here)))
    if saved < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="batch_too_small",
        rule="batch_too_small",
        share=with_queue(here, saved),
        says=f"all {here.serve.max_running} rows are taken while {here.wanted - here.serve.max_running:.0f} wait and "
        f"{1 - (reading.get('kv_used_fraction') or 0):.0%} of the KV cache is free",
        evidence=(
            Evidence(gauge="running", value=here.serve.max_running, expected=here.wanted, against="requests there"),
            waiting(here),
            blocks(here),
            queue(here),
        ),
    )


def queueing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts wait for their turn in steps whose budget for them is so small that each mostly costs its base."""
    here = Service(reading, plan)
    late = (
        "ttft_p99_s" in here.missed and here.filled_share >= OVERLOADED_QUEUE_SHARE
    )  # nobody waits, but all go in slowly
    # a batch job begins with prompts, which is no queue
    kept_out = here.bottleneck == "budget" and here.bottlenecks["budget"] >= (
        OVERLOADED_QUEUE_SHARE if here.batch_job else QUEUE_SHARE
    )
    if not (kept_out or late) or here.cost is None or in_vain(here) >= MIN_SAVED_SHARE:
        return None
    tokens = mean_of(reading, "prefill_tokens")
    alone = [one for one in reading.steps if one.get("prefill_tokens") and not one.get("decode_tokens")]
    saved = max(
        here.share_saved(min(here.wanted, here.rows)),
        len(alone) * here.cost.base_s / 2 / here.busy_s,
        prompt_of_ttft(here) * here.filled_share if late else 0.0,
    )
    if saved < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="queueing",
        rule="queueing",
        share=with_queue(here, min(0.99, saved)),
        says=f"requests wait while steps take {tokens:.0f} prompt tokens at a time, which cost "
        f"{tokens * here.cost.prefill_s / max(here.cost.base_s, 1e-12):.1f} times what a step costs anyway",
        evidence=(
            Evidence(
                gauge="prefill_tokens",
                value=tokens,
                expected=float(here.serve.max_tokens_per_step),
                against="budget of a step",
            ),
            waiting(here),
            queue(here),
        ),
    )


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests come faster than the server answers them. Whatever else is wrong with it comes first: this is what is
    left where nothing else helps."""
    here = Service(reading, plan)
    crowded = here.queued_share >= OVERLOADED_QUEUE_SHARE and here.queue_share >= OVERLOADED_QUEUE_SHARE
    refused = here.total("rejected_total") > MIN_SAVED_SHARE * max(1.0, here.total("requests_total"))
    if not (crowded or refused) or (here.batch_job and not here.missed):
        return None
    deeper = [found.share for rule in DEEPER if (found := rule(reading, plan)) is not None]
    share = max(here.queue_share, OVERLOADED_QUEUE_SHARE if refused else 0.0)
    return Finding(
        loop="product",
        cause="too_few_replicas",
        rule="too_few_replicas",
        share=min([share, *_behind(deeper, share)]),
        says=f"requests come faster than one server answers them: they spend {here.queue_share:.0%} of their time "
        "waiting",
        evidence=(
            queue(here),
            waiting(here),
            Evidence(gauge="running", value=mean_of(reading, "running"), expected=float(here.rows), against="rows"),
        ),
    )


def _behind(shares: list[float], queue_share: float) -> list[float]:
    """Just below those that explain the whole queue."""
    return [0.95 * share for share in shares if share >= max(QUEUE_CLEARING_SHARE, queue_share)]


def _rows_that_fit(here: Service) -> float:
    """Rows whose blocks the KV cache holds, as those of now do."""
    full = [one for one in here.queued if one["running"] >= here.rows and "kv_used_fraction" in one]
    used = sum(float(one["kv_used_fraction"]) for one in full)
    return sum(float(one["running"]) for one in full) / used if used else float("inf")


DEEPER: tuple[Rule, ...] = (
    static_batching,
    batch_too_small,
    kv_pressure,
    preemption,
    prefix_cache_off,
    prefix_cache_too_small,
    queueing,
    graphs_off,
)
"""what a server that cannot keep up may suffer from instead of being too few"""
RULES: tuple[Rule, ...] = (*DEEPER, prefill_interference, too_few_replicas, deciding_alone)
