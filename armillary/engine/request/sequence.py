"""One sequence: its tokens, how many of them are computed, and the blocks that hold their keys and values.

There are no phases: `computed` follows `length`. A prefill is a large gap, a decode a gap of one. `length` counts the
token in flight as well, so that a step can be scheduled while the one before still runs.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from armillary.engine.cache.block_hash import Chain
    from armillary.engine.cache.prefix_cache import Miss
    from armillary.engine.request.constraint import Constraint
    from armillary.engine.request.request import Request
    from armillary.engine.speculative.draft import DraftState


FinishReason = Literal["stop", "length", "abort", "deadline", "error"]
FINISHES: dict[FinishReason, str] = {
    "stop": "an end token or stop string came, or the structure is complete",
    "length": "max_tokens or the model's length is reached",
    "abort": "the client went away",
    "deadline": "it ran or waited longer than allowed",
    "error": "the logits were not finite, or a step failed",
}


BROKEN = -1  # in place of a token where the logits were not finite


EVERY_TOKEN = range(BROKEN, 1 << 31)


class State(Enum):
    """State of a sequence."""

    WAITING = "waiting"  # in the queue, without blocks: new or preempted
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One of the n completions of a request."""

    __slots__ = (
        "arrived_at",
        "blocks_at_limit",
        "blocks_at_start",
        "cached_tokens",
        "chain",
        "computed",
        "constraint",
        "dp_rank",
        "draft",
        "error",
        "finish",
        "finished_at",
        "first_token_at",
        "forks",
        "index",
        "is_prefilling",
        "largest_gap_s",
        "leader",
        "limit",
        "logprobs",
        "long_rope",
        "matching",
        "miss",
        "num_allocated",
        "num_blocks",
        "num_hashed",
        "num_prompt",
        "num_visible",
        "num_writable",
        "number",
        "order",
        "pooled",
        "preemptions",
        "prefill_target",
        "prefix_source",
        "prompt_logprobs",
        "request",
        "row",
        "shared_prefix",
        "started_at",
        "state",
        "stops",
        "tables",
        "tokens",
        "watched",
        "windows",
    )

    def __init__(self, request: Request, index: int, chain: Chain, limit: int, stops: frozenset[int]) -> None:
        self.request = request
        self.index = index  # which of the request's n completions
        self.tokens = list(request.prompt)  # prompt and known output
        self.num_prompt = len(self.tokens)
        self.tokens.append(BROKEN)  # and out again: a long list is reallocated now, not within a step
        self.tokens.pop()
        self.limit = limit  # most tokens of prompt and output
        self.stops = stops
        self.watched: Container[int] = stops | {BROKEN}  # tokens that `find_endings` checks
        self.constraint: Constraint | None = None
        self.draft: DraftState | None = None  # its draft tokens so far, where there are any
        self.forks: list[Sequence] = []  # sequences that wait until this one has computed the shared prompt
        self.leader: Sequence | None = None  # the sequence whose prompt this one shares

        self.logprobs: list[Logprob] = []  # of its output tokens, where requested; there may be more than tokens
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens but the first
        self.pooled: list[float] = []  # of its prompt, where requested, once that is computed

        self.long_rope = False  # uses the RoPE frequencies of long contexts, where the model has such
        self.is_prefilling = True  # the tokens that it started with are not all computed
        self.prefill_target = self.num_prompt
        self.computed = 0  # tokens whose keys and values are in the cache, or will be after the scheduled steps
        self.num_visible = 0  # computed tokens that others may read: those of steps before the one being scheduled
        self.num_allocated = 0  # positions below can be scheduled without any further check
        self.num_writable = 0  # positions below are in blocks that this sequence may write
        self.tables: list[list[int]] = []  # per layer group: the block of tokens 0 … B-1, of B … 2B-1, …
        self.windows: list[int] = []  # per layer group: blocks before this index are freed
        self.num_blocks = 0
        self.chain = chain
        self.num_hashed = 0
        self.matching = False  # the prefix lookup is not finished
        self.cached_tokens = 0  # prompt tokens found in the prefix cache at its first start
        self.miss: Miss | None = None  # why no more were found
        self.number = 0  # number of the request, in order of submission
        self.shared_prefix = 0  # prompt tokens shared with an earlier sequence, cached or not
        self.prefix_source = 0  # number of the last request that shares them
        self.largest_gap_s = 0.0

        self.state = State.WAITING
        self.row = -1  # row of the batch while it runs
        self.dp_rank = -1  # with data-parallel attention: where it runs; -1: not assigned yet
        self.order: tuple[float, int, int] = (0.0, 0, index)  # order of precedence: arrival and priority, number, index
        self.blocks_at_start = 0  # blocks of the tokens that it starts with
        self.blocks_at_limit = 0
        self.preemptions = 0
        self.finish: FinishReason | None = None
        self.error = ""
        self.arrived_at = 0.0
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def id(self) -> str:
        """Id of the request, with the index where n > 1."""
        return self.request.id if self.request.params.n == 1 else f"{self.request.id}/{self.index}"

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens, those in flight included: after prefill, each computed token brings the next."""
        return self.prefill_target if self.is_prefilling else self.computed + 1

    @property
    def num_pending(self) -> int:
        """Tokens in flight."""
        return self.length - len(self.tokens)

    def forget_blocks(self, num_groups: int) -> None:
        """Back to empty tables and nothing computed."""
        self.tables, self.windows = [[] for _ in range(num_groups)], [0] * num_groups
        self.computed = self.num_visible = self.num_allocated = self.num_writable = self.num_hashed = 0
        self.num_blocks, self.matching = 0, False
        if self.draft is not None:
            self.draft.computed = 0

    def needs_block(self, ahead: int) -> bool:
        """Whether it decodes and reaches the end of its blocks within `ahead` tokens."""
        left = self.num_writable - self.computed
        return 0 <= left <= ahead and not self.is_prefilling and self.num_writable < self.limit - 1

    @property
    def can_fork(self) -> bool:
        """Whether it may share what its leader has computed."""
        leader = self.leader
        if leader is None or self.preemptions or leader.long_rope != self.long_rope:
            return False
        return leader.state is State.RUNNING and leader.num_visible >= self.num_prompt - 1

    def __repr__(self) -> str:
        return f"<{self.id} {self.state.value} {self.computed}/{self.length} of {self.limit}>"


class Logprob(NamedTuple):
    """Log-probability of one token by the model alone: before penalties, biases and filters."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...]  # the most likely tokens and their log-probabilities, as many as requested
