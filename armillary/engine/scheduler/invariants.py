"""What must always be true of scheduler and cache; one sentence says what is not.

Runs after every operation in the tests, and in production as often as `serve.check_every` says.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain as joined
from typing import TYPE_CHECKING

from armillary.engine.cache.block_pool import NULL
from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.kv_offload import KVOffload
from armillary.engine.request.sequence import Sequence, State

if TYPE_CHECKING:
    from armillary.engine.scheduler.request_table import RequestTable
    from armillary.engine.scheduler.scheduler import Scheduler


class Broken(AssertionError):
    """An invariant does not hold: a bug of ours."""


def _must(holds: bool, words: str) -> None:
    if not holds:
        raise Broken(words)


def check(scheduler: Scheduler) -> None:
    """Everything below."""
    request_table, cache = scheduler.request_table, scheduler.cache
    check_request_table(request_table)
    check_blocks(cache, request_table.running)
    check_hashes(cache)
    if cache.offload is not None:
        check_offload(cache.offload)
    for seq in request_table.running:
        check_sequence(cache, seq)
    for decision in scheduler.under_way:
        targets = [copy.target for copy in decision.copies]
        _must(len(set(targets)) == len(targets), f"step {decision.number} copies twice into one block")
        sources = {copy.source for copy in decision.copies}
        # with copies of a decision taken back, or of blocks that move to the host and others that take their place
        alone = not sources & set(targets) or scheduler.totals.shrunk > 0 or cache.offload is not None
        _must(alone, f"step {decision.number} copies from a block it copies into")


def check_idle(scheduler: Scheduler) -> None:
    """Everything, and that nothing is left when no request is."""
    scheduler.cache.free_some(scheduler.cache.pool.num_blocks * len(scheduler.cache.groups) * 2)
    check(scheduler)
    _must(
        not scheduler.request_table.running and not scheduler.request_table.num_waiting,
        "sequences are still running or waiting",
    )
    _must(not scheduler.request_table.requests, f"requests are left: {list(scheduler.request_table.requests)[:4]}")
    used = scheduler.cache.pool.num_used
    _must(not used, f"{used} blocks are still held")


def check_request_table(request_table: RequestTable) -> None:
    running, rows = request_table.running, request_table.rows
    taken = [seq.row for seq in running]
    _must(
        sorted([*rows, *taken]) == list(range(request_table.settings.max_running)), "rows are lost or given out twice"
    )
    _must(running == sorted(running, key=lambda seq: seq.order), "the batch is out of order")
    _must(all(seq.state is State.RUNNING for seq in running), "one that does not run is in the batch")
    waiting = list(request_table.waiting)
    _must(
        len(waiting) == len(request_table.waiting), f"{len(waiting)} wait and {len(request_table.waiting)} are counted"
    )
    _must(all(seq.state is State.WAITING and not seq.num_blocks for seq in waiting), "one that waits holds blocks")
    awaiting = request_table.awaiting_blocks
    sleeping = [fork for seq in (*running, *waiting, *awaiting) for fork in seq.forks if fork.finish is None]
    everyone = Counter(map(id, joined(running, waiting, awaiting, sleeping)))
    _must(all(count == 1 for count in everyone.values()), "a sequence is in two places")
    unfinished = [seq for sequences in request_table.requests.values() for seq in sequences if seq.finish is None]
    alive = [seq for seq in unfinished if seq.dp_rank == request_table.dp_rank]
    _must(set(map(id, alive)) == set(everyone), "a sequence is lost")


def check_blocks(cache: KVCache, running: list[Sequence]) -> None:
    """Reference counts are the entries of tables; what nobody holds is free, once; counts agree."""
    pool = cache.pool
    entries = joined((table for seq in running for table in seq.tables), cache.freeing)
    holders = Counter(joined.from_iterable(entries))
    holders.pop(NULL, None)
    for block in range(1, pool.num_blocks):
        count = holders.get(block, 0)
        _must(pool.refs[block] == count, f"block {block} counts {pool.refs[block]} holders and has {count}")
    _must(not pool.refs[NULL] and not pool.hashed[NULL], "the null block is in use")
    free = list(pool.free_blocks())
    _must(len(free) == pool.num_free, f"{len(free)} blocks are free and {pool.num_free} are counted")
    _must(len(set(free)) == len(free), "a block is free twice")
    _must(all(not pool.refs[block] for block in free), "a free block is held")
    marks = [pool.hashed[block] for block in free]
    _must(marks == sorted(marks), "a hashed block is reused before one without a hash")
    _must(pool.num_free + len(holders) == cache.num_blocks, "blocks have leaked")


def check_hashes(cache: KVCache) -> None:
    """Digests and blocks point to each other; every digest is that of its parent and tokens."""
    prefix_cache, pool = cache.prefix_cache, cache.pool
    _must(sum(map(len, prefix_cache.by_digest)) == prefix_cache.num_hashed, "digests and blocks differ in number")
    children: Counter[bytes] = Counter()
    beginnings: Counter[bytes] = Counter()
    for block in (block for block in range(pool.num_blocks) if pool.hashed[block]):
        digest, parent, chunk = prefix_cache.digests[block], prefix_cache.parents[block], prefix_cache.chunks[block]
        _must(
            prefix_cache.by_digest[prefix_cache.groups[block]].get(digest) == block,
            f"block {block} cannot be found by its digest",
        )
        _must(cache.digest(parent, chunk) == digest, f"block {block} has another text's digest")
        if not prefix_cache.groups[block]:
            children[parent] += 1
            beginnings[chunk] += prefix_cache.first[block]
    _must(sum(pool.hashed) == prefix_cache.num_hashed, "a block has a lost digest")
    _must(dict(children) == prefix_cache.children.plain(), "children are miscounted")
    _must(dict(+beginnings) == prefix_cache.beginnings.plain(), "first blocks are miscounted")
    _must(
        not any(prefix_cache.chunks[block] for block in range(pool.num_blocks) if not pool.hashed[block]),
        "a block without a digest has tokens",
    )
    _must(len(prefix_cache.ghosts) == prefix_cache.num_ghosts, "what was evicted is miscounted")
    _must(
        not set(prefix_cache.ghosts.plain()) & set(prefix_cache.by_digest[0].plain()),
        "a cached block is remembered as evicted",
    )


def check_offload(offload: KVOffload) -> None:
    """Host blocks are held only while they are loaded, and their hashes are right."""
    pool, hashes = offload.pool, offload.hashes
    free = list(pool.free_blocks())
    _must(len(free) == pool.num_free == offload.num_blocks, "a host block is held, or lost")
    _must(sum(pool.hashed) == hashes.num_hashed, "a host block has a lost digest")
    for slot in (slot for slot in free if pool.hashed[slot]):
        digest = hashes.digests[slot]
        _must(hashes.by_digest[hashes.groups[slot]].get(digest) == slot, f"host block {slot} cannot be found")
        right = offload.cache.digest(hashes.parents[slot], hashes.chunks[slot]) == digest
        _must(right, f"host block {slot} has another text's digest")


def check_sequence(cache: KVCache, seq: Sequence) -> None:
    """Its blocks cover its computed tokens, hold them, and can be written where it goes on."""
    size = cache.block_tokens
    _must(0 <= seq.num_pending <= 2 and seq.computed < seq.length <= seq.limit, f"{seq} counts its tokens wrongly")
    _must(
        seq.num_blocks == sum(block != NULL for table in seq.tables for block in table), f"{seq} miscounts its blocks"
    )
    _must(
        seq.computed < seq.prefill_target if seq.is_prefilling else seq.computed >= seq.prefill_target,
        f"{seq} is not where it says it is",
    )
    _must(
        seq.num_visible <= seq.computed and not (seq.num_visible >= seq.num_prompt and seq.forks),
        f"{seq} keeps its forks",
    )
    if seq.matching:
        return  # windows follow when the search is over
    for group, table, window in zip(cache.groups, seq.tables, seq.windows, strict=True):
        _must(len(table) * size >= seq.computed, f"{seq} has computed more than its blocks hold")
        _must(len(table) == len(seq.tables[0]), f"{seq} has tables of different lengths")
        needed = group.first_needed(seq.computed) // size
        _must(window <= max(needed, 0), f"{seq} gave back blocks that it still sees")
        _must(all(table[window:]) and not any(table[:window]), f"{seq} has a hole in its table")
        at = seq.computed // size
        exclusive = at >= len(table) or cache.pool.refs[table[at]] == 1
        _must(
            exclusive or max(seq.num_allocated, seq.num_writable) <= seq.computed,
            f"{seq} would write into a block that others read",
        )
    _check_content(cache, seq)


def _check_content(cache: KVCache, seq: Sequence) -> None:
    """Hashed blocks in the first group's table have the digests of the tokens that the sequence has there."""
    size = cache.block_tokens
    for index, block in enumerate(seq.tables[0][: seq.computed // size]):
        if not cache.pool.hashed[block] or (index + 1) * size > len(seq.tokens):
            continue
        seq.chain.extend(seq.tokens, (index + 1) * size)
        _must(cache.prefix_cache.chunks[block] == seq.chain.chunks[index], f"{seq} reads other tokens in block {index}")
        _must(
            cache.prefix_cache.digests[block] == seq.chain.digests[index], f"{seq} reads another past in block {index}"
        )
