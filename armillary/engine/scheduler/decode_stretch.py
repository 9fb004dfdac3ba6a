"""Steady decoding: runs of steps in which every running sequence only gets its next token, advanced all at once.

A simulation on a virtual clock spends most of its steps so. `steady_steps` says how many of them follow for certain,
and `skip_steps` puts the scheduler into the state that so many calls of `schedule` and `update` would leave: the slow
reference is the loop itself (tests/planning/simulation/test_simulated_replica.py compares them).
"""

from __future__ import annotations

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.scheduler import Scheduler

_SPARE_BLOCKS = 4
"""free blocks per running sequence that are left, so that no preemption is near"""
_HASHED_AT_ONCE = 4
"""full blocks of a sequence from which on they are registered in the prefix cache"""


def steady_steps(scheduler: Scheduler, most: int) -> int:
    """How many of the next `most` steps only decode all running sequences, none of which reaches its limit in them; 0
    where something else may happen."""
    table = scheduler.request_table
    running = table.running
    if not running or scheduler.unsettled or len(table.waiting) or len(running) > scheduler.limit.tokens:
        return 0
    if scheduler.under_way and not _is_plain(scheduler.under_way[0], running):
        return 0
    steps = min(most, min([seq.limit - 2 - seq.computed for seq in running]))
    if steps < 2 or any([seq.is_prefilling or seq.request.timeout_s is not None for seq in running]):
        return 0
    return steps if has_blocks(scheduler, running, steps) else 0


def _is_plain(decision: Decision, running: list[Sequence]) -> bool:
    return not decision.chunks and not decision.drafts and not decision.last and decision.decodes == running


def has_blocks(scheduler: Scheduler, decodes: list[Sequence], steps: int, prefill_tokens: int = 0) -> bool:
    """Whether the blocks of so many steps are free, with some to spare."""
    cache = scheduler.cache
    size, groups, spare = cache.block_tokens, len(cache.groups), _SPARE_BLOCKS * len(scheduler.request_table.running)
    most = len(decodes) * (steps // size + 2) + prefill_tokens // size + 1
    if cache.pool.num_free > (most + spare) * groups:
        return True
    needed = sum([max(0, -(-(seq.computed + steps + 1 - seq.num_writable) // size)) for seq in decodes])
    needed += max(0, -(-prefill_tokens // size))
    return cache.pool.num_free > (needed + spare) * groups


def skip_steps(scheduler: Scheduler, steps: int, seconds: list[float], now: float) -> None:
    """Advance all running sequences by `steps` tokens, which are their requests' numbers; `seconds` are the durations
    of the last of those steps, and `now` is when they ended."""
    running = scheduler.request_table.running
    advance_decodes(scheduler, running, steps)
    for decision in scheduler.under_way:
        decision.decided_at = now
    if scheduler.prefill.controller is not None:
        scheduler.prefill.controller.took_decodes(len(running), seconds, now)


def advance_decodes(scheduler: Scheduler, decodes: list[Sequence], steps: int) -> None:
    """Advance these sequences, and the step in flight, by `steps` tokens."""
    cache, size = scheduler.cache, scheduler.cache.block_tokens
    full: list[Sequence] = []  # need one more block
    for seq in decodes:
        upto = seq.computed + steps
        if upto >= seq.num_writable:
            if seq.num_writable and upto < seq.num_writable + size:
                full.append(seq)
            else:
                grown = cache.grow(seq, upto + 1)
                assert grown, "steady_steps has counted the blocks"
        seq.computed = upto
        seq.tokens.extend([seq.number] * steps)
    if full:
        cache.extend(full)
    if cache.prefix:
        for seq in decodes:
            if seq.computed // size - seq.num_hashed >= _HASHED_AT_ONCE:
                cache.register_blocks(seq)
    for decision in scheduler.under_way:
        decision.positions = [position + steps for position in decision.positions]
        decision.number += steps
    scheduler.totals.steps += steps
    scheduler.totals.tokens_out += steps * len(decodes)
