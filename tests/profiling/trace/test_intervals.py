"""Stretches of time against a slow twin that looks at every millisecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from armillary.profiling.trace.intervals import covered_within, exposed, gaps_between, length

stretches = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([float(a) for a, _ in pairs]), np.array([float(a + b) for a, b in pairs])


def ticks(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for a, b in pairs for t in range(a, a + b)}


@given(stretches)
def test_length_counts_overlap_once(pairs: list[tuple[int, int]]) -> None:
    assert length(*columns(pairs)) == len(ticks(pairs))


@given(stretches)
def test_gaps_are_the_rest(pairs: list[tuple[int, int]]) -> None:
    starts, ends = gaps_between(*columns(pairs), 0.0, 100.0)
    assert float((ends - starts).sum()) == 100 - len(ticks(pairs))


@given(stretches, stretches)
def test_exposed_is_what_the_other_does_not_cover(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    starts, ends = exposed(*columns(a), *columns(b))
    assert float((ends - starts).sum()) == len(ticks(a) - ticks(b))


@given(stretches, st.integers(0, 50), st.integers(0, 40))
def test_covered_within(pairs: list[tuple[int, int]], low: int, more: int) -> None:
    found = covered_within(*columns(pairs), np.array([float(low)]), np.array([float(low + more)]))
    assert found[0] == len(ticks(pairs) & set(range(low, low + more)))
