"""Whole documents in rows: nothing lost, nothing cut that fits, and masks that keep documents apart."""

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadData
from armillary.training.data.batch import IGNORED
from armillary.training.data.batch_sources import Batches
from armillary.training.data.bin_packing import best_fit, pack_documents
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.row_packing import WholeRows
from armillary.training.data.shards import TokenShards


def test_best_fit_by_hand() -> None:
    bins = best_fit(np.array([3, 7, 5, 2, 3]), 10)
    groups = {tuple(np.flatnonzero(bins == number).tolist()) for number in np.unique(bins)}
    assert groups == {(0, 1), (2, 3, 4)}  # 7 + 3, and 5 + 3 + 2: both full


@settings(deadline=None, max_examples=80)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_bins_hold_every_item_once_and_no_two_could_be_one(lengths: list[int]) -> None:
    bins = best_fit(np.array(lengths), 30)
    used = np.bincount(bins, weights=lengths)
    assert used.max() <= 30
    assert (used > 0).all()
    assert sum(sorted(used)[:2]) > 30 or len(used) == 1  # else best fit would have put them together
    assert len(used) <= 2 * -(-sum(lengths) // 30)  # any two bins hold more than one would


lists = st.lists(st.integers(0, 25), min_size=1, max_size=12)


@settings(deadline=None, max_examples=80)
@given(lengths=lists, sequence=st.integers(1, 12))
def test_every_position_of_every_document_once(lengths: list[int], sequence: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    packed = pack_documents(offsets, sequence)
    covered = [p for s, n in zip(packed.starts, packed.lengths, strict=True) for p in range(s, s + n)]
    expected = [p for first, last in pairwise(offsets) for p in range(first, last - 1)]
    assert sorted(covered) == expected
    for first, last in pairwise(packed.rows):
        assert 0 < packed.lengths[first:last].sum() <= sequence
    sizes = dict(zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True))
    for first, length in zip(offsets[:-1].tolist(), lengths, strict=True):
        if 2 <= length <= sequence + 1:
            assert sizes[first] == length - 1  # a document that fits is one piece


DOCUMENTS = [[5, 6, 0], [7, 0], [8, 9, 10, 11, 12, 13, 14, 15, 0], [9]]


def test_rows_by_hand(make_shards) -> None:
    rows = WholeRows(shards=make_shards(DOCUMENTS, shard_tokens=1000), sequence=6)
    assert rows.edges.tolist() == [0, 2]
    batch = rows.make(np.array([0, 1]))
    assert batch.tokens_BT.tolist() == [[8, 9, 10, 11, 12, 13], [5, 6, 7, 14, 15, 0]]
    assert batch.targets_BT.tolist() == [[9, 10, 11, 12, 13, 14], [6, 0, 0, 15, 0, IGNORED]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 0, 0, 1, 0]]
    assert batch.documents_BT.tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 1, 2, 2, 3]]


@settings(deadline=None, max_examples=30)
@given(documents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=15), min_size=1, max_size=8))
def test_targets_are_the_next_ids_and_never_of_another_document(make_shards, documents: list[list[int]]) -> None:
    rows = WholeRows(shards=make_shards(documents, shard_tokens=30), sequence=7)
    count = int(rows.edges[-1])
    if not count:
        assert all(len(ids) == 1 for ids in documents)
        return
    batch = rows.make(np.arange(count))
    learnt = batch.targets_BT != IGNORED
    assert learnt.sum() == sum(len(ids) - 1 for ids in documents)
    within = learnt[:, :-1] & (batch.documents_BT[:, 1:] == batch.documents_BT[:, :-1])
    assert (batch.targets_BT[:, :-1][within] == batch.tokens_BT[:, 1:][within]).all()
    starts = np.diff(batch.documents_BT, axis=1, prepend=-1) == 1
    assert (batch.positions_BT[starts] == 0).all()
    assert (np.diff(batch.positions_BT, axis=1)[~starts[:, 1:]] == 1).all()


@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_only_answers_are_learnt_where_a_mask_says_so(make_shards, packing) -> None:
    masks = [[i >= 2 for i in range(len(ids))] for ids in DOCUMENTS]
    batches = Batches(
        shards=make_shards(DOCUMENTS, answers=masks, shard_tokens=6), sequence=4, batch=3, packing=packing
    )
    assert batches.shards.has_answers
    assert batches.shards.read_answers(0, 3).tolist() == [False, False, True]
    count = batches.num_samples + (packing == "stream")  # and the window that is left at the end
    whole = batches.rows.make(np.arange(count))
    learnt = sorted(int(token) for token in whole.targets_BT.flat if token != IGNORED)
    last = 5 if packing == "whole" else 99  # a row holds the first four positions and the target after them
    assert learnt == sorted(token for ids in DOCUMENTS for token in ids[2:last])
    batches.shards.verify()
    (Path(str(batches.shards.folder)) / "train/00000.msk").write_bytes(b"\0" * 14)
    with pytest.raises(Exception, match=r"train/00000.msk is corrupt"):
        TokenShards.open(batches.shards.folder).verify()


def test_of_a_long_conversation_the_beginning_is_kept_and_none_without_an_answer(make_shards) -> None:
    talks = [[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13], [21, 22, 23, 24, 25, 26, 27], [31]]
    masks = [[i in (3, 7) for i in range(8)], [False] * 3, [i == 6 for i in range(7)], [True]]
    batches = Batches(shards=make_shards(talks, answers=masks, shard_tokens=99), sequence=4, batch=1, packing="whole")
    assert batches.num_samples == 1  # the second has no answer, that of the third is cut off, the fourth has no target
    batch = batches.at(0)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 4]]
    assert batch.targets_BT.tolist() == [[IGNORED, IGNORED, 4, IGNORED]]


def test_nothing_to_learn_is_said(make_shards) -> None:
    with pytest.raises(BadData, match=r"has no document with anything to learn in rows of 4; use other text, or raise"):
        Batches(shards=make_shards([[1], [2]]), sequence=4, batch=1, packing="whole")


def test_the_table_is_made_once_and_kept(make_shards, tmp_path: Path) -> None:
    plain = make_shards(DOCUMENTS, shard_tokens=8)
    shards = TokenShards.open(plain.folder, cache=Cache(folder=tmp_path / "cache", limit_bytes=10**9))
    batches = Batches(shards=shards, sequence=6, batch=2, packing="whole", seed=5)
    expected = Batches(shards=plain, sequence=6, batch=2, packing="whole", seed=5).at(4)
    np.testing.assert_array_equal(batches.at(4).tokens_BT, expected.tokens_BT)
    (made,) = (path for path in (tmp_path / "cache" / "packed").iterdir() if path.is_dir())
    before = made.stat().st_ino
    again = pickle.loads(pickle.dumps(batches))
    np.testing.assert_array_equal(again.at(4).targets_BT, expected.targets_BT)
    assert made.stat().st_ino == before
    other = Batches(shards=shards, sequence=5, batch=2, packing="whole")
    assert other.at(0).tokens_BT.shape == (2, 5)
    assert len([path for path in made.parent.iterdir() if path.is_dir()]) == 2
