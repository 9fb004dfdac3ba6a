"""Bubbles: the time a pipeline's stages stand idle while it fills and drains, and where the stages are uneven.

GPipe and 1F1B idle (p−1) of m+p−1 slots; v chunks a stage divide that by v (Narayanan et al., SC21, arXiv 2104.04473);
a zero-bubble schedule fills it with weight gradients (Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

import numpy as np

from armillary.planning.layouts import SCHEDULES, Array, Layouts

ZERO_BUBBLE = SCHEDULES.index("zero_bubble")


def gpipe_fraction(stages: int, micro_batches: int) -> float:
    """Of the step, (p − 1)/(m + p − 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def bubble_s(layouts: Layouts, forward: Array, backward: Array, weight_gradients: Array) -> Array:
    """(p−1)·(f + b)/v, f and b the time of a whole stage for one micro-batch; zero-bubble: (p−1)·(f + b − 2·w)/v, w the
    weight gradients that are put off into it (ZB-H1)."""
    turn = forward + backward
    idle = np.where(layouts.schedule == ZERO_BUBBLE, np.maximum(turn - 2 * weight_gradients, 0.0), turn)
    seconds: Array = (layouts.pp - 1) * idle / layouts.interleave
    return seconds
