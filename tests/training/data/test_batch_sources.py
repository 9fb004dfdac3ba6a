"""Batches of windows, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadData, BadInput
from armillary.training.data.batch import IGNORED, Batch
from armillary.training.data.batch_sources import Batches, HeldOut, Validation
from armillary.training.data.row_packing import StreamRows
from armillary.training.data.shards import TokenShards


def windows(shards: TokenShards, numbers: np.ndarray, sequence: int) -> Batch:
    return StreamRows(shards=shards, sequence=sequence).make(numbers)


def held_out(shards: TokenShards, sequence: int) -> Validation:
    return Validation(parts=(HeldOut(shards=shards, sequence=sequence),), counts=(1,))


DOCUMENTS = [[5, 6, 0], [7, 0], [8, 9, 10, 11, 12, 0]]


def test_a_window_over_three_documents(make_shards) -> None:
    batch = windows(make_shards(DOCUMENTS, shard_tokens=4), np.array([0]), 8)
    assert batch.tokens_BT.tolist() == [[5, 6, 0, 7, 0, 8, 9, 10]]
    assert batch.targets_BT.tolist() == [[6, 0, IGNORED, 0, IGNORED, 9, 10, 11]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.num_targets == 6
    kinds = (batch.tokens_BT.dtype, batch.targets_BT.dtype, batch.positions_BT.dtype, batch.documents_BT.dtype)
    assert kinds == (np.int64, np.int64, np.int64, np.int32)


def test_windows_share_one_token_and_positions_restart(make_shards) -> None:
    batch = windows(make_shards(DOCUMENTS), np.array([1, 2]), 3)
    assert batch.tokens_BT.tolist() == [[7, 0, 8], [9, 10, 11]]
    assert batch.targets_BT.tolist() == [[0, IGNORED, 9], [10, 11, 12]]
    assert batch.positions_BT.tolist() == [[0, 1, 0], [0, 1, 2]]


def test_a_boundary_between_windows_is_ignored_too(make_shards) -> None:
    batch = windows(make_shards(DOCUMENTS), np.array([0]), 3)
    assert batch.targets_BT.tolist() == [[6, 0, IGNORED]]


def test_an_epoch_has_every_window_once(make_shards) -> None:
    shards = make_shards([[*range(1, 60), 0]])
    batches = Batches(shards=shards, sequence=4, batch=2, seed=3)
    assert (batches.num_samples, batches.steps_per_epoch) == (14, 7.0)
    firsts = [row[0] for step in range(7) for row in batches.at(step).tokens_BT]
    assert sorted(firsts) == list(range(1, 57, 4))
    assert [row[0] for step in range(7, 14) for row in batches.at(step).tokens_BT] != firsts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6])
def test_ranks_tile_the_batch(make_shards, world: int) -> None:
    """All have the same number of rows; blank ones, where the batch does not divide, have no targets and come last."""
    batches = Batches(shards=make_shards([[*range(1, 99), 0]]), sequence=5, batch=6, seed=1)
    for step in (0, 5, 1000):
        whole = batches.at(step)
        parts = [batches.at(step, rank=rank, world=world) for rank in range(world)]
        assert {len(part.tokens_BT) for part in parts} == {-(-6 // world)}
        counts = [6 // world + (rank < 6 % world) for rank in range(world)]
        assert all((p.targets_BT[n:] == IGNORED).all() for p, n in zip(parts, counts, strict=True))
        for name in Batch.__dataclass_fields__:
            rows = [getattr(part, name)[:count] for part, count in zip(parts, counts, strict=True)]
            np.testing.assert_array_equal(np.concatenate(rows), getattr(whole, name))


lists = st.lists(st.lists(st.integers(1, 99), max_size=9).map(lambda ids: [*ids, 0]), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(documents=lists, sequence=st.integers(1, 12), batch=st.integers(1, 4))
def test_validation_counts_every_token_but_first_ones_once(make_shards, documents, sequence: int, batch: int) -> None:
    seen = list(held_out(make_shards(documents), sequence).batches(rows=batch))
    assert all(item.tokens_BT.shape == (batch, sequence) for item in seen)
    targets = [int(token) for item in seen for token in item.targets_BT.flat if token != IGNORED]
    assert targets == [token for ids in documents for token in ids[1:]]


def test_validation_in_order_with_padding(make_shards) -> None:
    shards = make_shards(DOCUMENTS)
    first, second = held_out(shards, 4).batches(rows=2)
    assert first.tokens_BT.tolist() == [[5, 6, 0, 7], [0, 8, 9, 10]]
    assert second.tokens_BT.tolist() == [[11, 12, 0, 0], [0, 0, 0, 0]]
    assert second.targets_BT.tolist() == [[12, 0, IGNORED, IGNORED], [IGNORED] * 4]
    assert second.positions_BT[0].tolist() == [0, 1, 2, 0]
    assert len(list(held_out(shards, 4).batches(rows=2, limit=1))) == 1
    halves = [list(held_out(shards, 4).batches(rows=2, rank=rank, world=2))[1] for rank in (0, 1)]
    assert np.concatenate([half.tokens_BT for half in halves]).tolist() == second.tokens_BT.tolist()


def test_what_does_not_fit(make_shards) -> None:
    shards = make_shards(DOCUMENTS)
    with pytest.raises(BadData, match=r"has 11 training tokens, .* use more text or --set train.sequence=10"):
        Batches(shards=shards, sequence=11, batch=1)
    with pytest.raises(BadInput, match="a batch of 4 rows is too small for 5 ranks; use 4 ranks or a larger batch"):
        Batches(shards=shards, sequence=2, batch=4).at(0, world=5)
    with pytest.raises(BadInput, match="sequence 0 and batch 4 must be at least 1"):
        Batches(shards=shards, sequence=0, batch=4)
