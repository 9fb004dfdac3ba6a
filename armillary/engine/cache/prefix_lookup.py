"""Finds the blocks of a prompt in the prefix cache, a bounded number per step.

Full-attention layers need every block from the first on, windowed layers only those that the next query sees. In a
model with both, the longest prefix for which all layers have their blocks is taken.
"""

from bisect import bisect_left

from armillary.engine.cache.block_pool import NULL
from armillary.engine.cache.kv_cache import KVCache, TableUpdate
from armillary.engine.request.counters import Totals
from armillary.engine.request.sequence import Sequence


def search(cache: KVCache, seq: Sequence, budget: int, totals: Totals) -> int:
    """Look up the next blocks of a prompt; returns the number of lookups. `seq.matching` stays set where the budget
    ended the search. Blocks found after a preemption are not counted as hits."""
    if not cache.prefix or (not seq.matching and seq.computed >= seq.num_prompt):
        return 0
    first, before = seq.matching, seq.cached_tokens if seq.matching else seq.computed
    lookups = match(cache, seq, budget) if first else rematch(cache, seq, budget)
    if not seq.matching and not seq.preemptions:
        if first:
            totals.misses[str(seq.miss)] += 1
        totals.hits += seq.computed - before
        seq.cached_tokens += seq.computed - before
    return lookups


def match(cache: KVCache, seq: Sequence, budget: int) -> int:
    """Share cached blocks from the sequence's position on; returns the number of lookups. `seq.matching` stays set
    where the budget ended the search."""
    index = seq.computed // cache.block_tokens
    last = _last(cache, seq)
    stop = min(last, index + max(0, budget))
    num_found = _share_found(cache, seq, index, stop) if cache.full_groups else last
    if num_found == stop < last:
        return stop - index
    looked = num_found - index + 1
    if cache.window_groups:
        num_usable, more = _longest_with_windows(cache, seq, num_found, max(budget, 1))
        if cache.offload is not None and not _windows_fit(cache, seq, num_usable):
            num_usable = 0
        _take(cache, seq, num_found, num_usable)
        num_found, looked = num_usable, looked + more
    seq.matching = False
    if seq.miss is None:
        _explain(cache, seq, num_found, last)
    return looked


def rematch(cache: KVCache, seq: Sequence, budget: int) -> int:
    """Later in a prompt: share blocks that another request computed meanwhile. Only for full attention in all
    layers."""
    at_boundary = not seq.computed % cache.block_tokens and len(seq.tables[0]) * cache.block_tokens == seq.computed
    if cache.window_groups or not cache.prefix or not at_boundary or seq.request.params.needs_every_token:
        return 0
    cache.register_blocks(seq)
    index = seq.computed // cache.block_tokens
    stop = min(_last(cache, seq), index + max(0, budget))
    return _share_found(cache, seq, index, stop) - index


def probe(cache: KVCache, seq: Sequence) -> int:
    """About how many blocks of the prompt running sequences hold, which cost nothing. By bisection, because prefixes
    are evicted from their ends."""
    if not cache.prefix or not cache.full_groups or seq.request.params.needs_every_token:
        return 0
    by_digest, refs = cache.prefix_cache.by_digest[cache.full_groups[0]], cache.pool.refs  # no one holds the null block
    first_unused = bisect_left(
        seq.chain.digests, True, 0, _last(cache, seq), key=lambda digest: not refs[by_digest.get(digest)]
    )
    return first_unused * len(cache.full_groups)


def cached_blocks(cache: KVCache, seq: Sequence) -> int:
    """About how many blocks of the prompt, of one full-attention group, are in the prefix cache. By bisection, too."""
    if not cache.prefix or not cache.full_groups or seq.request.params.needs_every_token:
        return 0
    by_digest = cache.prefix_cache.by_digest[cache.full_groups[0]]
    return bisect_left(seq.chain.digests, True, 0, _last(cache, seq), key=lambda digest: not by_digest.get(digest))


def _last(cache: KVCache, seq: Sequence) -> int:
    """Blocks that may be found: full ones, without the last token, whose logits are needed."""
    return min((len(seq.tokens) - 1) // cache.block_tokens, len(seq.chain))


def _find(cache: KVCache, seq: Sequence, group: int, index: int) -> int:
    """A device block, −(a host block), or 0."""
    block = cache.prefix_cache.of(seq.chain, group, index)
    return block if block or cache.offload is None else -cache.offload.find(seq, group, index)


def _share_found(cache: KVCache, seq: Sequence, index: int, stop: int) -> int:
    """Share the blocks from `index` on for the full-attention groups, those on the device and those that are worth
    loading from the host, until one is missing; returns the end index."""
    end = _share_on_device(cache, seq, index, stop)
    if cache.offload is not None and end < stop and (num_loaded := cache.offload.load(seq, end, stop)):
        end += num_loaded
        _set_computed(cache, seq, end)
    return end


def _share_on_device(cache: KVCache, seq: Sequence, index: int, stop: int) -> int:
    runs = [_run(cache, seq, g, index, stop) for g in cache.full_groups]
    count = min(map(len, runs))
    for g, blocks in zip(cache.full_groups, runs, strict=True):
        if count:
            del blocks[count:]
            cache.pool.share(blocks)
            seq.tables[g] += blocks
            seq.num_blocks += count
            cache.table_updates.append(TableUpdate(seq.row, g, index, blocks))
    _set_computed(cache, seq, index + count)
    return index + count


def _set_computed(cache: KVCache, seq: Sequence, num_blocks: int) -> None:
    seq.computed, seq.num_hashed = num_blocks * cache.block_tokens, num_blocks


def _run(cache: KVCache, seq: Sequence, group: int, index: int, stop: int) -> list[int]:
    """Blocks found from `index` on, without a gap: `PrefixCache.find` inlined, because a long prompt has thousands."""
    names, by_digest = cache.prefix_cache, cache.prefix_cache.by_digest[group]
    parents, chunks, parts, mask = names.parents, names.chunks, by_digest.parts, by_digest.mask
    parent, blocks = seq.chain.parent(index), []
    for digest, chunk in zip(seq.chain.digests[index:stop], seq.chain.chunks[index:stop], strict=True):
        block = parts[hash(digest) & mask].get(digest, NULL)
        if chunks[block] != chunk or parents[block] != parent:
            break
        blocks.append(block)
        parent = digest
    return blocks


def _longest_with_windows(cache: KVCache, seq: Sequence, most: int, budget: int) -> tuple[int, int]:
    """The most blocks, up to `most`, after which every windowed group has what the next query sees; (blocks,
    lookups)."""
    count, lookups, size = most, 0, cache.block_tokens
    group = 0
    while count and group < len(cache.window_groups):
        g = cache.window_groups[group]
        first = cache.groups[g].first_needed(count * size) // size
        missing = next((i for i in range(count - 1, first - 1, -1) if not _find(cache, seq, g, i)), None)
        lookups += count - (first if missing is None else missing)
        if missing is None:
            group += 1
        elif lookups > budget:
            return 0, lookups
        else:
            count, group = missing, 0
    return count, lookups


def _windows(cache: KVCache, seq: Sequence, num_usable: int) -> dict[int, tuple[int, list[int]]]:
    """Windowed group -> (first block that is needed after `num_usable` blocks, where the blocks from it on are)."""
    windows = {}
    for g in cache.window_groups:
        first = min(num_usable, cache.groups[g].first_needed(num_usable * cache.block_tokens) // cache.block_tokens)
        windows[g] = first, [_find(cache, seq, g, index) for index in range(first, num_usable)]
    return windows


def _windows_fit(cache: KVCache, seq: Sequence, num_usable: int) -> bool:
    """Whether there are free device blocks for what the host has of the windows."""
    refs = cache.pool.refs
    places = [place for _, blocks in _windows(cache, seq, num_usable).values() for place in blocks]
    return sum(place < 0 or not refs[place] for place in places) <= cache.pool.num_free


def _take(cache: KVCache, seq: Sequence, num_found: int, num_usable: int) -> None:
    """Free the blocks beyond `num_usable`, and share the windows before it."""
    for g in cache.full_groups:
        cache.free_table(seq.tables[g][num_usable:])
        del seq.tables[g][num_usable:]
        seq.num_blocks -= num_found - num_usable
    windows = _windows(cache, seq, num_usable)
    brought = None if cache.offload is None else cache.offload.bring(seq, windows)
    for g, (first, blocks) in windows.items():
        if brought is None:
            cache.pool.share(blocks)
        else:
            blocks = brought[g]
        seq.tables[g] = [NULL] * first + blocks
        seq.windows[g] = first
        seq.num_blocks += len(blocks)
        if num_usable:
            cache.table_updates.append(TableUpdate(seq.row, g, 0, seq.tables[g].copy()))
    _set_computed(cache, seq, num_usable)


def _explain(cache: KVCache, seq: Sequence, num_found: int, last: int) -> None:
    """Record why no more blocks were found."""
    if num_found == last:
        seq.miss = "partial" if last else "short"
    else:
        digest, parent, chunk = seq.chain.digests[num_found], seq.chain.parent(num_found), seq.chain.chunks[num_found]
        seq.miss = cache.prefix_cache.why(digest, parent, chunk, first=not num_found)
