"""Bubbles: the time a pipeline's stages stand idle while it fills and drains.

GPipe and 1F1B idle (p−1) of m+p−1 slots; v chunks a stage divide that by v (Narayanan et al., SC21, arXiv 2104.04473);
a zero-bubble schedule fills it with weight gradients (ZB-H1: Qi et al., arXiv 2401.10241).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from armillary.planning.device_model.layout_arrays import SCHEDULES, Array, Layouts

ZERO_BUBBLE = SCHEDULES.index("zero_bubble")


def bubble_s(layouts: Layouts, forward: Array, backward: Array, weight_gradients: Array) -> Array:
    """Of every layout, with the times of a whole stage for one micro-batch."""
    is_split = layouts.schedule == ZERO_BUBBLE
    idle: Array = idle_s(is_split, layouts.pp, layouts.interleave, forward, backward, weight_gradients)
    return idle


def idle_s(is_split: Any, stages: Any, chunks: Any, forward: Any, backward: Any, weights: Any) -> Any:
    """(p−1)·(f + b)/v; where the backward pass is split into inputs i and weights w, (p−1)·(f + i − min(f, i, w))/v:
    the last stage waits for (p−1) forward passes and the first for (p−1) passes of inputs, whatever fills the rest."""
    inputs = backward - weights
    filled = forward + inputs - np.minimum(np.minimum(forward, inputs), weights)
    return (stages - 1) * np.where(is_split, filled, forward + backward) / chunks
