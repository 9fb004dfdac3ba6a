"""Rehearsal: steps of many kinds, timed before the first request comes.

A run shows only the steps that its settings make: one without a prefix cache never computes a few tokens behind many.
What such a step would cost cannot be fitted to the others, so each shape is run thrice on rows that nobody has yet;
requests overwrite what it leaves. Cheap kinds come first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from armillary.engine.cache.block_hash import Chain, root
from armillary.engine.cache.kv_cache import KVCache, TableUpdate
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Chunk, Decision
from armillary.engine.scheduler.loop import Executor, StepTooLarge
from armillary.engine.scheduler.settings import Settings

REPEATS = 2
"""how often each shape is timed; the quicker counts"""
SIZES = (16, 128, 1024)
"""tokens of a prompt that are computed in a step"""
PASTS = (512, 4096)
"""tokens of it that were computed before, at most"""
ROWS = (1, 8, 32)
"""requests that are in a step together"""
MOST = 1024
"""tokens of a step"""


@dataclass(frozen=True, kw_only=True)
class StepShape:
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


def calibrate_steps(
    executor: Executor, cache: KVCache, settings: Settings, together_s: float
) -> list[dict[str, float]]:
    """What steps of each shape are made of and how long they take, as records; none is begun after `together_s`. The
    cache's numbers are overwritten, its books stay as they are."""
    begin, records = time.perf_counter(), []
    for shape in sorted(set(step_shapes(cache, settings)), key=lambda shape: shape.tokens):
        if time.perf_counter() - begin > together_s:
            break
        decision = decision_of(shape, cache)
        try:
            _timed(executor, decision)  # rows are new, kernels may be chosen and memory is touched
            decision.admitted, decision.table_updates = [], []
            seconds = min(_timed(executor, decision) for _ in range(REPEATS))
        except StepTooLarge:  # for a step that nobody asked for: requests may be smaller
            break
        records.append(decision.work._asdict() | {"calibration_step_s": seconds})
    return records


def step_shapes(cache: KVCache, settings: Settings) -> Iterator[StepShape]:
    """Decodes of short and long texts, prompts whole and in parts, and both together, as far as the engine takes
    them: its rows, its tokens a step, the length of its texts and blocks that are all different."""
    counts = [count for count in ROWS if count <= settings.max_running]
    for rows in counts:
        longest = _longest(rows, cache, settings)
        pasts = sorted({0, *(min(top, longest // 2) for top in PASTS)})
        ends = sorted({pasts[0], pasts[-1]})
        yield from (StepShape(decodes=rows, context=max(past, min(32, longest))) for past in ends if longest)
        parts = [(size, past) for size, past in product(SIZES, pasts if rows == 1 else ends) if past + size <= longest]
        most = min(MOST, settings.max_tokens_per_step)
        yield from (StepShape(prompts=rows, size=size, past=past) for size, past in parts if rows * size <= most)
        decodes = min(rows, settings.max_running - 1) if rows == counts[-1] else 0
        yield from (
            StepShape(prompts=1, size=size, past=past, decodes=decodes, context=min(32, longest))
            for size, past in parts
            if decodes and size + decodes <= settings.max_tokens_per_step
        )


def _longest(rows: int, cache: KVCache, settings: Settings) -> int:
    """Tokens that so many may each have."""
    room = cache.num_blocks // len(cache.groups) * cache.block_tokens
    return min(settings.max_model_len, room // rows) // cache.block_tokens * cache.block_tokens


def decision_of(shape: StepShape, cache: KVCache) -> Decision:
    """A step of that shape: each row has blocks of its own, as far as there are enough."""
    decision, rows = Decision(0), shape.decodes + shape.prompts
    for row in range(rows):
        decodes = row < shape.decodes
        length = shape.context if decodes else shape.past + shape.size
        seq = _sequence(row, length, cache)
        decision.admitted.append(seq)
        decision.table_updates += [
            TableUpdate(row, group, 0, _blocks(row * len(cache.groups) + group, length, cache))
            for group in range(len(cache.groups))
        ]
        decision.sampling.append(seq)
        if decodes:
            decision.decodes.append(seq)
            decision.positions.append(length - 1)
            decision.rows.append(row)
        else:
            decision.chunks.append(Chunk(seq, row, shape.past, shape.size, True))
    return decision


def _sequence(row: int, length: int, cache: KVCache) -> Sequence:
    request = Request(id=f"calibration {row}", prompt=[0] * length, params=SamplingParams(seed=0, max_tokens=1))
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
