"""Steps and requests as records for gauges.jsonl, under the names of `spec/gauges.py`."""

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.scheduler import Scheduler


def step_gauges(scheduler: Scheduler, decision: Decision, left: int = 0) -> dict[str, float]:
    """State after a step was scheduled, its work, and totals so far; `left` sequences ran in it and have ended
    since."""
    running = {"running": len(scheduler.request_table.running) + left}
    return state_gauges(scheduler) | decision.work._asdict() | running


def state_gauges(scheduler: Scheduler) -> dict[str, float]:
    """Running and waiting sequences, KV cache usage, and totals so far."""
    totals, cache = scheduler.totals, scheduler.cache
    return {
        "running": len(scheduler.request_table.running),
        "waiting": len(scheduler.request_table.waiting),
        "kv_used_fraction": cache.used_fraction,
        "kv_capacity_tokens": cache.num_blocks // len(cache.groups) * cache.block_tokens,
        "preemptions_total": totals.preempted,
        "recomputed_total": totals.recomputed,
        "prefix_queries_total": totals.looked_up,
        "prefix_hits_total": totals.hits,
        "prefix_hit_fraction": totals.hits / totals.looked_up if totals.looked_up else 0.0,
        "prefix_repeated_total": totals.repeated,
        "prefix_evicted_total": totals.misses["evicted"],
        "requests_total": totals.finished,
        "aborted_total": totals.aborted,
        "rejected_total": totals.rejected,
        "errors_total": totals.errors,
        "tokens_in_total": totals.tokens_in,
        "tokens_out_total": totals.tokens_out,
    }


def request_gauges(seq: Sequence) -> dict[str, float]:
    """Times and sizes of a finished sequence; phases that it never reached are left out."""
    gauges: dict[str, float] = {
        "tokens_in": seq.num_prompt,
        "tokens_out": seq.num_output,
        "cached_tokens": seq.cached_tokens,
        "tokens_limit": seq.limit - seq.num_prompt,
        "arrived_s": seq.arrived_at,
        "request_number": seq.number,
    }
    if seq.shared_prefix:
        gauges |= {"repeated_tokens": seq.shared_prefix, "prefix_source_request": seq.prefix_source}
    end = seq.finished_at
    if end is not None:
        gauges["e2e_s"] = end - seq.arrived_at
    if seq.started_at is not None:
        gauges["queue_s"] = seq.started_at - seq.arrived_at
    if seq.first_token_at is not None and seq.started_at is not None:
        gauges["ttft_s"] = seq.first_token_at - seq.arrived_at
        gauges["prefill_s"] = seq.first_token_at - seq.started_at
        if end is not None:
            gauges["decode_s"] = end - seq.first_token_at
            if seq.num_output > 1:
                gauges["tpot_s"] = (end - seq.first_token_at) / (seq.num_output - 1)
                gauges["itl_max_s"] = seq.largest_gap_s
    return gauges
