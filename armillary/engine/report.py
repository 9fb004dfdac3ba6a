"""How an engine is doing, in a few lines for people: batch, blocks, prefix hits and why there were no more."""

from __future__ import annotations

from typing import cast

from armillary.engine.cache.prefix_cache import MEANING, Miss
from armillary.engine.scheduler.scheduler import Scheduler


def report(scheduler: Scheduler) -> str:
    """State and totals; every odd thing comes with what it means."""
    roster, cache, totals = scheduler.roster, scheduler.cache, scheduler.totals
    lines = [
        f"{len(roster.running)} running, {len(roster.waiting)} waiting, {totals.finished:,} requests done, "
        f"{totals.tokens_out:,} tokens out in {totals.steps:,} steps",
        f"KV cache {cache.used_fraction:.0%} of {cache.num_blocks:,} blocks held, {len(cache.names):,} can be found "
        f"again, {cache.pool.num_evicted:,} evicted",
        *_prefix(scheduler),
    ]
    if totals.preempted:
        likely = "are likely to" if scheduler.admission.learns else "may"
        kept = f"{scheduler.admission.reserve:.0%} of what answers {likely} grow is now kept free"
        lines.append(
            f"{totals.preempted:,} times a request was put back for lack of blocks, {totals.recomputed:,} "
            f"tokens given up; {kept}"
        )
    if totals.shrunk:
        lines.append(
            f"{totals.shrunk:,} times a step found no memory and was made smaller; now a step has "
            f"{scheduler.limit.tokens:,} tokens at most: lower serve.memory_fraction or serve.kv_bytes"
        )
    if totals.discarded:
        lines.append(f"{totals.discarded:,} tokens drawn for answers that were over by then")
    return "\n".join(lines)


def _prefix(scheduler: Scheduler) -> list[str]:
    cache, totals = scheduler.cache, scheduler.totals
    if not cache.prefix:
        return ["prefix cache off"]
    least = cache.block_tokens + 1
    share = f" ({totals.found / totals.looked_up:.0%})" if totals.looked_up else ""
    lines = [
        f"prefix cache found {totals.found:,} of {totals.looked_up:,} prompt tokens{share}; prompts from {least} "
        "tokens on can be found"
    ]
    return lines + [f"  {count:,} × {why}: {MEANING[cast(Miss, why)]}" for why, count in totals.misses.most_common()]
