"""Load of the experts over the last seconds, from counters that only grow."""

from typing import Any

import numpy as np

# L layers with experts, E experts of each

WINDOW_S = 10.0
"""the load is that of the last one to two windows"""
TAIL = 0.1
"""share of the mean load below which an expert counts as hardly used, as in training"""

Counts = np.ndarray  # [L, E] of int64


class ExpertGauges:
    """`take` the counters now and then; `gauges` is what the last reading says."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        """`layers`: numbers of the layers with experts."""
        self._layers = layers
        self._earlier: tuple[float, Counts] | None = None  # where the load begins
        self._middle: tuple[float, Counts] | None = None  # where it will begin a window later
        self.gauges: dict[str, Any] = {}

    def take(self, counts_LE: Counts, now: float) -> None:
        if self._earlier is None or self._middle is None:
            self._earlier = self._middle = (now, np.zeros_like(counts_LE))
        if now - self._middle[0] >= WINDOW_S:
            self._earlier, self._middle = self._middle, (now, counts_LE)
        load_LE = counts_LE - self._earlier[1]
        self.gauges = {"expert_tokens_total": float(counts_LE.sum())} | self._load(load_LE)

    def _load(self, load_LE: Counts) -> dict[str, Any]:
        """Of the layers that had tokens; the tokens of each expert in the most imbalanced one."""
        mean_L = load_LE.mean(axis=1)
        seen_L = mean_L > 0
        if not seen_L.any():
            return {}
        ratio_L = np.where(seen_L, load_LE.max(axis=1) / np.where(seen_L, mean_L, 1.0), 0.0)
        tail_L = (load_LE < TAIL * mean_L[:, None]).mean(axis=1)
        worst = int(ratio_L.argmax())
        return {
            "expert_load_max_over_mean": float(ratio_L[worst]),
            "expert_tail_fraction": float(tail_L[seen_L].mean()),
            "expert_tokens": {self._layers[worst]: load_LE[worst].tolist()},
        }
