"""The decode side: asks a prefill server for the KV blocks of long prompts and puts them into the prefix cache.

A prompt waits outside the queue until its blocks are there; then it starts like any other, finds them in the prefix
cache, and computes what is left: at least its last token, so the first token is sampled here. Whatever goes wrong —
no connection, a prefill server that dies or falls silent, blocks that were evicted meanwhile — the prompt starts with
the blocks that are there and the engine computes the rest itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from armillary.engine.disaggregation.block_bytes import BlockBytes
from armillary.engine.disaggregation.block_reader import Arrived, Outgoing
from armillary.engine.disaggregation.decode_rank import DecodeRank
from armillary.engine.disaggregation.prefill_connection import PrefillConnection
from armillary.engine.disaggregation.wire import Frame, FrameType, Prompt, Welcome
from armillary.engine.engine_thread import EngineThread
from armillary.engine.request.sequence import Sequence, State


@dataclass(eq=False)
class Fetch:
    """A sequence whose prompt is computed by the prefill server."""

    seq: Sequence
    first: int
    """blocks that are here already"""
    stop: int
    """blocks that are wanted"""
    reserved: int
    """blocks of all groups that it needs"""
    number: int = 0
    """0: not asked for yet"""
    over: bool = False
    """all blocks have come, or no more will"""


class DecodeSide:
    """The fetches of one engine, and its connection to the prefill server."""

    def __init__(
        self,
        worker: EngineThread,
        blocks: BlockBytes,
        rank: DecodeRank,
        *,
        fingerprint: bytes,
        address: str,
        min_tokens: int,
        whole_bytes: int,
        order: Callable[[dict[str, Any]], None],
    ) -> None:
        """Prompts with fewer than `min_tokens` that the prefix cache does not have are computed here. `whole_bytes`: of
        a block on all ranks. `order` tells the engine's other ranks to take blocks, in the engine's thread."""
        self._blocks, self._rank, self._order = blocks, rank, order
        self._min_tokens, self._whole_bytes = min_tokens, whole_bytes
        self._table, self._cache = worker.engine.scheduler.request_table, worker.engine.scheduler.cache
        self._fetches: list[Fetch] = []  # this and the next of the engine's thread
        self._by_number: dict[int, Fetch] = {}
        self._outgoing: Outgoing | None = None  # none: not connected
        self._numbers = count(1)
        self._received_bytes = self._num_fetched = self._num_local = 0
        self._wait_s = 0.0
        self._connection = PrefillConnection(worker, self, address=address, fingerprint=fingerprint, ranks=rank.ranks)

    def connect(self) -> None:
        """BadInput where the prefill server refuses; one that does not answer may come later."""
        self._connection.connect()

    def close(self) -> None:
        self._connection.close()
        self._rank.close()

    # --- in the engine's thread

    def wants(self, seq: Sequence) -> bool:
        params = seq.request.params
        if self._outgoing is None or seq.request.adapter or params.needs_every_token or params.pooling is not None:
            return False
        first, stop = self._missing(seq)
        return (stop - first) * self._cache.block_tokens >= self._min_tokens

    def ask(self, seq: Sequence) -> None:
        first, stop = self._missing(seq)
        self._fetches.append(Fetch(seq, first, stop, (stop - first) * len(self._cache.groups)))

    def _missing(self, seq: Sequence) -> tuple[int, int]:
        """Index of the first block that neither the device nor the host has, and of the first that is not wanted: the
        last token is always computed here."""
        cache, stop, first = self._cache, (seq.num_prompt - 1) // self._cache.block_tokens, 0
        group = cache.full_groups[0] if cache.full_groups else 0
        while first < stop and cache.full_groups and self._has(seq, group, first):
            first += 1
        return first, stop

    def _has(self, seq: Sequence, group: int, index: int) -> bool:
        offload = self._cache.offload
        block = self._cache.prefix_cache.of(seq.chain, group, index)
        return bool(block or (offload is not None and offload.find(seq, group, index)))

    def after_step(self) -> None:
        """Forget fetches that are over, and ask for what there is space for."""
        if not self._fetches:
            return
        for fetch in self._fetches:
            if fetch.seq.finish is not None and fetch.number and not fetch.over:
                self._cancel(fetch)
        self._fetches = [fetch for fetch in self._fetches if fetch.seq.finish is None and not _started(fetch)]
        reserved = sum(fetch.reserved for fetch in self._fetches if fetch.number)
        for fetch in self._fetches:
            if fetch.number or fetch.over:
                continue
            alone = not reserved and not self._table.running
            if not alone and reserved + fetch.reserved > self._cache.available:
                return  # until a sequence ends: prompts that nothing has space for would evict each other
            self._look_again(fetch)
            if not fetch.over:
                reserved += fetch.reserved
                self._send(fetch)

    def _look_again(self, fetch: Fetch) -> None:
        """What another prompt brought meanwhile is not asked for."""
        fetch.first, _ = self._missing(fetch.seq)
        fetch.reserved = (fetch.stop - fetch.first) * len(self._cache.groups)
        if not fetch.reserved:
            self._end(fetch, failed=False)

    def _send(self, fetch: Fetch) -> None:
        assert self._outgoing is not None, "fetches end with the connection"
        fetch.number, seq = next(self._numbers), fetch.seq
        self._by_number[fetch.number] = fetch
        tokens = seq.tokens[: fetch.stop * self._cache.block_tokens]
        self._outgoing.put(Prompt(fetch.first, seq.request.salt, tokens).frame(fetch.number))

    def _cancel(self, fetch: Fetch) -> None:
        fetch.over = True
        self._by_number.pop(fetch.number, None)
        if self._outgoing is not None:
            self._outgoing.put(Frame(FrameType.CANCEL, fetch.number))

    def opened(self, outgoing: Outgoing, welcome: Welcome) -> None:
        key, ranks, stages = welcome.key, welcome.ranks, welcome.stages
        self._order({"do": "open", "key": key.hex(), "ranks": ranks, "stages": stages})
        self._rank.open(key, ranks, stages)
        self._outgoing = outgoing

    def lost(self) -> None:
        """The connection ended: what waits is computed here."""
        if self._outgoing is not None:
            self._order({"do": "close"})
            self._rank.close()
        self._outgoing = None
        self._by_number.clear()
        for fetch in self._fetches:
            if not fetch.over:
                self._end(fetch, failed=True)

    def take(self, entries: list[tuple[int, int]], arrived: Arrived) -> None:
        """Put blocks that came into the prefix cache, held by nobody: should they be evicted before their sequence
        starts, it computes them."""
        self._received_bytes += len(entries) * self._whole_bytes
        fetch = self._by_number.get(arrived.number)
        new = [] if fetch is None else self._usable(fetch, entries)
        fresh = self._cache.pool.allocate(len(new or ()))
        came = self._write(fresh, new or [], [entries[at][0] for at in new or []], arrived)
        if fetch is not None and came and new is not None:
            self._name(fetch, fresh, [entries[at] for at in new])
        self._cache.pool.release(fresh)
        if not came:
            self._connection.drop()  # `lost` follows
        elif fetch is not None and new is None:
            self._cancel(fetch)
            self._end(fetch, failed=True)

    def _usable(self, fetch: Fetch, entries: list[tuple[int, int]]) -> list[int] | None:
        """Places of the blocks that are not here; None where a block cannot be used, or there is no space."""
        cache, digests = self._cache, fetch.seq.chain.digests
        if not all(group < len(cache.groups) and index < fetch.stop for group, index in entries):
            return None
        names = cache.prefix_cache.by_digest
        new = [at for at, (g, index) in enumerate(entries) if digests[index] not in names[g]]
        return None if len(new) > cache.pool.num_free else new

    def _write(self, blocks: list[int], chosen: list[int], groups: list[int], arrived: Arrived) -> bool:
        """On all ranks; copies that are decided and not done yet come first: they may read what is overwritten."""
        copies = self._blocks.decided_copies()
        put = {"entries": arrived.entries, "blocks": blocks, "chosen": chosen, "groups": groups}
        self._order({"do": "put", "copies": copies} | put)
        self._blocks.copy(copies)
        return self._rank.put(arrived.entries, blocks, chosen, groups, arrived)

    def _name(self, fetch: Fetch, blocks: list[int], entries: list[tuple[int, int]]) -> None:
        chain, names = fetch.seq.chain, self._cache.prefix_cache
        for block, (g, index) in zip(blocks, entries, strict=True):
            names.put(block, g, chain.digests[index], chain.parent(index), chain.chunks[index], first=not index)

    def done(self, number: int, failed: bool) -> None:
        fetch = self._by_number.pop(number, None)
        if fetch is not None:
            self._end(fetch, failed=failed)

    def _end(self, fetch: Fetch, *, failed: bool) -> None:
        """Let a sequence start. Its blocks are used last to first now, so that the cache would evict the end first."""
        fetch.over, seq, cache = True, fetch.seq, self._cache
        if seq.finish is not None:
            return
        for g in range(len(cache.groups)):
            cached = [cache.prefix_cache.of(seq.chain, g, index) for index in range(fetch.stop)]
            blocks = [block for block in cached if block]
            cache.pool.share(blocks)
            cache.pool.release(blocks[::-1])
        self._num_local += failed
        self._num_fetched += not failed
        self._wait_s += time.monotonic() - seq.arrived_at
        self._table.blocks_came(seq)

    def gauges(self) -> dict[str, float]:
        return {
            "kv_received_bytes_total": self._received_bytes,
            "kv_fetched_total": self._num_fetched,
            "kv_fetch_failed_total": self._num_local,
            "kv_fetch_wait_s_total": self._wait_s,
            "prefill_connected": float(self._outgoing is not None),
        }


def _started(fetch: Fetch) -> bool:
    return fetch.over and (fetch.seq.state is not State.WAITING or fetch.seq.started_at is not None)
