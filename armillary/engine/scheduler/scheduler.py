"""The scheduler: what the next step computes, and what its sampled tokens mean.

`schedule(now)` decides a step and `update(decision, tokens, now)` takes its tokens. Time is an argument, and one
decision may be in flight while the next is made, with pipeline stages as many as there are stages
(`pipelined_steps.py`). There are no phases: the computed tokens of every running sequence catch up with its tokens.
Decodes go first, prefill chunks fill the rest of the step, then waiting requests start.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from armillary.engine.cache.kv_cache import CacheHousekeeping, Copy, KVCache
from armillary.engine.cache.prefix_lookup import search
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import BROKEN, FinishReason, Sequence, State
from armillary.engine.scheduler import invariants
from armillary.engine.scheduler.admission import Admission
from armillary.engine.scheduler.decision import (
    Decision,
    Ending,
    Outcome,
    PrefillChunk,
    as_one,
    find_endings,
    limit_decodes,
    take_back,
    without_broken,
    without_pooled,
)
from armillary.engine.scheduler.pipelined_steps import prefill_of_step, sequences_of_step
from armillary.engine.scheduler.preemption import fitting, preempt_until_fits
from armillary.engine.scheduler.prefill_budget import Budget, PrefillPlanner, StepLimit
from armillary.engine.scheduler.request_checks import MakeConstraint
from armillary.engine.scheduler.request_table import RequestTable
from armillary.engine.scheduler.settings import Settings, check_step_budget
from armillary.engine.speculative.speculation import Speculation

_RUNNING = State.RUNNING


class Scheduler:
    """Decides steps over the request table and the KV cache."""

    def __init__(self, settings: Settings, cache: KVCache) -> None:
        check_step_budget(settings.max_tokens_per_step, settings.max_running)
        self.settings = settings
        self.cache = cache
        self.request_table = RequestTable(settings, cache)
        self.admission = Admission(settings, cache)
        self.housekeeping = CacheHousekeeping(cache)
        self.prefill = PrefillPlanner(settings, cache.block_tokens)
        self.totals = self.request_table.totals
        self.limit = StepLimit(settings.max_tokens_per_step)
        self.speculation: Speculation | None = None  # draft tokens; None: every step gives a sequence one token
        self.under_way: deque[Decision] = deque()  # decided steps whose tokens are not back
        self._admitted: list[Sequence] = []
        self._fresh: list[Sequence] = []
        self._ended: list[Sequence] = []  # by decisions that were rolled back: the next decision reports them
        self._watched = {BROKEN}  # tokens that may end a running sequence
        self._lookups = 0
        self._stalled = False
        self._full = False
        self._retreated = False
        self._copies: list[Copy] = []  # of the last decision, one after the other
        # whether a step may follow tokens that are not known yet: an executor reads them where they were sampled; with
        # stages they are sampled elsewhere, and every sequence waits for its own
        self._samples_ahead = settings.num_stages == 1
        self._waits = not settings.late_masks  # a structured sequence is not scheduled before its last token is known

    # --- requests

    def submit(self, request: Request, now: float, constraint: MakeConstraint | None = None) -> list[Sequence]:
        """Queue a request, one sequence per completion; BadInput says what is wrong with it, and nothing else
        changes."""
        sequences = self.request_table.prepare(request, constraint)
        self.request_table.enter(sequences, now)
        return sequences

    def abort(self, request_id: str, now: float, reason: FinishReason = "abort") -> list[Sequence]:
        """End what is left of a request; returns the sequences that were not finished."""
        ended = [seq for seq in self.request_table.requests.get(request_id, ()) if seq.finish is None]
        self._end([(seq, Ending(reason)) for seq in ended], now)
        return ended

    def finish(self, seq: Sequence, reason: FinishReason, now: float, *, num_output: int | None = None) -> None:
        """End one sequence from outside (a stop string was seen), keeping its first `num_output` tokens."""
        self._end([(seq, Ending(reason))], now)
        if num_output is not None:
            del seq.tokens[seq.num_prompt + num_output :]

    def _end(self, ended: list[tuple[Sequence, Ending]], now: float) -> None:
        """Remove sequences from wherever they are."""
        for seq, ending in ended:
            self.request_table.end(seq, ending.finish, now, ending.error)
        if ended:
            self.request_table.sweep()
            self._full = False
            for decision in self.under_way:
                decision.has_finished = True

    def speculate(self, make: Callable[[KVCache], Speculation]) -> None:
        """Draft tokens from now on."""
        self.speculation = make(self.cache)

    def stream(self) -> None:
        """Outputs are streamed from now on."""
        self.prefill.stream()

    @property
    def caches(self) -> Items[KVCache]:
        """Every KV cache that sequences are in."""
        return (self.cache,)

    @property
    def has_work(self) -> bool:
        return bool(self.request_table.requests)

    @property
    def unsettled(self) -> bool:
        """Whether the next step does more than its decodes ask for: something was just started or ended, drafts or
        blocks are pending, or steps are limited."""
        return bool(self._fresh or self._admitted or self.has_extras)

    @property
    def has_extras(self) -> bool:
        """Whether the next step does more than decodes and prefill ask for."""
        return bool(
            self._ended
            or self.cache.freeing
            or self.cache.offload is not None
            or self.limit.tight
            or self.speculation is not None
            or self.settings.rope_switch is not None
            or self.settings.num_stages > 1
        )

    # --- deciding a step

    def schedule(self, now: float) -> Decision:
        """Decide the next step. One earlier decision may still be in flight, and with stages one fewer than there are
        stages."""
        assert len(self.under_way) < max(2, self.settings.num_stages), "update the oldest step first"
        assert not (self.under_way and self.under_way[0].drafts and self._samples_ahead), "update its drafts first"
        self.totals.steps += 1
        decision = Decision(self.totals.steps)
        self._finish_last_step(decision, now)
        prompts = self._decode(decision)
        decision.decided_at = now
        num_decodes, num_prompts = len(decision.decodes), len(prompts) + len(self.request_table.waiting)
        left, num_stages = self.limit.tokens - num_decodes, self.settings.num_stages
        if num_stages > 1:
            left = prefill_of_step(self.request_table, left, num_stages)
            decoding = sum(not seq.is_prefilling for seq in self.request_table.running)
            self.prefill.other_decodes = max(0, decoding - num_decodes)
        budget = self.prefill.budget(left, num_decodes, num_prompts)
        for seq in prompts:
            self._chunk(decision, seq, budget)
        self._admit(decision, budget, now)
        if self.speculation is not None and not (self.under_way and self._samples_ahead):
            left = self.limit.tokens - decision.num_tokens
            self.speculation.draft(decision, len(self.request_table.running), left)
        self._close(decision)
        return decision

    def _finish_last_step(self, decision: Decision, now: float) -> None:
        """After the last step: register computed blocks, wake forks, free blocks, expire deadlines."""
        self._lookups, self._stalled = self.settings.lookups, False
        if self.cache.freeing:
            self.cache.free_some(self.settings.lookups)
        for seq in self._fresh:
            if seq.state is _RUNNING:
                self.cache.register_blocks(seq)
                seq.num_visible = seq.computed
                if seq.forks and seq.computed >= seq.num_prompt:
                    self.request_table.wake_forks(seq)
                    self._full = False
        self._fresh.clear()
        self.housekeeping.step(self.request_table.running)
        expired = self.request_table.deadlines.expired(now)
        if expired:
            self._end([(seq, Ending("deadline")) for seq in expired], now)
        if expired or self._ended:
            decision.ended, self._ended = self._ended + expired, []
        if self.settings.rope_switch is not None:
            decision.preempted += self.request_table.switch_rope(self.settings.rope_switch)

    def _decode(self, decision: Decision) -> list[Sequence]:
        """One token for every sequence that decodes; returns the sequences that are still prefilling."""
        prompts: list[Sequence] = []
        take, place = decision.decodes.append, decision.positions.append
        running, num_stages = self.request_table.running, self.settings.num_stages
        if num_stages > 1:
            running = sequences_of_step(running, num_stages)
        for seq in running:  # sequences preempted meanwhile come after this one
            at = seq.computed
            if at >= seq.num_allocated and not self._may_advance(decision, seq, prompts):
                continue
            seq.computed = at + 1
            take(seq)
            place(at)
        if len(decision.decodes) > self.limit.tokens:
            limit_decodes(decision, self.limit.next_decode, self.limit.tokens)
            self.limit.next_decode += self.limit.tokens
        return prompts

    def _may_advance(self, decision: Decision, seq: Sequence, prompts: list[Sequence]) -> bool:
        """Whether a sequence at its `num_allocated` goes on: it is at the end of its blocks, its limit or its
        prefill."""
        if seq.is_prefilling:
            prompts.append(seq)
            return False
        if seq.computed >= seq.limit - 1 or (seq.constraint is not None and self._waits and seq.num_pending):
            return False  # its last token is in flight, or the next one depends on it
        at = seq.computed
        fits = at < seq.num_writable or preempt_until_fits(self.request_table, decision, seq, at + 1)
        self._stalled |= not fits
        decision.has_constraints |= seq.constraint is not None
        if fits and at == seq.limit - 2:
            decision.last.append(seq)
        return fits

    def _chunk(self, decision: Decision, seq: Sequence, budget: Budget) -> None:
        """The next prefill chunk of a sequence, as large as budget and blocks allow."""
        if budget.spent or seq.state is not _RUNNING:
            return
        self._lookups -= search(self.cache, seq, self._lookups, self.totals)
        if seq.matching:
            return  # the step's share of prefix lookups is used up
        count = self.prefill.chunk_size(budget, len(decision.decodes), seq.prefill_target - seq.computed, seq.computed)
        if not count:
            budget.close()
            return
        count = fitting(self.request_table, decision, seq, count)
        if not count:
            self._stalled = True
            return
        self._add_chunk(decision, seq, count)
        self._fresh.append(seq)
        budget.pay(count, seq.computed - count)

    def _add_chunk(self, decision: Decision, seq: Sequence, count: int) -> None:
        start = seq.computed
        seq.computed = start + count
        samples, pools = seq.computed == seq.prefill_target, seq.request.params.pooling is not None
        if samples:
            seq.is_prefilling = False
            decision.prefill_done.append(seq)
            decision.has_constraints |= seq.constraint is not None
            decision.has_pooling |= pools
            if seq.computed == seq.limit - 1:
                decision.last.append(seq)
        else:
            seq.num_allocated = 0  # a single remaining token is not a decode yet
        if samples and count == 1 and not pools:
            decision.decodes.append(seq)
            decision.positions.append(start)
        else:
            decision.chunks.append(PrefillChunk(seq, seq.row, start, count, samples))

    def _admit(self, decision: Decision, budget: Budget, now: float) -> None:
        """Start waiting sequences in order, as long as rows, blocks and budget last."""
        request_table, admission = self.request_table, self.admission
        admission.begin_step(preempted=bool(decision.preempted))
        first = request_table.waiting.first()
        if first is None:
            return
        admission.open_batch(len(request_table.running), len(request_table.waiting), first.arrived_at, now)
        whole_batch = self.settings.batching in ("static", "dynamic")
        while first is not None and request_table.rows and (not budget.spent or whole_batch):
            if decision.preempted or self._stalled or not admission.lets_in(first, request_table.running):
                return
            if first.num_pending:
                return  # it was preempted, and its last token is in flight
            if request_table.running and (self._full or not admission.fits(first, request_table.running)):
                self._full = True  # until a sequence ends: until then the answer stays the same
                return
            if not self._can_share(first):
                return
            request_table.start(request_table.waiting.pop(), now)
            self._watched |= first.stops
            self._admitted.append(first)
            self._chunk(decision, first, budget)
            first = request_table.waiting.first()

    def _can_share(self, seq: Sequence) -> bool:
        """Whether this step may fork it: sharing the blocks of a long prompt takes time, so one such fork per step."""
        blocks = seq.blocks_at_start if seq.can_fork else 0
        if blocks > self._lookups and self._lookups < self.settings.lookups:
            return False
        self._lookups -= blocks
        return True

    def _close(self, decision: Decision) -> None:
        if not decision.empty:  # else the executor learns of it with the next step
            if self._admitted:
                decision.admitted = [seq for seq in dict.fromkeys(self._admitted) if seq.state is _RUNNING]
                self._admitted.clear()
            decision.table_updates, self.cache.table_updates = self.cache.table_updates, []
            self._copies, self.cache.copies = self.cache.copies, []
            decision.copies = self._copies
            if self._retreated or self.cache.offload is not None:
                decision.copies, self._retreated = as_one(self._copies), False
        decision.rows = [seq.row for seq in decision.decodes]
        prefilled = [chunk.sequence for chunk in decision.chunks if chunk.samples]
        decision.sampling = decision.decodes + prefilled if prefilled else decision.decodes
        self.under_way.append(decision)
        self._check()

    def retreat(self, decision: Decision, now: float, error: str) -> None:
        """The executor found no memory for the last decision and did nothing of it: the decision is rolled back, and
        the next one is half as large. A request that is alone in a step of at most one block ends with an error; no
        other request does."""
        assert self.under_way and decision is self.under_way[-1], "only the last decision can be taken back"
        self.under_way.pop()
        unfinished, tokens = take_back(decision), decision.num_tokens
        if self.cache.has_states:  # some layers may have been computed, and their states have gone on
            for seq in unfinished:
                self.request_table.preempt(seq)
        self._fresh.clear()
        self._admitted[:0] = decision.admitted
        self.cache.table_updates[:0] = decision.table_updates
        self.cache.copies[:0] = self._copies
        self._retreated = True
        self._ended += decision.ended
        decision.ended = []
        self.totals.shrunk += 1
        if len(unfinished) > 1 or tokens > self.cache.block_tokens:
            self.limit.failed(tokens)
        else:
            self.limit.reset()
            self._ended += unfinished
            self._end([(seq, Ending("error", error)) for seq in unfinished], now)
        decision.decodes, decision.positions, decision.chunks = [], [], []
        self._check()

    # --- taking its tokens

    def update(self, decision: Decision, tokens: Items[int], now: float) -> Outcome:
        """Take the tokens sampled for `decision.sampling`; -1 marks a row with non-finite logits."""
        in_order = decision.empty or decision is self.under_way[0]
        assert self.under_way and in_order, "steps are updated in the order they were decided"
        assert len(tokens) == len(decision.sampling), f"{len(tokens)} tokens for {len(decision.sampling)} sequences"
        self.under_way.remove(decision)
        if self.limit.tight:
            self.limit.went_well()
        if self.prefill.controller is not None:
            self.prefill.controller.took(decision, decision.decided_at, now)
        sequences, sampled = decision.sampling, list(tokens)
        if decision.drafts and self.speculation is not None:
            sequences, sampled = self.speculation.accept(decision, sampled)
        if decision.has_finished:
            sampled = [token for seq, token in zip(sequences, sampled, strict=True) if seq.finish is None]
            sequences = [seq for seq in sequences if seq.finish is None]
            self.totals.discarded += len(decision.sampling) - len(sampled)
        deque(map(list.append, [seq.tokens for seq in sequences], sampled), maxlen=0)  # each row of each step, in C
        over = self._endings(decision, sequences, sampled)
        for seq in decision.prefill_done:
            if seq.first_token_at is None:
                seq.first_token_at = now
        if BROKEN in sampled:
            sequences, sampled = without_broken(sequences, sampled)
        if over:
            for seq, _ in over:
                self.admission.ended(seq)
            self._end(over, now)
        if decision.has_pooling:
            sequences, sampled = without_pooled(sequences, sampled)
        self.totals.tokens_out += len(sampled)
        if self.speculation is not None:
            self.speculation.took(decision, sequences, now)
        self._check()
        return Outcome(sequences, sampled, [seq for seq, _ in over], bool(decision.drafts))

    def _endings(
        self, decision: Decision, sequences: list[Sequence], tokens: list[int]
    ) -> list[tuple[Sequence, Ending]]:
        """The sequences whose last token has just come, and why."""
        may_end = decision.has_constraints or not self._watched.isdisjoint(tokens)
        over = find_endings(sequences, tokens) if may_end else []
        if decision.last:
            ended = {id(seq) for seq, _ in over}
            over += [(seq, Ending("length")) for seq in decision.last if seq.finish is None and id(seq) not in ended]
        return over

    def fail(self, now: float, error: str) -> list[Sequence]:
        """The executor could not do a step: the sequences in flight end with an error. The KV cache is invalid from
        then on, so all others are recomputed."""
        hit = {id(seq): seq for step in self.under_way for seq in (*step.decodes, *(c.sequence for c in step.chunks))}
        ended = [seq for seq in hit.values() if seq.finish is None]
        self.under_way.clear()
        self._end([(seq, Ending("error", error)) for seq in ended], now)
        for seq in list(self.request_table.running):
            self.request_table.preempt(seq)
        self.cache.invalidate_all()
        self._admitted.clear()
        self._fresh.clear()
        self._check()
        return ended

    def _check(self) -> None:
        interval = self.settings.check_every
        if interval and not self.totals.steps % interval:
            invariants.check(self)
