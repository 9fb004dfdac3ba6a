"""The order of samples: a permutation per epoch, a function of seed and step alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.training.data.sample_order import ids_at, permuted, shard_order

sizes = st.integers(1, 700)
seeds = st.integers(0, 2**63 - 1)


def sample_ids(seed: int, step: int, batch: int, size: int) -> np.ndarray:
    """The samples of a step, all in one shard."""
    return ids_at(seed, np.arange(step * batch, (step + 1) * batch), np.array([0, size]))


@settings(deadline=None)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(permuted(np.arange(size), size, seed=seed, epoch=epoch)) == list(range(size))


@settings(deadline=None)
@given(size=sizes, seed=seeds, batch=st.integers(1, 50))
def test_steps_walk_through_the_epochs(size: int, seed: int, batch: int) -> None:
    steps = min(2 * size // batch + 1, 60)
    row = np.concatenate([sample_ids(seed, step, batch, size) for step in range(steps)])
    for epoch in range(len(row) // size):
        assert sorted(row[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(deadline=None)
@given(size=sizes, seed=seeds, step=st.integers(0, 10**9), world=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_batch_does_not_depend_on_how_it_is_cut(size: int, seed: int, step: int, world: int) -> None:
    whole = sample_ids(seed, step, 12, size)
    parts = [sample_ids(seed, step * world + rank, 12 // world, size) for rank in range(world)]
    assert list(np.concatenate(parts)) == list(whole)


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [tuple(sample_ids(seed, step, 100, 100)) for seed in range(5) for step in range(5)]
    assert len(set(orders)) == 25
    assert tuple(range(100)) not in orders


def test_neighbours_are_scattered() -> None:
    size = 10_000
    order = permuted(np.arange(size), size, seed=1, epoch=0)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
    assert np.median(abs(np.diff(order))) > size / 5
    shares = [np.mean(order[:1000] < size * part) for part in (0.25, 0.5, 0.75)]
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.75], atol=0.05)


def test_huge_data_sets_cost_nothing() -> None:
    size = 10**15 + 7
    ids = sample_ids(3, 10**10, 64, size)
    assert len(set(ids)) == 64 and ids.min() >= 0 and ids.max() < size


@settings(deadline=None)
@given(size=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_arrays_agree_with_plain_integers(size: int, seed: int, epoch: int) -> None:
    expected = [slowly_permuted(place, size, seed, epoch) for place in range(min(size, 20))]
    assert permuted(np.arange(min(size, 20)), size, seed=seed, epoch=epoch).tolist() == expected


def slowly_permuted(place: int, size: int, seed: int, epoch: int) -> int:
    """One number at a time, in Python's integers."""
    half = 1
    while 4**half < size:
        half += 1
    state = splitmix(splitmix(seed) ^ epoch)
    keys = [splitmix(state + number) for number in range(6)]
    while True:
        left, right = divmod(place, 2**half)
        for key in keys:
            left, right = right, left ^ (finalised(right ^ key) % 2**half)
        place = left * 2**half + right
        if place < size:
            return place


def splitmix(state: int) -> int:
    return finalised((state + 0x9E3779B97F4A7C15) % 2**64)


def finalised(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must see the data a fresh one would: these numbers are part of the format."""
    assert list(sample_ids(0, 0, 8, 1000)) == [317, 804, 676, 126, 370, 440, 341, 47]
    assert list(sample_ids(7, 123, 4, 10**9)) == [743108556, 332085869, 745510634, 708562107]


shard_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@settings(deadline=None)
@given(sizes=shard_sizes, mix=st.integers(0, 13), seed=seeds, epoch=st.integers(0, 1000))
def test_groups_of_shards_make_an_epoch_too(sizes: list[int], mix: int, seed: int, epoch: int) -> None:
    edges = np.concatenate([[0], np.cumsum(sizes)])
    total = int(edges[-1])
    ids = ids_at(seed, np.arange(epoch * total, (epoch + 1) * total), edges, mix=mix)
    assert sorted(ids) == list(range(total))
    if 0 < mix < len(sizes):  # a group is finished before the next one begins
        order = shard_order(len(sizes), seed=seed, epoch=epoch)
        place = {int(shard): number // mix for number, shard in enumerate(order)}
        groups = [place[int(np.searchsorted(edges, sample, side="right")) - 1] for sample in ids]
        assert groups == sorted(groups)
    one = np.array([ids_at(seed, np.array([p]), edges, mix=mix)[0] for p in range(epoch * total, epoch * total + 5)])
    assert one.tolist() == ids[:5].tolist() or total < 5


def test_groups_are_mixed_inside_and_differ_between_epochs() -> None:
    edges = np.arange(0, 801, 100)
    first, second = (ids_at(3, np.arange(start, start + 800), edges, mix=2) for start in (0, 800))
    assert len(set((first[:200] // 100).tolist())) == 2
    assert len(set((first[:20] // 100).tolist())) == 2  # both shards of the group from the beginning
    assert first.tolist() != second.tolist()
    assert first[:200].tolist() != (first[200:400] - first[200] + first[0]).tolist()
