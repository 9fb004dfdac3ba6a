"""Kernel time divided into what the roof asks for and the rest.

Time without a model of its work (no shapes in the trace, no known ceiling) cannot be judged. It is divided as the
judged time of its class is, else as all judged time; where nothing was judged it is shown whole as useful, and the
profile's notes say how much that was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from armillary.profiling.judged import Judged
from armillary.profiling.trace import Array


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """The time in which work was done."""

    useful_s: float
    """what the roof asks for"""
    inefficient_s: float
    """the rest"""
    judged: float
    """share of the kernel time whose work is known, 0 to 1"""

    @property
    def seconds(self) -> float:
        return self.useful_s + self.inefficient_s


def split_kernel_time(judged: Judged, events: Array, seconds: Array, covered_s: float) -> KernelTime:
    """`seconds` is each event's time; `covered_s` what they cover together, overlap counted once."""
    total = float(seconds.sum())
    if total <= 0:
        return KernelTime(useful_s=0.0, inefficient_s=0.0, judged=1.0)
    roof = np.fmax(judged.flops_s[events], judged.bytes_s[events])
    length = judged.trace.seconds[events]
    inside = np.where(length > 0, np.minimum(1.0, seconds / np.where(length > 0, length, 1.0)), 0.0)
    known = ~np.isnan(roof)
    useful = np.where(known, np.minimum(np.nan_to_num(roof) * inside, seconds), 0.0)
    useful[~known] = seconds[~known] * _typical(judged.work[events], seconds, useful, known)[~known]
    share = float(useful.sum()) / total
    return KernelTime(useful_s=share * covered_s, inefficient_s=(1 - share) * covered_s,
                      judged=float(seconds[known].sum()) / total)  # fmt: skip


def _typical(work: Array, seconds: Array, useful: Array, known: Array) -> Array:
    """The useful share of judged time of the same class, else of all of it, else 1."""
    size = int(work.max()) + 2
    time = np.bincount(work[known] + 1, weights=seconds[known], minlength=size)
    good = np.bincount(work[known] + 1, weights=useful[known], minlength=size)
    overall = good.sum() / time.sum() if time.sum() > 0 else 1.0
    shares = np.where(time > 0, good / np.where(time > 0, time, 1.0), overall)
    return shares[work + 1]
