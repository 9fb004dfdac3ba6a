"""The learning rate as a function of the step, and what is decayed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadRecipe
from armillary.model.transformer import build
from armillary.spec.tables.train import TrainJob
from armillary.training.step.optimizer import learning_rate, make_optimizer
from tests.model.layers.test_attention_forms import small

N = 1_000_000


def rates(**fields: object) -> list[float]:
    job = TrainJob(steps=100, lr=1.0, min_lr=0.1, warmup_steps=10, **fields)  # type: ignore[arg-type]
    return [learning_rate(job, step, N) for step in range(100)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_every_schedule_warms_up_and_ends_where_it_should(schedule: str) -> None:
    found = rates(schedule=schedule)
    assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert found[10] == pytest.approx(1.0)
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(found[10:]))


def test_halfway_values() -> None:
    assert rates(schedule="linear")[10 + 89 // 2] == pytest.approx(0.1 + 0.9 * (1 - 44 / 89))
    assert rates(schedule="cosine")[55] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 45 / 89)))
    stable = rates(schedule="wsd", decay_fraction=0.2)
    assert set(stable[10:80]) == {1.0} and stable[90] < 1.0


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(["cosine", "linear", "wsd"]),
    steps=st.integers(1, 30),
    fraction=st.floats(0.01, 1.0),
    data=st.data(),
)
def test_every_schedule_falls_to_the_final_rate_however_short(
    schedule: str, steps: int, fraction: float, data: st.DataObject
) -> None:
    warmup = data.draw(st.integers(0, steps - 1), label="warmup")
    job = TrainJob(steps=steps, lr=1.0, min_lr=0.1, warmup_steps=warmup, schedule=schedule, decay_fraction=fraction)  # type: ignore[arg-type]
    found = [learning_rate(job, step, N) for step in range(steps)]
    assert found[-1] == pytest.approx(0.1) and max(found) <= 1.0
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(found[warmup:]))
    if schedule == "wsd":
        falling = min(steps - warmup, max(1, round(steps * fraction)))
        assert len([rate for rate in found[warmup:] if rate < 1.0]) == falling


def test_the_final_rate_belongs_to_the_same_batch_as_the_peak() -> None:
    job = TrainJob(lr=3e-4, min_lr=3e-5, lr_base_batch=1_048_576, batch_tokens=65_536, steps=100)
    found = [learning_rate(job, step, N) for step in range(100)]
    assert max(found) == pytest.approx(3e-4 / 16) and found[-1] == pytest.approx(3e-5 / 16)
    job.check_rates(N)
    with pytest.raises(BadRecipe, match=r"min_lr=0.01 must be at most the peak learning rate of 0.003; try --set"):
        TrainJob(min_lr=0.01).check_rates(1000)


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build(small(qkv_bias=True), dtype=torch.float32, device="cpu", seed=0)
    decayed, kept = make_optimizer(model, TrainJob(weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3 and all(p.ndim >= 2 for p in decayed["params"])
    assert kept["weight_decay"] == 0.0 and all(p.ndim == 1 for p in kept["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
