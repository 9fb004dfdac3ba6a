"""Rules of the product loop: what keeps requests waiting, stretches inter-token latency or computes needlessly.

Several causes show as the same queue. A rule fires where its cause is the deepest that explains the queue: static
batching, then too few rows, blocks or budget; only a well-set server that still cannot keep up needs more replicas.
"""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Rule
from armillary.diagnosis.evidence.serving_run import (
    ServingRun,
    blocks,
    mean_of,
    prompt_of_ttft,
    queue,
    waiting,
    with_queue,
)
from armillary.diagnosis.evidence.thresholds import (
    AFTER_OWNER_SHARE,
    MIN_SAVED_SHARE,
    OVERLOADED_QUEUE_SHARE,
    QUEUE_CLEARING_SHARE,
    QUEUE_SHARE,
)
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.rules.engine_step import deciding_alone, graphs_off, prefill_interference
from armillary.diagnosis.rules.kv_cache import (
    kv_pressure,
    preemption,
    prefix_cache_off,
    prefix_cache_too_small,
    repeated_prefill_share,
)
from armillary.diagnosis.rules.speculation import rejected_drafts
from armillary.spec.plan import Plan


def static_batching(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests wait for a batch to finish, or to fill, while rows are free."""
    run = ServingRun(reading, plan)
    if run.serve.batching == "continuous" or max(run.queued_share, run.queue_share) < QUEUE_SHARE:
        return None  # where a window is waited for, there are no steps
    saved = run.share_saved(min(run.serve.max_running, max(run.wanted, run.decoding)))
    share = saved if run.batch_job else max(saved, run.queue_share)  # it makes the queue, however many come
    if share < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="static_batching",
        rule="static_batching",
        share=share,
        says=f"batching is {run.serve.batching}: {run.decoding:.1f} of {run.serve.max_running} rows decode while "
        f"{run.wanted:.0f} requests are there",
        evidence=(
            Evidence(
                gauge="decode_tokens",
                value=run.decoding,
                expected=float(run.serve.max_running),
                against="rows of the batch",
            ),
            waiting(run),
            queue(run),
        ),
    )


def batch_too_small(reading: Reading, plan: Plan | None) -> Finding | None:
    """All rows are taken, requests wait, and more rows would lengthen steps only a little."""
    run = ServingRun(reading, plan)
    if run.serve.batching != "continuous" or run.bottleneck != "rows" or run.bottlenecks["rows"] < QUEUE_SHARE:
        return None
    saved = run.share_saved(min(run.wanted, _rows_that_fit(run)))
    if saved < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="batch_too_small",
        rule="batch_too_small",
        share=with_queue(run, saved),
        says=f"all {run.serve.max_running} rows are taken while {run.wanted - run.serve.max_running:.0f} wait and "
        f"{1 - (reading.get('kv_used_fraction') or 0):.0%} of the KV cache is free",
        evidence=(
            Evidence(gauge="running", value=run.serve.max_running, expected=run.wanted, against="requests there"),
            waiting(run),
            blocks(run),
            queue(run),
        ),
    )


def queueing(reading: Reading, plan: Plan | None) -> Finding | None:
    """Prompts wait because the prefill budget of a step is so small that each step mostly pays its fixed cost."""
    run = ServingRun(reading, plan)
    # nobody waits, but all prompts go in slowly
    slow_prefill = "ttft_p99_s" in run.missed and run.filled_share >= OVERLOADED_QUEUE_SHARE
    # a batch job begins with prompts, which is no queue
    limit = OVERLOADED_QUEUE_SHARE if run.batch_job else QUEUE_SHARE
    kept_out = run.bottleneck == "budget" and run.bottlenecks["budget"] >= limit
    if not (kept_out or slow_prefill) or run.cost is None or repeated_prefill_share(run) >= MIN_SAVED_SHARE:
        return None
    tokens = mean_of(reading, "prefill_tokens")
    alone = [step for step in reading.steps if step.get("prefill_tokens") and not step.get("decode_tokens")]
    saved = max(
        run.share_saved(min(run.wanted, run.rows)),
        len(alone) * run.cost.base_s / 2 / run.busy_s,
        prompt_of_ttft(run) * run.filled_share if slow_prefill else 0.0,
    )
    if saved < MIN_SAVED_SHARE:
        return None
    return Finding(
        loop="product",
        cause="queueing",
        rule="queueing",
        share=with_queue(run, min(0.99, saved)),
        says=f"requests wait while steps take {tokens:.0f} prompt tokens at a time, which cost "
        f"{tokens * run.cost.prefill_s / max(run.cost.base_s, 1e-12):.1f} times what a step costs anyway",
        evidence=(
            Evidence(
                gauge="prefill_tokens",
                value=tokens,
                expected=float(run.serve.max_tokens_per_step),
                against="budget of a step",
            ),
            waiting(run),
            queue(run),
        ),
    )


def too_few_replicas(reading: Reading, plan: Plan | None) -> Finding | None:
    """Requests arrive faster than the server finishes them. Any other cause comes first: this is what is left where
    nothing else helps."""
    run = ServingRun(reading, plan)
    crowded = run.queued_share >= OVERLOADED_QUEUE_SHARE and run.queue_share >= OVERLOADED_QUEUE_SHARE
    refused = run.total("rejected_total") > MIN_SAVED_SHARE * max(1.0, run.total("requests_total"))
    if not (crowded or refused) or (run.batch_job and not run.missed):
        return None
    share = max(run.queue_share, OVERLOADED_QUEUE_SHARE if refused else 0.0)
    deeper = [finding.share for rule in DEEPER if (finding := rule(reading, plan)) is not None]
    below = [
        AFTER_OWNER_SHARE * other for other in deeper if other >= max(QUEUE_CLEARING_SHARE, share)
    ]  # explain the whole queue
    return Finding(
        loop="product",
        cause="too_few_replicas",
        rule="too_few_replicas",
        share=min([share, *below]),
        says=f"requests come faster than one server answers them: they spend {run.queue_share:.0%} of their time "
        "waiting",
        evidence=(
            queue(run),
            waiting(run),
            Evidence(gauge="running", value=mean_of(reading, "running"), expected=float(run.rows), against="rows"),
        ),
    )


def _rows_that_fit(run: ServingRun) -> float:
    """Rows that fit into the KV cache at the present blocks per row."""
    full = [step for step in run.queued if step["running"] >= run.rows and "kv_used_fraction" in step]
    used = sum(float(step["kv_used_fraction"]) for step in full)
    return sum(float(step["running"]) for step in full) / used if used else float("inf")


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
"""causes that explain a server that cannot keep up, before more replicas do"""
RULES: tuple[Rule, ...] = (*DEEPER, prefill_interference, too_few_replicas, deciding_alone, rejected_drafts)
