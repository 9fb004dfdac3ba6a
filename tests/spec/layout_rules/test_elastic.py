"""Layouts of elastic runs: dp follows the ranks, everything else stays."""

from dataclasses import replace

import pytest

from armillary.errors import BadLayout
from armillary.spec.catalogue import model
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.elastic import elastic_layout
from armillary.spec.tables.train import TrainJob

JOB = TrainJob(sequence=1024, batch_tokens=8 * 1024)
DENSE, EXPERTS = model("llama-3-8b").config, model("mixtral-8x7b").config


@pytest.mark.parametrize(
    ("layout", "ranks", "dp", "uneven"),
    [
        (Layout(dp=4), 4, 4, False),
        (Layout(dp=4), 3, 3, True),
        (Layout(dp=4), 5, 5, True),
        (Layout(dp=4), 100, 8, False),  # a row each
        (Layout(dp=4, micro_batch=2), 2, 2, False),
        (Layout(dp=2, tp=2), 7, 3, True),
        (Layout(dp=4, zero=3), 3, 3, True),
        (Layout(dp=4, zero=3, shard=2), 3, 2, False),
        (Layout(dp=4, pp=2), 7, 2, False),  # a stage has full micro-batches
    ],
)
def test_dp_follows_the_ranks(layout: Layout, ranks: int, dp: int, uneven: bool) -> None:
    assert elastic_layout(layout, DENSE, JOB, ranks) == replace(layout, dp=dp, uneven=uneven)


def test_experts_count_every_row_so_dp_divides_the_batch() -> None:
    assert elastic_layout(Layout(dp=4), EXPERTS, JOB, 3) == Layout(dp=2)


def test_too_few_ranks_have_to_wait() -> None:
    assert elastic_layout(Layout(dp=2, tp=4), DENSE, JOB, 3) is None
    assert elastic_layout(Layout(dp=4, zero=3, shard=2), DENSE, JOB, 1) is None


def test_a_layout_that_never_fits_is_refused() -> None:
    with pytest.raises(BadLayout, match="tp=3 does not divide"):
        elastic_layout(Layout(dp=2, tp=3), DENSE, JOB, 3)
