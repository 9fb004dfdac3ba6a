"""Rehearsal: steps of many kinds, timed before the first request comes.

A run shows only the steps that its settings make: one without a prefix cache never computes a few tokens behind many.
What such a step would cost cannot be fitted to the others, so each kind is run once or thrice on rows that nobody has
yet; requests overwrite what it leaves. It ends after a second, the cheap kinds first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from armillary.serving.engine.block_hash import Chain, root
from armillary.serving.engine.decision import Chunk, Decision
from armillary.serving.engine.gauges import work_gauges
from armillary.serving.engine.kv_cache import Edit, KVCache
from armillary.serving.engine.loop import Executor
from armillary.serving.engine.params import SamplingParams
from armillary.serving.engine.request import Request
from armillary.serving.engine.sequence import Sequence
from armillary.serving.engine.settings import Settings

TOGETHER_S = 1.0
"""for all steps; one that was begun is ended"""
TURNS = 3
"""how often each kind is run; the quickest counts, since the first chooses kernels and touches memory"""
SIZES = (16, 64, 256, 1024)
"""tokens of a prompt that are computed in a step"""
PASTS = (512, 4096)
"""tokens of it that were computed before, at most"""
ROWS = (1, 8, 32)
"""requests that are in a step together"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is in a step."""

    prompts: int = 0
    """parts of prompts"""
    size: int = 0
    """tokens of each"""
    past: int = 0
    """tokens before each"""
    decodes: int = 0
    """answers that get their next token"""
    context: int = 0
    """tokens of each"""

    @property
    def tokens(self) -> int:
        """That are computed."""
        return self.prompts * self.size + self.decodes


def rehearse(executor: Executor, cache: KVCache, settings: Settings) -> list[dict[str, float]]:
    """What steps of each kind are made of and how long they take, as records; none where even the first take too
    long. The cache's numbers are overwritten, its books stay as they are."""
    kinds = sorted(set(kinds_of(cache, settings)), key=lambda kind: kind.tokens)
    begin, best = time.perf_counter(), dict[Kind, float]()
    for _ in range(TURNS):
        for kind in kinds:
            if time.perf_counter() - begin > TOGETHER_S:
                return [_record(kind, cache, seconds) for kind, seconds in best.items()]
            best[kind] = min(best.get(kind, float("inf")), _timed(executor, decision_of(kind, cache)))
    return [_record(kind, cache, seconds) for kind, seconds in best.items()]


def kinds_of(cache: KVCache, settings: Settings) -> Iterator[Kind]:
    """Decodes of short and long texts, prompts whole and in parts, and both together, as far as the engine takes
    them: its rows, its tokens a step, the length of its texts and blocks that are all different."""
    room = cache.num_blocks // len(cache.groups) * cache.block_tokens
    for rows in (count for count in ROWS if count <= settings.max_running):
        longest = min(settings.max_model_len, room // rows) // cache.block_tokens * cache.block_tokens
        pasts = (0, *sorted({past for top in PASTS if (past := min(top, longest // 2)) > 0}))
        others = min(rows, settings.max_running - 1) if rows > 1 else 0
        yield from (Kind(decodes=rows, context=context) for context in (32, *pasts[1:]) if context <= longest)
        for size, past in product(SIZES, pasts):
            if past + size <= longest and rows * size <= settings.max_tokens_per_step:
                yield Kind(prompts=rows, size=size, past=past)
            if past + size <= longest and others and size + others <= settings.max_tokens_per_step:
                yield Kind(prompts=1, size=size, past=past, decodes=others, context=min(32, longest))


def decision_of(kind: Kind, cache: KVCache) -> Decision:
    """A step of that kind: each row has blocks of its own, as far as there are enough."""
    made, rows = Decision(0), kind.decodes + kind.prompts
    for row in range(rows):
        decodes = row < kind.decodes
        length = kind.context if decodes else kind.past + kind.size
        seq = _sequence(row, length, cache)
        made.admitted.append(seq)
        made.edits += [Edit(row, group, 0, _blocks(row * len(cache.groups) + group, length, cache))
                       for group in range(len(cache.groups))]  # fmt: skip
        made.sampling.append(seq)
        if decodes:
            made.decodes.append(seq)
            made.positions.append(length - 1)
            made.rows.append(row)
        else:
            made.chunks.append(Chunk(seq, row, kind.past, kind.size, True))
    return made


def _sequence(row: int, length: int, cache: KVCache) -> Sequence:
    request = Request(id=f"rehearsal {row}", prompt=[0] * length, params=SamplingParams(seed=0, max_tokens=1))
    seq = Sequence(request, 0, Chain(root(), cache.block_tokens), length + 1, frozenset())
    seq.row = row
    return seq


def _blocks(table: int, length: int, cache: KVCache) -> list[int]:
    count = -(-length // cache.block_tokens)
    return [1 + (table * count + i) % cache.num_blocks for i in range(count)]


def _timed(executor: Executor, decision: Decision) -> float:
    begin = time.perf_counter()
    executor.tokens(executor.launch(decision))
    return time.perf_counter() - begin


def _record(kind: Kind, cache: KVCache, seconds: float) -> dict[str, float]:
    return work_gauges(decision_of(kind, cache)) | {"rehearsed_s": seconds}
