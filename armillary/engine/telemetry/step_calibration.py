"""Step calibration: steps of many shapes, timed before the first request.

A run has only the steps that its settings cause: without a prefix cache, for example, no step computes a few tokens
after many cached ones, and the time of such a step cannot be fitted to the others. So each shape is run three times on
free rows; requests overwrite what it leaves in the cache. Cheap shapes come first.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from armillary.engine.cache.block_hash import Chain, root
from armillary.engine.cache.kv_cache import KVCache, TableUpdate
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision, PrefillChunk
from armillary.engine.scheduler.settings import Settings
from armillary.engine.scheduler.step_loop import Executor, StepTooLarge

REPEATS = 2  # timed runs of each shape; the fastest counts
SIZES = (16, 128, 1024)  # tokens of a prefill chunk
PASTS = (512, 4096)  # tokens before the chunk, at most
ROWS = (1, 8, 32)
DECODES = (2, 4, 16, 64, 128)  # more numbers of decodes: the cost of another one changes with them
MOST = 1024


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """Chunks and decodes of a step."""

    prompts: int = 0
    size: int = 0  # tokens of each
    past: int = 0  # tokens before each
    decodes: int = 0
    context: int = 0  # tokens of each
    temperature: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompts * self.size + self.decodes


def calibrate_steps(
    executor: Executor, cache: KVCache, settings: Settings, together_s: float
) -> list[dict[str, float]]:
    """Records of the work and seconds of each shape; none is started after `together_s`. KV data is overwritten, the
    cache's bookkeeping is not changed."""
    begin, records = time.perf_counter(), []
    for shape in sorted(set(step_shapes(cache, settings)), key=lambda shape: shape.tokens):
        if time.perf_counter() - begin > together_s:
            break
        decision = decision_of(shape, cache)
        try:
            _timed(executor, decision)  # first run: kernels may be chosen and memory first touched
            decision.admitted, decision.table_updates = [], []
            seconds = min(_timed(executor, decision) for _ in range(REPEATS))
        except StepTooLarge:  # requests may need less memory than this step
            break
        records.append(decision.work._asdict() | {"calibration_step_s": seconds})
    return records


def step_shapes(cache: KVCache, settings: Settings) -> Iterator[StepShape]:
    """Decodes with short and long contexts, full prompts and chunks, and both together, within the engine's limits of
    rows, tokens per step, sequence length and distinct blocks."""
    counts = [count for count in ROWS if count <= settings.max_running]
    few = [count for count in DECODES if count <= settings.max_running]
    yield from (StepShape(decodes=rows, context=32) for rows in few if _longest(rows, cache, settings) >= 32)
    for rows in counts:
        longest = _longest(rows, cache, settings)
        pasts = sorted({0, *(min(top, longest // 2) for top in PASTS)})
        ends = sorted({pasts[0], pasts[-1]})
        yield from (StepShape(decodes=rows, context=max(past, min(32, longest))) for past in ends if longest)
        if longest:
            yield StepShape(decodes=rows, context=min(32, longest), temperature=1.0)
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
    """Longest length of so many sequences together."""
    capacity = cache.num_blocks // len(cache.groups) * cache.block_tokens
    return min(settings.max_model_len, capacity // rows) // cache.block_tokens * cache.block_tokens


def decision_of(shape: StepShape, cache: KVCache) -> Decision:
    """A step of that shape: each row has blocks of its own, as far as there are enough."""
    decision, rows = Decision(0), shape.decodes + shape.prompts
    for row in range(rows):
        decodes = row < shape.decodes
        length = shape.context if decodes else shape.past + shape.size
        seq = _sequence(row, length, cache, shape.temperature)
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
            decision.chunks.append(PrefillChunk(seq, row, shape.past, shape.size, True))
    return decision


def _sequence(row: int, length: int, cache: KVCache, temperature: float) -> Sequence:
    params = SamplingParams(seed=0, max_tokens=1, temperature=temperature)
    request = Request(id=f"calibration {row}", prompt=[0] * length, params=params)
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
