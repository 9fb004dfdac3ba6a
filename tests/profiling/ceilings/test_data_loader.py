"""Loader: what a factory gives is counted, from this process and from a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch

from armillary.errors import BadData
from armillary.profiling.ceilings.data_loader import LoaderSettings, as_tensors, measure_loader

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    tokens_BT: np.ndarray
    targets_BT: np.ndarray


def batches(worker: int, workers: int) -> Iterator[Batch]:
    for step in count(worker, workers):
        tokens = np.full((2, 8), step, np.int64)
        yield Batch(tokens_BT=tokens, targets_BT=tokens + 1)


def two(worker: int, workers: int) -> Iterator[Any]:
    return islice(batches(worker, workers), 1)


def test_tokens_and_bytes_are_those_of_the_arrays() -> None:
    (speed,) = measure_loader(batches, [LoaderSettings()], device=CPU, budget_s=0.01)
    assert speed.batches > 1 and speed.seconds > 0
    assert speed.bytes_per_s == pytest.approx(speed.tokens_per_s * 16), "two int64 arrays, tokens counted once"


def test_a_worker_reads_its_share() -> None:
    told: list[tuple[int, int, str]] = []
    settings = LoaderSettings(workers=1, prefetch=4)
    (speed,) = measure_loader(batches, [settings], device=CPU, budget_s=0.01, watch=lambda *state: told.append(state))
    assert speed.settings == settings and speed.tokens_per_s > 0
    assert told == [(0, 1, "1 workers, 4 ahead"), (1, 1, "done")]


def test_a_path_that_ends_at_once_is_refused() -> None:
    with pytest.raises(BadData, match="one batch only"):
        measure_loader(two, [LoaderSettings()], device=CPU, budget_s=0.01)
    with pytest.raises(BadData, match="no batch"):
        measure_loader(lambda worker, workers: [], [LoaderSettings()], device=CPU, budget_s=0.01)


def test_batches_of_any_make_become_named_tensors() -> None:
    row = np.arange(6, dtype=np.int32)
    assert list(as_tensors(Batch(row, row))) == ["tokens_BT", "targets_BT"]
    assert torch.equal(as_tensors({"x": row})["x"], torch.arange(6, dtype=torch.int32))
    assert list(as_tensors(row)) == ["tokens"]
