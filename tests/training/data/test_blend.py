"""Blends: exact proportions at any moment, whatever the number of ranks and wherever a run goes on."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.training.data.batch import LAYOUT, Batch
from armillary.training.data.batch_sources import Batches, Blend, SourceOrder, source_table

shares = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)


def test_the_table_spreads_sources_evenly() -> None:
    assert source_table([7, 3]).tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1]
    assert source_table([1, 1, 1]).tolist() == [0, 1, 2]
    assert source_table([2]).tolist() == [0, 0]


@settings(deadline=None, max_examples=60)
@given(counts=shares)
def test_proportions_are_exact_to_one_row_after_any_number_of_rows(counts: tuple[int, ...]) -> None:
    table = source_table(counts)
    assert np.bincount(table, minlength=len(counts)).tolist() == list(counts)
    rows = np.arange(1, len(table) + 1)
    for source, count in enumerate(counts):
        had = np.cumsum(table == source)
        assert (np.abs(had * len(table) - rows * count) < len(table)).all()  # |had - n·w| < 1, in whole numbers


@settings(deadline=None, max_examples=40)
@given(counts=shares, start=st.integers(0, 10**12))
def test_a_source_gives_its_rows_one_after_another(counts: tuple[int, ...], start: int) -> None:
    """Also far into a run: the position is computed, never counted."""
    positions = np.arange(start, start + 3 * sum(counts))
    sources, numbers = SourceOrder(counts=counts).at(positions)
    for source, count in enumerate(counts):
        own = numbers[sources == source]
        assert len(own) == 3 * count
        assert (np.diff(own) == 1).all()
        assert abs(int(own[0]) * sum(counts) - start * count) <= 2 * sum(counts)


@pytest.fixture(scope="module")
def blend(make_shards) -> Blend:
    """Three sources, told apart by their ids: 1000 … of the first, 2000 … of the second."""
    parts = []
    for number, rows in enumerate([40, 7, 23]):
        shards = make_shards([[1000 * (number + 1) + i for i in range(5 * rows + 1)]])
        parts.append(Batches(shards=shards, sequence=5, batch=16, seed=number))
    return Blend(parts=tuple(parts), order=SourceOrder(counts=(5, 2, 3)), batch=16)


def arrays(batch: Batch) -> list[np.ndarray]:
    return [getattr(batch, name) for name in LAYOUT]


@settings(deadline=None, max_examples=30)
@given(step=st.integers(0, 10**6), world=st.sampled_from([1, 2, 4, 8]))
def test_ranks_tile_the_same_batch_at_any_step(blend: Blend, step: int, world: int) -> None:
    parts = [blend.at(step, rank=rank, world=world) for rank in range(world)]
    for whole, *pieces in zip(arrays(blend.at(step)), *map(arrays, parts), strict=True):
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_rows_are_those_of_the_sources_in_their_own_order(blend: Blend) -> None:
    seen = np.concatenate([blend.at(step).tokens_BT for step in range(25)])
    sources = seen[:, 0] // 1000 - 1
    assert np.bincount(sources).tolist() == [200, 80, 120]
    for number, part in enumerate(blend.parts):
        own = seen[sources == number]
        np.testing.assert_array_equal(own, part.rows_at(np.arange(len(own))).tokens_BT)


def test_an_epoch_ends_with_the_slowest_source(blend: Blend) -> None:
    assert blend.sequence == 5
    assert blend.steps_per_epoch == pytest.approx(80 / 16)
    again = pickle.loads(pickle.dumps(blend))
    np.testing.assert_array_equal(again.at(7).tokens_BT, blend.at(7).tokens_BT)


def test_a_blend_of_one_source_is_that_source(blend: Blend) -> None:
    only = blend.parts[0]
    assert isinstance(only, Batches)
    alone = Blend(parts=(only,), order=SourceOrder(counts=(1,)), batch=16)
    np.testing.assert_array_equal(alone.at(9).tokens_BT, only.at(9).tokens_BT)
    assert alone.steps_per_epoch == only.steps_per_epoch
