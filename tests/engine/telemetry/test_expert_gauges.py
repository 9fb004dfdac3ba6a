"""The load of experts over a window, from counters."""

from __future__ import annotations

import numpy as np
import pytest

from armillary.engine.telemetry.expert_gauges import WINDOW_S, ExpertGauges


def test_the_most_imbalanced_layer_is_shown() -> None:
    experts = ExpertGauges((1, 3))
    assert experts.gauges == {}
    experts.take(np.zeros((2, 4), dtype=np.int64), 0.0)
    assert experts.gauges == {"expert_tokens_total": 0.0}  # nothing to divide by
    experts.take(np.array([[2, 2, 2, 2], [8, 0, 0, 0]]), 1.0)
    assert experts.gauges == {
        "expert_tokens_total": 16.0,
        "expert_load_max_over_mean": 4.0,
        "expert_tail_fraction": pytest.approx(3 / 8),
        "expert_tokens": {3: [8, 0, 0, 0]},
    }


def test_old_tokens_leave_the_window() -> None:
    experts, counts = ExpertGauges((0,)), np.array([[100, 0]])
    experts.take(counts, 0.0)
    for second in range(1, int(3 * WINDOW_S)):
        experts.take(counts + second, float(second))
        if second < WINDOW_S:
            assert experts.gauges["expert_load_max_over_mean"] > 1.5
    assert experts.gauges["expert_load_max_over_mean"] == 1.0
    assert experts.gauges["expert_tokens_total"] == 100 + 2 * second
    assert WINDOW_S <= experts.gauges["expert_tokens"][0][0] <= 2 * WINDOW_S
