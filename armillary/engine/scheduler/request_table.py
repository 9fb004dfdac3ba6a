"""The request table: all requests in the engine, the queue, the running batch with its rows, and deadlines."""

from bisect import insort
from operator import attrgetter

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.prefix_reuse_stats import PrefixReuse
from armillary.engine.request.counters import Totals
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import FinishReason, Sequence, State
from armillary.engine.scheduler.queue import Deadlines, Waiting
from armillary.engine.scheduler.request_checks import LONG_ROPE, MakeConstraint, check, make_sequences
from armillary.engine.scheduler.settings import Settings
from armillary.errors import BadInput

_ORDER = attrgetter("order")


class RequestTable:
    """Every unfinished sequence and its state."""

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        self.settings = settings
        self.cache = cache
        self.waiting = Waiting()
        self.deadlines = Deadlines()
        self.running: list[Sequence] = []
        """in order of precedence: a sequence may preempt those after it, and the first never waits"""
        self.awaiting_blocks: list[Sequence] = []
        """their prompts' blocks are computed elsewhere and on their way; they are not in the queue yet"""
        self.rows = list(range(settings.max_running - 1, -1, -1))  # free rows of the batch, the next one last
        self.requests: dict[str, list[Sequence]] = {}  # request id -> sequences, of every unfinished request
        self.totals = Totals()
        self.prefix_reuse = PrefixReuse()
        self.adapters: set[str] = set()  # LoRA adapters that requests may name
        self.dp_rank = -1  # that of its sequences (dp_scheduler)

    def prepare(self, request: Request, constraint: MakeConstraint | None) -> list[Sequence]:
        """Check a request and make its sequences: the work in proportion to the prompt. It changes nothing that steps
        read, so any thread may do it while another schedules."""
        self._check_adapter(request)
        limit = check(request, self.settings, self.cache, constraint)
        sequences = make_sequences(request, limit, self.settings, self.cache, constraint)
        self.prefix_reuse.see(sequences, self.cache.block_tokens)
        return sequences

    def enter(self, sequences: list[Sequence], now: float, *, awaits_blocks: bool = False) -> None:
        """Queue a prepared request, or set it aside until `blocks_came`; BadInput where the queue is full or the id is
        taken."""
        request = sequences[0].request
        if request.id in self.requests:
            raise BadInput(f"request '{request.id}' is here already; give each its own id")
        self._check_adapter(request)  # it may have been unloaded since
        most = self.settings.max_waiting
        if most is not None and self.num_waiting >= most:
            self.totals.rejected += 1
            raise BadInput(f"{self.num_waiting:,} requests are waiting, as many as may; try again later")
        key = now + request.priority * self.settings.ageing_s
        for seq in sequences:
            seq.order, seq.arrived_at = (key, self.totals.submitted, seq.index), now
            self._set_deadlines(seq, now)
        self.totals.submitted += 1
        self.requests[request.id] = sequences
        if awaits_blocks:
            self.awaiting_blocks.append(sequences[0])
        else:
            self.waiting.push(sequences[0])

    @property
    def num_waiting(self) -> int:
        """Sequences that have not started."""
        return len(self.waiting) + len(self.awaiting_blocks)

    def blocks_came(self, seq: Sequence) -> None:
        """Queue a sequence that awaited blocks: they are in the prefix cache now, or will not come."""
        self.awaiting_blocks.remove(seq)
        self.waiting.push(seq)

    def _check_adapter(self, request: Request) -> None:
        if request.adapter and request.adapter not in self.adapters:
            raise BadInput(f"adapter '{request.adapter}' is not loaded; load it, or ask for the model without")

    def wake_at(self, now: float) -> float | None:
        """When the scheduler has something to do if nothing else happens: now, at a deadline, at the end of a batch
        window, or never (None)."""
        if self.running:
            return now
        times, first = [self.deadlines.next()], self.waiting.first()
        if first is not None:
            window_s = self.settings.batch_window_s if self.settings.batching == "dynamic" else 0.0
            full = len(self.waiting) >= self.settings.max_running
            times.append(now if full else first.arrived_at + window_s)
        known = [time for time in times if time is not None]
        return max(now, min(known)) if known else None

    def _set_deadlines(self, seq: Sequence, now: float) -> None:
        if seq.request.timeout_s is not None:
            self.deadlines.add(now + seq.request.timeout_s, seq)
        if self.settings.max_wait_s is not None:
            self.deadlines.add(now + self.settings.max_wait_s, seq, only_waiting=True)

    def start(self, seq: Sequence, now: float) -> None:
        """Move a sequence from the queue into the batch; a fork shares its leader's blocks where it still has them."""
        assert not seq.num_pending, f"{seq.id} starts while a token of it is in flight"
        seq.state, seq.row = State.RUNNING, self.rows.pop()
        self.cache.start(seq)
        seq.is_prefilling, seq.prefill_target = True, len(seq.tokens)
        if seq.leader is not None and seq.can_fork and self.cache.fork(seq.leader, seq):
            seq.cached_tokens = seq.computed
        if seq.started_at is None:
            seq.started_at = now
            self.totals.tokens_in += seq.num_prompt
            self.totals.looked_up += seq.num_prompt if seq.matching else 0
            self.totals.repeated += seq.shared_prefix
        insort(self.running, seq, key=_ORDER)

    def preempt(self, seq: Sequence) -> None:
        """Move a sequence from the batch into the queue: its tokens stay and are recomputed, those in flight will be
        added."""
        self.totals.preempted += 1
        self.totals.recomputed += seq.computed
        seq.is_prefilling, seq.prefill_target = True, seq.length
        self._release(seq)
        self.running.remove(seq)
        seq.state = State.WAITING
        seq.preemptions += 1
        seq.blocks_at_start = self.cache.blocks_at(seq.prefill_target)
        self.waiting.push(seq)

    def switch_rope(self, length: int) -> list[Sequence]:
        """Recompute sequences that grow beyond the length at which the RoPE frequencies change, as transformers
        does."""
        running = self.running
        grown = [x for x in running if x.computed == length and not x.is_prefilling and not x.long_rope]
        for seq in grown:
            self.preempt(seq)
            seq.long_rope, request = True, seq.request
            seq.chain = self.cache.chain(seq.tokens, request.salt, request.adapter + LONG_ROPE)
        return grown

    def wake_forks(self, seq: Sequence) -> None:
        """Queue the forks of a sequence: its prompt is computed, or never will be."""
        for fork in seq.forks:
            if fork.finish is None:
                self.waiting.push(fork)
        seq.forks = []

    def end(self, seq: Sequence, reason: FinishReason, now: float, error: str = "") -> None:
        """Finish a sequence; call `sweep` after the last."""
        assert seq.finish is None, f"{seq.id} is finished already"
        sleeping = seq.leader is not None and seq in seq.leader.forks
        if seq.state is State.RUNNING:
            self._release(seq, spoiled=reason == "error")
        elif seq in self.awaiting_blocks:
            self.awaiting_blocks.remove(seq)
        elif not sleeping:
            self.waiting.left()
        seq.state, seq.finish, seq.finished_at, seq.error = State.FINISHED, reason, now, error
        self.deadlines.forget(seq)
        if seq.forks:
            self.wake_forks(seq)
        self._count(seq, reason)
        self.prefix_reuse.ended(seq)

    def _count(self, seq: Sequence, reason: FinishReason) -> None:
        self.totals.aborted += reason in ("abort", "deadline")
        self.totals.errors += reason == "error"
        siblings = self.requests[seq.request.id]
        if all(other.finish is not None for other in siblings):
            self.totals.finished += reason in ("stop", "length")
            del self.requests[seq.request.id]

    def sweep(self) -> None:
        """Remove finished sequences from the batch."""
        self.running = [seq for seq in self.running if seq.state is State.RUNNING]

    def _release(self, seq: Sequence, *, spoiled: bool = False) -> None:
        self.cache.free(seq, spoiled=spoiled)
        self.rows.append(seq.row)
        seq.row = -1
