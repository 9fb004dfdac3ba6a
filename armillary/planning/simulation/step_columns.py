"""Columns of the fit of step times: what of a step's work its seconds are proportional to.

The cost of one more decode, or of one more prompt token, depends on how many there are: a CPU's GEMM kernels do better
with more rows until these leave its caches, and GPUs read the weights once for all until they are busy with the rows.
So seconds are a polyline in either number, with its corners at powers of two; a column counts those of a segment
between two corners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np

from armillary.engine.scheduler.decision import StepWork
from armillary.planning.device_model.vectorised_layouts import Array

TOKENS, ROWS, PAST = 3, 6, 7
"""columns: tokens, prefill chunks, and earlier tokens of prompts"""
SEGMENTS = 9
"""first column of a segment: those of decodes, then those of prefill"""
Bends = tuple[tuple[float, float], ...]
"""(number, how much more each up to that number costs than those beyond), of each corner"""
_FIRST_DECODES, _FIRST_PREFILL = 2, 64
_BEYOND = 1.5
"""a corner is where some step has at least so many times its number"""


@dataclass(frozen=True)
class Corners:
    """Of the decodes and of the prefill tokens of a step, ascending."""

    decodes: tuple[int, ...]
    prefill: tuple[int, ...]

    def columns(self, decodes: Array, prefill: Array) -> list[Array]:
        """Numbers within each segment."""
        each = ((decodes, self.decodes), (prefill, self.prefill))
        return [np.clip(of - low, 0.0, high - low) for of, at in each for low, high in pairwise((0, *at, np.inf))]

    def neighbours(self) -> list[tuple[int, int]]:
        """Columns of segments that meet at a corner."""
        first = SEGMENTS + len(self.decodes) + 1
        return [
            *pairwise(range(SEGMENTS, first)),
            *pairwise(range(first, first + len(self.prefill) + 1)),
        ]

    def slopes(self, segments: Array) -> tuple[float, Bends, float, Bends]:
        """Of segments' seconds: per decode beyond the last corner, and the bends; the same of prefill."""
        count = len(self.decodes) + 1
        return *_slopes(self.decodes, segments[:count]), *_slopes(self.prefill, segments[count:])


def _slopes(at: Sequence[int], segments: Array) -> tuple[float, Bends]:
    seconds = [float(each) for each in segments]
    bends = ((float(size), below - above) for size, (below, above) in zip(at, pairwise(seconds), strict=True))
    return seconds[-1], tuple(bend for bend in bends if bend[1])


def corners_of(*records: Iterable[Mapping[str, Any]]) -> Corners:
    """As far as steps have clearly more."""
    steps = list(chain(*records))
    return Corners(
        decodes=_powers(_FIRST_DECODES, (step.get("decode_tokens", 0.0) for step in steps)),
        prefill=_powers(_FIRST_PREFILL, (step.get("prefill_tokens", 0.0) for step in steps)),
    )


def _powers(first: int, numbers: Iterable[float]) -> tuple[int, ...]:
    most, sizes = max(numbers, default=0.0), [first]
    while _BEYOND * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    return tuple(sizes[:-1])


def step_columns(steps: Sequence[Mapping[str, Any]], least: float, corners: Corners) -> Array:
    """1, prompts, mixed, tokens, context, pairs, rows, past, drawn, and the segments. `least`: queries below which
    attention takes no less time."""
    columns = (np.array([float(step.get(name, 0.0)) for step in steps]) for name in StepWork._fields)
    tokens, decodes, context, query_keys, rows, past, drawn = columns
    prompts = np.where(tokens > 0, 1.0, 0.0)
    query_keys = query_keys * np.maximum(1.0, least / np.maximum(tokens, 1.0))
    mixed = np.where(decodes > 0, prompts, 0.0)
    fixed = (np.ones(len(steps)), prompts, mixed, tokens + decodes, context, query_keys, rows, past, drawn)
    return np.stack([*fixed, *corners.columns(decodes, tokens)], axis=1)
