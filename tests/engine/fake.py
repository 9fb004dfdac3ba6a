"""A stand-in for model and executor: tokens are a function of the history, read out of simulated blocks.

The executor keeps its own rows, block tables and blocks, filled only by what decisions say. Every "key" it stores is a
token with its position; before it draws a token it reads the whole past back through the tables, so a wrong block, a
missing copy, a stale table or a freed window shows as a wrong answer or as an error.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.kv_offload import KVOffload
from armillary.engine.cache.layer_groups import FULL_ATTENTION, Group
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings
from armillary.engine.scheduler.step_loop import Loop

VOCAB = 50
EOS = 1


def next_token(seen: Items[tuple[int, int]], index: int, vocab: int = VOCAB) -> int:
    """What the "model" says after these (token, position) pairs, for the request's answer `index`."""
    value = 17 + 31 * index
    for token, position in seen:
        value = (value * 1_000_003 + token * 8191 + position) % 2_147_483_647
    return value % vocab


def seen_by(group: Group, tokens: Items[int], position: int) -> list[tuple[int, int]]:
    """What the query at `position` sees."""
    return [(tokens[i], i) for i in range(group.first_needed(position), position + 1)]


def expected(
    request: Request,
    index: int = 0,
    groups: Items[Group] = FULL_ATTENTION,
    eos: int | None = EOS,
    max_model_len: int = 10_000,
) -> list[int]:
    """The answer, computed alone and without any cache."""
    tokens, params = list(request.prompt), request.params
    limit = min(max_model_len, len(tokens) + (params.max_tokens or max_model_len))
    while len(tokens) < limit:
        position = len(tokens) - 1
        token = next_token([pair for group in groups for pair in seen_by(group, tokens, position)], index)
        tokens.append(token)
        if token == eos and len(tokens) - len(request.prompt) >= params.min_tokens:
            break
    return tokens[len(request.prompt) :]


class FakeExecutor:
    """Does what decisions say, to lists."""

    def __init__(self, cache: KVCache, max_running: int, vocab: int = VOCAB, *, staged: bool = False) -> None:
        """`staged`: the first of several stages, which learns of a token when the scheduler knows it."""
        self.staged = staged
        self.size, self.groups, self.vocab = cache.block_tokens, cache.groups, vocab
        self.blocks: dict[int, list[Any]] = {block: [None] * self.size for block in range(cache.pool.num_blocks)}
        """by number; those in host memory are negative"""
        self.tables: list[list[dict[int, int]]] = [[{} for _ in self.groups] for _ in range(max_running)]
        self.row_tokens: list[list[int]] = [[] for _ in range(max_running)]
        self.computed = 0
        self.launched = 0

    def launch(self, decision: Decision) -> list[int]:
        """Run a step; the tokens drawn for `decision.sampling`."""
        self.launched += 1
        for seq in decision.admitted:
            self.row_tokens[seq.row] = list(seq.tokens)
            self.tables[seq.row] = [{} for _ in self.groups]
        for row, group, first, blocks in decision.table_updates:
            if row >= 0:
                self.tables[row][group].update(enumerate(blocks, first))
        contents = [self.blocks[copy.source].copy() for copy in decision.copies]
        for copy, content in zip(decision.copies, contents, strict=True):
            self.blocks[copy.target] = content
        decodes = list(zip(decision.decodes, decision.rows, decision.positions, strict=True))
        for seq, row, at in decodes[: decision.num_decodes] if self.staged else ():
            assert at == len(seq.tokens) - 1, "a decode follows the last known token"
            self.row_tokens[row][at : at + 1] = seq.tokens[at:]
        for draft in decision.drafts:
            self.row_tokens[draft.row][draft.start :] = draft.tokens
        for _, row, at in decodes:
            self._write(row, at, 1)
        for chunk in decision.chunks:
            self._write(chunk.row, chunk.start, chunk.size)
        ends = decodes + [(c.sequence, c.row, c.start + c.size - 1) for c in decision.chunks if c.samples]
        assert [seq for seq, _, _ in ends] == decision.sampling
        drawn = [self._draw(seq, row, position) for seq, row, position in ends]
        for (_, row, at), token in zip(ends, drawn, strict=True):
            if not self.staged:
                self.row_tokens[row][at + 1 : at + 2] = [token]
        return drawn

    def tokens(self, drawn: list[int]) -> list[int]:
        return drawn

    def _write(self, row: int, start: int, count: int) -> None:
        self.computed += count
        for position in range(start, start + count):
            pair = (self.row_tokens[row][position], position)
            for g, table in enumerate(self.tables[row]):
                block = table[position // self.size]
                assert block, "the null block is never written"
                self.blocks[block][position % self.size] = (g, *pair)

    def _draw(self, seq: Sequence, row: int, position: int) -> int:
        seen = []
        for g, group in enumerate(self.groups):
            for i in range(group.first_needed(position), position + 1):
                block = self.tables[row][g][i // self.size]
                assert block, f"{seq} looks at position {i}, which was given back"
                kept = self.blocks[block][i % self.size]
                assert kept is not None, f"{seq} looks at position {i}, which was never computed"
                assert kept[0] == g and kept[2] == i, f"{seq} finds {kept} at position {i} of group {g}"
                seen.append(kept[1:])
        return next_token(seen, seq.index, self.vocab)


def make_scheduler(
    *,
    num_blocks: int = 12,
    block_tokens: int = 4,
    groups: Items[Group] = FULL_ATTENTION,
    prefix: bool = True,
    has_states: bool = False,
    digest: Any = None,
    host_blocks: int = 0,
    **settings: Any,
) -> Scheduler:
    """A small one that checks itself after every call; sizes count the blocks that can be used."""
    given = {
        "max_model_len": 64,
        "vocab": VOCAB,
        "eos_ids": frozenset({EOS}),
        "max_tokens_per_step": 16,
        "max_running": 4,
        "check_every": 1,
    } | settings
    more: dict[str, Any] = {"has_states": has_states} | ({} if digest is None else {"digest": digest})
    cache = KVCache(
        num_blocks + 1, block_tokens, groups=groups, prefix=prefix, step_tokens=given["max_tokens_per_step"], **more
    )
    if host_blocks and prefix:
        KVOffload(cache, host_blocks)
    return Scheduler(Settings(**given), cache)


def run(
    scheduler: Scheduler,
    requests: Items[Request],
    *,
    overlap: bool = False,
    every: int = 0,
    step_s: float = 1.0,
    most_steps: int = 5000,
) -> dict[str, list[int]]:
    """Serve `requests`, a new one each `every` steps (0: all at once), until all are done; id -> tokens."""
    staged = scheduler.settings.num_stages > 1
    executor = FakeExecutor(scheduler.cache, scheduler.settings.max_running, staged=staged)
    loop = Loop(scheduler, executor, overlap=overlap, clock=lambda: number * step_s)
    left, answers = list(requests), {}
    for number in range(most_steps):
        for request in left[: 1 if every else len(left)] if not every or not number % every else ():
            for seq in scheduler.submit(request, number * step_s):
                answers[seq.id] = seq
            left.remove(request)
        loop.step()
        if not left and not scheduler.has_work and not scheduler.under_way:
            break
    else:
        raise AssertionError(f"not done after {most_steps} steps: {scheduler.request_table.running}")
    check_idle(scheduler)
    assert all(seq.finish in ("stop", "length") for seq in answers.values())
    return {name: seq.output for name, seq in answers.items()}


def ask(name: str, prompt: Items[int], max_tokens: int | None = 8, **more: Any) -> Request:
    """A request; what SamplingParams knows goes there."""
    known = SamplingParams.__dataclass_fields__
    params = {key: value for key, value in more.items() if key in known}
    rest = {key: value for key, value in more.items() if key not in known}
    return Request(id=name, prompt=list(prompt), params=SamplingParams(max_tokens=max_tokens, **params), **rest)
