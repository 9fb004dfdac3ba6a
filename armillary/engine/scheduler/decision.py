"""One step: the scheduler's decision, the work in it, its outcome, and how to roll it back.

An executor, in this order, resets the rows of `admitted`, applies `table_updates` to its block tables, performs
`copies` (reads all before it writes any), puts the tokens of `drafts` into their rows (its draft model proposes those
that have none), computes `decodes` and `chunks`, and samples a token for every sequence of
`sampling`. Decisions are executed in the order they are made; the inputs of a row are its tokens at the given
positions, sampled ones included. With pipeline stages these are known when a step is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from armillary.engine.cache.kv_cache import Copy, TableUpdate
from armillary.engine.request.sequence import BROKEN, FinishReason, Sequence
from armillary.engine.speculative.draft import Draft


class StepWork(NamedTuple):
    """How much one engine step computes; the fields are gauges of its record."""

    prefill_tokens: float = 0
    decode_tokens: float = 0
    context_tokens: float = 0  # keys that the decodes read
    prefill_pairs: float = 0  # (query, key) pairs of the prefill chunks
    prefill_rows: float = 0
    prefill_past: float = 0  # prompt tokens before the chunks, computed earlier or found in the prefix cache
    drawn_tokens: float = 0  # tokens drawn at a temperature above 0, instead of the likeliest

    @staticmethod
    def of(record: Mapping[str, Any]) -> StepWork:
        """The work of a recorded step."""
        return StepWork(*(float(record.get(name, 0.0)) for name in StepWork._fields))


class StepTimeModel(Protocol):
    """A model of how long an engine step takes: the roofline of step_time, the planner's `Replica`, the
    fit of planning/simulation/fitted_step_time."""

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with that work."""


class PrefillChunk(NamedTuple):
    """A prefill chunk: consecutive prompt tokens of one sequence."""

    sequence: Sequence
    row: int
    start: int
    size: int
    samples: bool  # the chunk ends the prefill, and a token is sampled


class Decision:
    """What one step computes."""

    __slots__ = (
        "admitted",
        "chunks",
        "copies",
        "decided_at",
        "decodes",
        "drafts",
        "ended",
        "has_constraints",
        "has_finished",
        "has_pooling",
        "last",
        "number",
        "positions",
        "preempted",
        "prefill_done",
        "rows",
        "sampling",
        "table_updates",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.decided_at = 0.0
        self.decodes: list[Sequence] = []  # sequences that compute one token and sample the next
        self.positions: list[int] = []  # position of each decode's token
        self.drafts: list[Draft] = []  # draft tokens: `decodes` has their rows, too, after all others
        self.rows: list[int] = []
        self.chunks: list[PrefillChunk] = []
        self.sampling: list[Sequence] = []  # sample a token: decodes, then chunks that end the prefill
        self.prefill_done: list[Sequence] = []  # their prefill, or recompute after a preemption, ends with this step
        self.last: list[Sequence] = []  # sequences for which the sampled token is the last by length
        self.admitted: list[Sequence] = []  # start or restart in new rows, with the tokens of `sequence.tokens`
        self.table_updates: list[TableUpdate] = []
        self.copies: list[Copy] = []
        self.preempted: list[Sequence] = []
        self.ended: list[Sequence] = []  # sequences past their deadline
        self.has_constraints = False  # a sequence in the step has a constraint that follows its tokens
        self.has_finished = False  # a sequence ended while the step was in flight
        self.has_pooling = False  # a sequence that ends its prefill wants a vector and no token

    @property
    def empty(self) -> bool:
        """Nothing to compute: the executor is not called."""
        return not self.decodes and not self.chunks

    @property
    def num_decodes(self) -> int:
        """Decodes without the rows of draft tokens."""
        return self.drafts[0].at if self.drafts else len(self.decodes)

    @property
    def num_host_blocks(self) -> int:
        """KV blocks copied from or to host memory."""
        return sum(source < 0 or target < 0 for source, target in self.copies)

    @property
    def num_prefill_tokens(self) -> int:
        return sum([chunk.size for chunk in self.chunks])

    def prefill_work(self) -> tuple[int, float, int]:
        """Tokens of the prefill chunks, their (query, key) pairs, and tokens before them."""
        tokens, attention_pairs, past = 0, 0.0, 0
        for _, _, start, size, _ in self.chunks:
            tokens, past = tokens + size, past + start
            attention_pairs += size * (start + (size + 1) / 2)
        return tokens, attention_pairs, past

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def work(self) -> StepWork:
        decodes, chunks = len(self.decodes), self.chunks
        keys = sum(self.positions) + decodes
        drawn = len([seq for seq in self.sampling if seq.request.params.temperature])
        if not chunks:
            return StepWork(0, decodes, keys, 0.0, 0, 0, drawn)
        tokens, attention_pairs, past = self.prefill_work()
        return StepWork(tokens, decodes, keys, attention_pairs, len(chunks), past, drawn)

    def text(self) -> str:
        """One line for logs."""
        parts = [f"step {self.number}: {self.num_decodes} decodes"]
        parts += [f"{draft.sequence.id} drafts {draft.count}" for draft in self.drafts]
        parts += [f"{c.sequence.id} {c.start}…{c.start + c.size}{' →' if c.samples else ''}" for c in self.chunks]
        parts += [f"start {seq.id} ({seq.computed} cached)" for seq in self.admitted if seq.cached_tokens]
        parts += [f"preempt {seq.id}" for seq in self.preempted] + [f"expire {seq.id}" for seq in self.ended]
        parts += [f"{len(self.copies)} copies"] if self.copies else []
        parts += [f"{self.num_host_blocks} of host blocks"] if self.num_host_blocks else []
        return " · ".join(parts)


class Outcome(NamedTuple):
    """The tokens of a step."""

    sequences: list[Sequence]  # sequences that got a token
    tokens: list[int]
    finished: list[Sequence]
    several: bool = False  # a sequence may have got several tokens, one after the other


def joined(first: Outcome, second: Outcome) -> Outcome:
    """Outcomes of steps, one after the other."""
    if not first.sequences and not first.finished:
        return second
    if not second.sequences and not second.finished:
        return first
    return Outcome(
        first.sequences + second.sequences, first.tokens + second.tokens, first.finished + second.finished, True
    )


class Ending(NamedTuple):
    """Why a sequence is finished."""

    finish: FinishReason
    error: str = ""


_BROKEN = Ending("error", "the model gave no number that can be drawn from; check its weights and dtype")


def find_endings(sequences: list[Sequence], tokens: list[int]) -> list[tuple[Sequence, Ending]]:
    """The sequences that end with the token just sampled; constraints advance by theirs."""
    looked = ((seq, _ending(seq, token)) for seq, token in zip(sequences, tokens, strict=True) if token in seq.watched)
    return [(seq, ending) for seq, ending in looked if ending is not None]


def without_broken(sequences: list[Sequence], tokens: list[int]) -> tuple[list[Sequence], list[int]]:
    """The sequences with a usable token, and their tokens; a broken token is removed from its sequence."""
    for seq in sequences:
        if seq.tokens[-1] == BROKEN:
            seq.tokens.pop()
    usable = [(seq, token) for seq, token in zip(sequences, tokens, strict=True) if token != BROKEN]
    return [seq for seq, _ in usable], [token for _, token in usable]


def without_pooled(sequences: list[Sequence], tokens: list[int]) -> tuple[list[Sequence], list[int]]:
    """The sequences that generate, and their tokens; a token that came with a pooled prompt is removed."""
    for seq in sequences:
        if seq.request.params.pooling is not None:
            seq.tokens.pop()
    rest = [pair for pair in zip(sequences, tokens, strict=True) if pair[0].request.params.pooling is None]
    return [seq for seq, _ in rest], [token for _, token in rest]


def _ending(seq: Sequence, token: int) -> Ending | None:
    if token == BROKEN:
        return _BROKEN
    if token in seq.stops and seq.num_output >= seq.request.params.min_tokens:
        return Ending("stop")
    constraint = seq.constraint
    if constraint is not None and not constraint.advance(token):
        return Ending("error", f"token {token} breaks the asked-for structure; report this as a bug")
    return Ending("stop") if constraint is not None and constraint.finished() else None


def take_back(decision: Decision) -> list[Sequence]:
    """Roll back a decision of which nothing was computed: every sequence is where it was before. Blocks, rows and table
    entries stay assigned, and the executor learns of them with the next decision. Returns the unfinished sequences of
    the decision."""
    ends = [
        *zip(decision.decodes, decision.positions, strict=True),
        *((chunk.sequence, chunk.start) for chunk in decision.chunks),
    ]
    unfinished = [(seq, begin) for seq, begin in ends if seq.finish is None]
    prompts = {id(seq) for seq in (*decision.prefill_done, *(chunk.sequence for chunk in decision.chunks))}
    for seq, begin in reversed(unfinished):  # the rows of draft tokens come after the sequence's own
        seq.computed = begin
        if id(seq) in prompts:
            seq.is_prefilling, seq.num_allocated = True, 0
    decision.drafts = []
    return list(dict.fromkeys(seq for seq, _ in unfinished))


def limit_decodes(decision: Decision, first: int, count: int) -> None:
    """Keep `count` decodes of a decision that has only decodes so far, round robin from `first` on; the others wait."""
    decodes = deque(zip(decision.decodes, decision.positions, strict=True))
    decodes.rotate(-first)
    chosen = [decodes.popleft() for _ in range(count)]
    for seq, position in decodes:
        seq.computed = position
    decision.decodes = [seq for seq, _ in chosen]
    decision.positions = [position for _, position in chosen]
    taken = set(map(id, decision.decodes))
    decision.last = [seq for seq in decision.last if id(seq) in taken]


def as_one(copies: list[Copy]) -> list[Copy]:
    """Consecutive copies as copies that are all read before any is written."""
    sources: dict[int, int] = {}
    for source, target in copies:
        sources[target] = sources.get(source, source)
    return [Copy(source, target) for target, source in sources.items() if source != target]
