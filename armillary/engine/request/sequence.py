"""One answer in the making: its tokens, how many of them are computed, and the blocks that hold their keys and values.

There are no phases: `computed` runs after `length`. A prompt is a large gap, a decode a gap of one. `length` counts the
token that is being drawn as well, so a step can be decided while the one before still runs.
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


Finish = Literal["stop", "length", "abort", "deadline", "error"]
FINISHES: dict[Finish, str] = {
    "stop": "an end token or stop text came, or the structure is complete",
    "length": "max_tokens were made, or the model's length is reached",
    "abort": "the client went away",
    "deadline": "it took, or waited, longer than allowed",
    "error": "the model gave no usable numbers, or a step failed",
}


BROKEN = -1
"""stands for a token where the model's numbers were of no use"""


class _Everything:
    """Contains every token."""

    def __contains__(self, token: object) -> bool:
        return True


EVERY_TOKEN = _Everything()


class State(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """in the queue, without blocks: new, or put back"""
    RUNNING = "running"
    """has a row of the batch"""
    FINISHED = "finished"


class Sequence:
    """One of the n answers of a request."""

    __slots__ = (
        "arrived_at",
        "blocks_at_limit",
        "blocks_at_start",
        "cached_tokens",
        "chain",
        "computed",
        "constraint",
        "error",
        "finish",
        "finished_at",
        "first_token_at",
        "forks",
        "held",
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
        "num_hashed",
        "num_prompt",
        "num_visible",
        "num_writable",
        "number",
        "order",
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
        self.index = index
        """which of the request's n answers"""
        self.tokens = list(request.prompt)
        """prompt and the answer so far, as far as known"""
        self.num_prompt = len(self.tokens)
        self.tokens.append(BROKEN)  # and out again: a long list finds room to grow now, not within a step
        self.tokens.pop()
        self.limit = limit
        """tokens of prompt and answer at most"""
        self.stops = stops
        """tokens that end it"""
        self.watched: Container[int] = stops | {BROKEN}
        """tokens at which `update` looks closer"""
        self.constraint: Constraint | None = None
        self.forks: list[Sequence] = []
        """answers that wait until this one has computed the prompt"""
        self.leader: Sequence | None = None
        """the answer whose prompt this one shares"""

        self.logprobs: list[Logprob] = []
        """of its tokens, where they were asked for; there may be more than tokens"""
        self.prompt_logprobs: list[Logprob] = []
        """of the prompt's tokens but the first"""

        self.long_rope = False
        """its tokens turn by the frequencies of long texts, where a model has others for them"""
        self.is_prefilling = True
        """the tokens it started with are not all computed yet"""
        self.prefill_target = self.num_prompt
        """how many those are"""
        self.computed = 0
        """tokens whose keys and values are in the cache, or will be after the decided steps"""
        self.num_visible = 0
        """of these, tokens that others may read: computed by a step before the one that is being decided"""
        self.num_allocated = 0
        """positions below it can be computed without asking anybody"""
        self.num_writable = 0
        """positions below it can be written without asking the cache"""
        self.tables: list[list[int]] = []
        """for each group of layers: the block of tokens 0 … B-1, of B … 2B-1, …"""
        self.windows: list[int] = []
        """for each group: blocks before this index are given back"""
        self.held = 0
        """blocks in the tables"""
        self.chain = chain
        self.num_hashed = 0
        """blocks whose names the prefix cache knows"""
        self.matching = False
        """the prefix cache has not been searched to the end yet"""
        self.cached_tokens = 0
        """prompt tokens found in the prefix cache when it first started"""
        self.miss: Miss | None = None
        """why no more were found"""
        self.number = 0
        """of the request, as they were submitted"""
        self.shared_prefix = self.prefix_source = 0
        """prompt tokens that an earlier text began with too, cached or not, and the number of the last such request"""
        self.largest_gap_s = 0.0
        """between two of its tokens, as they were put out"""

        self.state = State.WAITING
        self.row = -1
        """place in the batch; kept while it runs"""
        self.order: tuple[float, int, int] = (0.0, 0, index)
        """who goes first: arrival and priority, number, index"""
        self.blocks_at_start = 0
        """blocks of the tokens it starts with"""
        self.blocks_at_limit = 0
        """blocks if it gets as long as it may"""
        self.preemptions = 0
        self.finish: Finish | None = None
        self.error = ""
        self.arrived_at = 0.0
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def id(self) -> str:
        """Name of the request, and which answer where there are several."""
        return self.request.id if self.request.params.n == 1 else f"{self.request.id}/{self.index}"

    @property
    def output(self) -> list[int]:
        """The answer's tokens so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def length(self) -> int:
        """Tokens, those on their way included: once it has caught up, each token computed brings the next."""
        return self.prefill_target if self.is_prefilling else self.computed + 1

    @property
    def num_pending(self) -> int:
        """Tokens drawn in steps whose results are not back."""
        return self.length - len(self.tokens)

    def needs_block(self, ahead: int) -> bool:
        """Whether it comes to the end of its blocks within `ahead` tokens, in the middle of its answer."""
        left = self.num_writable - self.computed
        return 0 <= left <= ahead and not self.is_prefilling and self.num_writable < self.limit - 1

    @property
    def can_fork(self) -> bool:
        """Whether it may start from what its leader has computed."""
        leader = self.leader
        if leader is None or self.preemptions or leader.long_rope != self.long_rope:
            return False
        return leader.state is State.RUNNING and leader.num_visible >= self.num_prompt - 1

    def __repr__(self) -> str:
        return f"<{self.id} {self.state.value} {self.computed}/{self.length} of {self.limit}>"


class Logprob(NamedTuple):
    """Of one token of an answer or a prompt, by the model alone: before penalties, biases and filters."""

    token: int
    """the token that stands there"""
    value: float
    """natural logarithm of its probability"""
    top: tuple[tuple[int, float], ...]
    """the likeliest tokens and theirs, as many as were asked for"""
