"""The scheduler of data-parallel attention: one queue, and a scheduler for the KV cache of every dp rank.

A request waits in the common queue until a dp rank has a free row and free blocks for its prompt; it goes to the rank
that has much of the prompt in its prefix cache, else to the one with most free blocks, and stays there: preempted, it
waits for its own rank. All ranks take part in every step, since their experts are shared.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.prefix_lookup import cached_blocks
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision, Ending, Outcome
from armillary.engine.scheduler.dp_pacing import DpPacing
from armillary.engine.scheduler.prefill_pacing import PrefillController
from armillary.engine.scheduler.request_table import RequestTable
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings
from armillary.engine.speculative.speculation import Speculation

_MUCH = 0.5
"""share of a prompt's blocks in a rank's prefix cache from which on it goes there, however full that rank is; the
default of SGLang's cache-aware router (cache_threshold)"""


class DpDecision(Decision):
    """One step of all dp ranks: what they compute, one rank after the other."""

    __slots__ = ("parts",)

    def __init__(self, number: int, parts: Items[Decision], now: float) -> None:
        super().__init__(number)
        self.parts, self.decided_at = parts, now
        for part in parts:
            self.decodes += part.decodes
            self.positions += part.positions
            self.chunks += part.chunks
            self.sampling = self.sampling + part.sampling  # of a part, it may be the list of its decodes
            self.admitted += part.admitted
            self.preempted += part.preempted
            self.ended += part.ended

    @property
    def num_decodes(self) -> int:
        """Decodes without the rows of draft tokens, which each part has after its own."""
        return sum(part.num_decodes for part in self.parts)


class DpSpeculation:
    """Draft tokens of all ranks: each drafts for its own requests."""

    def __init__(self, ranks: Items[Speculation]) -> None:
        self.ranks = ranks

    @property
    def active(self) -> bool:
        """Whether the next step may have drafts on some rank."""
        return any(rank.active for rank in self.ranks)


class CommonTable(RequestTable):
    """The requests of all ranks, and the queue of those that have none yet."""

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        super().__init__(settings, cache)
        self.tables: list[RequestTable] = []  # of the ranks

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(table.num_waiting for table in self.tables)

    def wake_at(self, now: float) -> float | None:
        return now if any(table.num_waiting for table in self.tables) else super().wake_at(now)

    def refresh(self) -> None:
        """After a change on a rank."""
        self.running = [seq for table in self.tables for seq in table.running]


class DpScheduler(Scheduler):
    """Decides the steps of all dp ranks together."""

    request_table: CommonTable
    speculation: DpSpeculation | None  # type: ignore[assignment]

    def __init__(self, settings: Settings, caches: Items[KVCache]) -> None:
        super().__init__(settings, caches[0])
        self.ranks = [Scheduler(settings, cache) for cache in caches]
        self.request_table = CommonTable(settings, caches[0])
        self.totals = self.request_table.totals
        for dp_rank, rank in enumerate(self.ranks):
            self._share(rank, dp_rank)
        self._pacing: DpPacing | None = None
        self._share_pacing()

    def _share(self, rank: Scheduler, dp_rank: int) -> None:
        """Ranks have rows and blocks of their own; requests and totals are common."""
        common, table = self.request_table, rank.request_table
        table.requests, table.deadlines, table.adapters = common.requests, common.deadlines, common.adapters
        table.totals = rank.totals = common.totals
        table.prefix_reuse, table.dp_rank = common.prefix_reuse, dp_rank
        common.tables.append(table)

    def speculate(self, make: Callable[[KVCache], Speculation]) -> None:
        for rank in self.ranks:
            rank.speculate(make)
        self.speculation = DpSpeculation([rank.speculation for rank in self.ranks if rank.speculation is not None])

    def stream(self) -> None:
        super().stream()
        self._share_pacing()

    def _share_pacing(self) -> None:
        """One controller, where there is one, for the steps of all ranks."""
        controller = self.prefill.controller
        if isinstance(controller, PrefillController):
            self._pacing = DpPacing(controller)
            for rank in self.ranks:
                rank.prefill.controller, rank.prefill.gives_way = self._pacing, self.prefill.gives_way

    @property
    def caches(self) -> Items[KVCache]:
        return [rank.cache for rank in self.ranks]

    @property
    def unsettled(self) -> bool:
        return any(rank.unsettled for rank in self.ranks)

    def schedule(self, now: float) -> DpDecision:
        assert len(self.under_way) <= 1, "update the step before last first"
        expired = self.request_table.deadlines.expired(now)
        self._end([(seq, Ending("deadline")) for seq in expired], now)
        self._assign()
        self._pace()
        before, parts = self.totals.steps, []
        for rank in self.ranks:
            self.totals.steps = before  # each counts its part, which are one step
            parts.append(rank.schedule(now))
        decision = DpDecision(self.totals.steps, parts, now)
        decision.ended += expired
        self.under_way.append(decision)
        self.request_table.refresh()
        return decision

    def _pace(self) -> None:
        """Tell every rank's planner what the other ranks have."""
        tables = self.request_table.tables
        prompts = [len(table.waiting) + sum(seq.is_prefilling for seq in table.running) for table in tables]
        decodes = [sum(not seq.is_prefilling for seq in table.running) for table in tables]
        if self._pacing is not None:
            self._pacing.begin_step(sum(decodes), sum(map(bool, prompts)))
        waiting = len(self.request_table.waiting)
        for rank, own_decodes, own_prompts in zip(self.ranks, decodes, prompts, strict=True):
            rank.prefill.other_decodes = sum(decodes) - own_decodes
            rank.prefill.other_prompts = sum(prompts) - own_prompts + waiting

    def _assign(self) -> None:
        """Move requests from the common queue to ranks, in order, until none can take the first."""
        waiting, tables = self.request_table.waiting, self.request_table.tables
        if waiting.first() is None:
            return
        free = [_free_blocks(rank) for rank in self.ranks]
        while (seq := waiting.first()) is not None:
            able = [r for r, rank in enumerate(self.ranks) if _takes(rank, seq, free[r])]
            if not able:
                return
            dp_rank = self._best(seq, able, free)
            waiting.pop()
            for each in (seq, *seq.forks):
                each.dp_rank = dp_rank
            tables[dp_rank].waiting.push(seq)
            free[dp_rank] -= seq.blocks_at_start

    def _best(self, seq: Sequence, able: list[int], free: list[int]) -> int:
        cached = {r: cached_blocks(self.ranks[r].cache, seq) for r in able}
        enough = _MUCH * (len(seq.tokens) // self.cache.block_tokens)
        return max(able, key=lambda r: (cached[r] if cached[r] and cached[r] >= enough else 0, free[r], -r))

    def update(self, decision: Decision, tokens: Items[int], now: float) -> Outcome:
        assert isinstance(decision, DpDecision) and decision is self.under_way[0], "steps are updated in their order"
        self.under_way.popleft()
        if self._pacing is not None:
            self._pacing.controller.took(decision, decision.decided_at, now)
        outcome, first = Outcome([], [], []), 0
        for rank, part in zip(self.ranks, decision.parts, strict=True):
            count = len(part.sampling)
            own = rank.update(part, tokens[first : first + count], now)
            first += count
            outcome = Outcome(
                outcome.sequences + own.sequences,
                outcome.tokens + own.tokens,
                outcome.finished + own.finished,
                outcome.several or own.several,
            )
        assert first == len(tokens), f"{len(tokens)} tokens for {first} sequences"
        self.request_table.refresh()
        return outcome

    def retreat(self, decision: Decision, now: float, error: str) -> None:
        raise AssertionError("other ranks have begun the step already: without memory for it the engine fails")

    def fail(self, now: float, error: str) -> list[Sequence]:
        self.under_way.clear()
        ended = [seq for rank in self.ranks for seq in rank.fail(now, error)]
        self.request_table.refresh()
        return ended

    def _end(self, ended: Iterable[tuple[Sequence, Ending]], now: float) -> None:
        for seq, ending in ended:
            if seq.dp_rank < 0:
                self.request_table.end(seq, ending.finish, now, ending.error)
            else:
                self.ranks[seq.dp_rank]._end([(seq, ending)], now)
        self.request_table.refresh()


def _free_blocks(rank: Scheduler) -> int:
    """Without those that prompts on their way will need."""
    table = rank.request_table
    prompts = [seq for seq in table.running if seq.is_prefilling]
    needed = sum(max(0, seq.blocks_at_start - seq.num_blocks) for seq in prompts)
    return rank.cache.available - needed - sum(seq.blocks_at_start for seq in table.waiting)


def _takes(rank: Scheduler, seq: Sequence, free: int) -> bool:
    """Whether a rank has a row and blocks for a sequence; an idle one has whatever a request may need."""
    table = rank.request_table
    if not table.running and not len(table.waiting):
        return True
    return len(table.waiting) < len(table.rows) and seq.blocks_at_start <= free
