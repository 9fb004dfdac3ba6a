"""Cost of an engine step: its seconds as a line in tokens, keys and rows, their noise, and the planner's own line.

A run's steps are fitted to it in fitted_step_time.py; where there are none, the planner's roofline takes their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import frexp
from statistics import median
from typing import TYPE_CHECKING, Any

from armillary.engine.scheduler.decision import StepTimeModel, StepWork
from armillary.planning.simulation.step_columns import Bends
from armillary.planning.training.offload import LINK_SHARE, UNKNOWN_LINK
from armillary.spec import catalogue

if TYPE_CHECKING:
    from armillary.planning.serving.replica import Replica
    from armillary.spec.hardware import Cluster

ENOUGH = 8
"""least steps to sample from; where a size has fewer, the next sizes count too"""
OTHER = 1.5
"""distance between steps with and without prefill, in doublings of size"""
StepKind = tuple[bool, int]
"""whether a step has prefill, and the power of two above its seconds"""


@dataclass(frozen=True, kw_only=True)
class StepNoise:
    """Ratios of measured to fitted seconds, by kind and size of the step. Percentiles of gaps depend on them: short
    steps are noisier than long ones, and steps with prefill differ from those without, so a simulated step samples the
    noise of similar steps."""

    ratios: Mapping[StepKind, tuple[float, ...]] = field(default_factory=dict)
    _near: dict[StepKind, Sequence[float]] = field(default_factory=dict, repr=False, compare=False)

    def ratios_near(self, prompts: bool, seconds: float) -> Sequence[float]:
        """Ratios of the steps most similar to one of so many seconds; empty where none were seen."""
        kind = (prompts, _octave(seconds))
        if kind not in self._near:
            self._near[kind] = self._nearest(kind)
        return self._near[kind]

    def _nearest(self, kind: StepKind) -> Sequence[float]:
        """Ratios of the nearest kinds, until there are enough."""
        apart = {other: abs(other[1] - kind[1]) + OTHER * (other[0] != kind[0]) for other in self.ratios}
        nearest: list[float] = []
        for distance in sorted(set(apart.values())):
            nearest += [ratio for other, ratios in self.ratios.items() if apart[other] == distance for ratio in ratios]
            if len(nearest) >= ENOUGH:
                break
        return nearest


def step_noise(steps: Iterable[tuple[bool, float, float]]) -> StepNoise:
    """From (whether it has prefill, fitted seconds, measured over fitted seconds) of each step."""
    by_kind: dict[StepKind, list[float]] = {}
    for prompts, seconds, ratio in steps:
        by_kind.setdefault((prompts, _octave(seconds)), []).append(float(ratio))
    return StepNoise(ratios={kind: tuple(ratios) for kind, ratios in by_kind.items()})


def _octave(seconds: float) -> int:
    return frexp(seconds)[1]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of an engine step: `base_s` in any, `prompt_s` with prefill, `mixed_s` with prefill and decodes; and
    seconds per prompt token, per decode, per key that a decode reads, per (query, key) pair of prefill, per prefill
    chunk (row) and per earlier token of its prompt (past)."""

    base_s: float
    prompt_s: float = 0.0
    mixed_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_bends: Bends = ()
    """decode_s counts beyond the last of them"""
    prefill_bends: Bends = ()
    context_s: float = 0.0
    pair_s: float = 0.0
    row_s: float = 0.0
    past_s: float = 0.0
    draw_s: float = 0.0
    """per token that is drawn at a temperature above 0"""
    host_block_s: float = 0.0
    """of copying a KV block from or to host memory: not part of `seconds`, since it is no work of the model"""
    least_queries: float = 0.0
    """prefill tokens below which attention takes no less time: fewer thread blocks leave a device idle"""
    waits: bool = False
    """the host waits for a device; else it is busy all along"""
    noise: StepNoise = field(default_factory=StepNoise, repr=False)
    error: float = 0.0
    """median of |fitted − measured| / measured over single steps"""
    steps: int = 0
    basis: str = "given"

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step with that work."""
        prefill, decode, context, query_keys, rows, past, drawn = work
        more = (self.prompt_s if prefill else 0.0) + (self.mixed_s if prefill and decode else 0.0)
        for size, each_s in self.decode_bends:
            more += each_s * min(decode, size)
        if prefill:
            for size, each_s in self.prefill_bends:
                more += each_s * min(prefill, size)
        query_keys *= max(1.0, self.least_queries / prefill) if prefill else 0.0
        return (
            self.base_s
            + more
            + prefill * self.prefill_s
            + decode * self.decode_s
            + context * self.context_s
            + query_keys * self.pair_s
            + rows * self.row_s
            + past * self.past_s
            + drawn * self.draw_s
        )

    def decode_seconds(self, rows: float, context: float) -> float:
        """Seconds of a step that only decodes `rows` sequences of `context` tokens each."""
        return self.seconds(StepWork(decode_tokens=rows, context_tokens=rows * context))

    def of(self, step: Mapping[str, Any]) -> float:
        """Seconds of a recorded step."""
        return self.seconds(StepWork.of(step))


def host_block_s(cluster: Cluster, block_bytes: int) -> float:
    """Seconds to copy a KV block between host and device: over their link, or within a CPU's memory, where it is read
    and written."""
    chip = cluster.chip
    if chip.kind == "cpu":
        return 2 * block_bytes / chip.memory_bytes_per_s if chip.memory_bytes_per_s else 0.0
    link = catalogue.find_link(chip.host_link)
    return block_bytes / ((link.bytes_per_s if link and link.bytes_per_s else UNKNOWN_LINK) * LINK_SHARE)


def extrapolate_batch(cost: StepCost, planned: StepCost, rows: int, context: float) -> StepCost:
    """The fitted time of a GPU's step with `rows` decodes, extended to more decodes by the planner: a few decodes run
    other kernels than many, so the fitted cost per decode is too high for large batches."""
    many = 16 * rows
    now = cost.decode_seconds(rows, context)
    speed = now / planned.decode_seconds(rows, context)
    each = max(0.0, speed * planned.decode_seconds(many, context) - now) / (many - rows)
    if each >= cost.decode_s + context * cost.context_s:
        return cost
    key_s = min(each / max(context, 1.0), speed * planned.context_s)
    return replace(
        cost,
        base_s=now - rows * each,
        decode_s=each - context * key_s,
        decode_bends=(),
        context_s=key_s,
        basis=f"{cost.basis}, more rows by the planner",
    )


def _decode_s(roofline: StepTimeModel, rows: int, context: int) -> float:
    return roofline.seconds(StepWork(decode_tokens=rows, context_tokens=rows * (context + 1)))


def _prefill_s(roofline: StepTimeModel, tokens: int) -> float:
    return roofline.seconds(StepWork(prefill_tokens=tokens, prefill_rows=1))


_CORNERS = (64, 128, 256, 512, 1024, 2048)
"""prefill tokens between which their time is taken as a line"""
_BESIDE = 16
"""decodes of the steps whose prefill is priced: most prompts are computed beside some"""
_LATE = 8192
"""prompt tokens before a late chunk, from which the time of a (query, key) pair is taken"""


def _prefill_polyline(roofline: StepTimeModel, context: int) -> tuple[float, Bends, float]:
    """(prefill_s, prefill_bends, pair_s) beside decodes, whose step reads the weights anyway: the first tokens of a
    chunk cost less than later ones, which wait for the GEMMs, and each costs more the more tokens are before it."""
    decodes = StepWork(decode_tokens=_BESIDE, context_tokens=_BESIDE * (context + 1))

    def step_s(tokens: int, past: int = 0) -> float:
        return roofline.seconds(decodes._replace(prefill_tokens=tokens, prefill_rows=1, prefill_past=past))

    chunk = _CORNERS[-1]
    pair_s = max(0.0, step_s(chunk, _LATE) - step_s(chunk)) / (chunk * _LATE)
    alone_s = roofline.seconds(decodes)
    added = [step_s(tokens) - alone_s - pair_s * tokens * (tokens + 1) / 2 for tokens in _CORNERS]
    slopes = [
        max(0.0, high_s - low_s) / (high - low)
        for (low, low_s), (high, high_s) in pairwise([(0, 0.0), *zip(_CORNERS, added, strict=True)])
    ]
    bends = [(float(size), below - above) for size, (below, above) in zip(_CORNERS, pairwise(slopes), strict=False)]
    return slopes[-1], tuple(bends), pair_s


def planned_step_cost(
    replica: Replica, *, context: int = 512, prompt: int | None = None, steps: Sequence[Mapping[str, Any]] = ()
) -> StepCost:
    """The planner's roofline as lines through a few of its steps, scaled to measured steps where there are any. On a
    CPU, where even short prompts are compute-bound, one line goes through a `prompt` of the usual length. Pipeline
    stages are taken as equally long, and the cost is that of one."""
    few, many = 1, 64
    single_s, batch_s = _decode_s(replica, few, context), _decode_s(replica, many, context)
    key_s = max(0.0, _decode_s(replica, many, 2 * context) - batch_s) / (many * context)
    decode_s = max(0.0, (batch_s - single_s) / (many - few) - context * key_s)
    base_s = max(0.0, single_s - decode_s - context * key_s)
    bends: Bends = ()
    pair_s = 0.0
    if replica.cluster.chip.kind == "cpu":
        tokens = prompt or 512
        prefill_s = (_prefill_s(replica, tokens) - base_s) / tokens
    else:
        prefill_s, bends, pair_s = _prefill_polyline(replica, context)
    cost = StepCost(
        base_s=base_s,
        prefill_s=max(0.0, prefill_s),
        prefill_bends=bends,
        decode_s=decode_s,
        context_s=key_s,
        pair_s=pair_s,
        waits=True,
        basis="planner's roofline",
    )
    cost = _times(cost, 1 / replica.split.pp)
    ratios = [
        step["engine_step_s"] / cost.of(step) for step in steps if step.get("engine_step_s", 0) > 0 and cost.of(step)
    ]
    if not ratios:
        return cost
    times = median(ratios)
    basis = f"planner's roofline × {times:.2g}, after {len(ratios)} steps"
    return replace(_times(cost, times), steps=len(ratios), basis=basis)


def _times(cost: StepCost, factor: float) -> StepCost:
    """A planned cost with every time multiplied."""
    names = "base_s", "prefill_s", "decode_s", "context_s", "pair_s"
    return replace(
        cost,
        **{name: getattr(cost, name) * factor for name in names},
        prefill_bends=tuple((size, each_s * factor) for size, each_s in cost.prefill_bends),
    )
