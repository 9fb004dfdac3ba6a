"""Batches of hand-made rows: sizes, delays, preferred sizes, failures, and what is never mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.serving.predict.batcher import Arrays, Batcher, BatchLimits, QueueFull
from armillary.serving.predict.request import PredictRequest


def asked(*values: float, width: int = 1) -> PredictRequest:
    array = np.repeat(np.array(values, dtype=np.float32)[:, None], width, axis=1)
    return PredictRequest(arrays=(array,), rows=len(values), single=False, by_name=False)


class Doubler:
    """Doubles rows, and notes the sizes of its batches; a row of −1 is an error."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, arrays: Arrays) -> Arrays:
        self.sizes.append(len(arrays[0]))
        if (arrays[0] == -1).any():
            raise RuntimeError("no −1")
        return [arrays[0] * 2]


def limits(**values: Any) -> BatchLimits:
    return BatchLimits(**{"max_batch": 8, "max_delay_s": 0.05, "max_queue": 100} | values)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def submit_all(model: Doubler, wanted: BatchLimits, requests: list[PredictRequest]) -> list[Any]:
    batcher = Batcher(model, wanted)
    found = await asyncio.gather(*(batcher.submit(one) for one in requests), return_exceptions=True)
    await batcher.close()
    return found


def test_rows_that_come_together_are_run_together() -> None:
    model = Doubler()
    found = run(submit_all(model, limits(), [asked(i) for i in range(16)]))
    assert [float(one[0][0, 0]) for one in found] == [2.0 * i for i in range(16)]
    assert model.sizes == [8, 8]


def test_a_batch_of_one_after_the_delay() -> None:
    model = Doubler()
    run(submit_all(model, limits(), [asked(1)]))
    assert model.sizes == [1]


@pytest.mark.parametrize(("rows", "sizes"), [(4, [4]), (7, [4, 3]), (3, [3]), (8, [8])])
def test_preferred_sizes_are_run_at_once_and_cut_to(rows: int, sizes: list[int]) -> None:
    model = Doubler()
    run(submit_all(model, limits(preferred=(4, 8), max_delay_s=0.1), [asked(i) for i in range(rows)]))
    assert model.sizes == sizes


def test_a_preferred_size_does_not_wait() -> None:
    """With a delay of an hour, only a complete batch is run."""

    async def scenario() -> None:
        model = Doubler()
        batcher = Batcher(model, limits(preferred=(4,), max_delay_s=3600))
        await asyncio.gather(*(batcher.submit(asked(i)) for i in range(4)))
        assert model.sizes == [4]
        await batcher.close()

    run(scenario())


def test_one_that_fails_does_not_spoil_the_others() -> None:
    found = run(submit_all(Doubler(), limits(), [asked(1), asked(-1), asked(3)]))
    assert isinstance(found[1], RuntimeError) and [float(found[i][0][0, 0]) for i in (0, 2)] == [2.0, 6.0]


def test_shapes_are_not_mixed() -> None:
    model = Doubler()
    found = run(submit_all(model, limits(), [asked(1, width=2), asked(2, width=3), asked(3, width=2)]))
    assert [one[0].shape for one in found] == [(1, 2), (1, 3), (1, 2)] and sorted(model.sizes) == [1, 2]


def test_a_request_larger_than_a_batch_is_cut() -> None:
    model = Doubler()
    found = run(submit_all(model, limits(), [asked(*range(20))]))
    assert found[0][0][:, 0].tolist() == [2.0 * i for i in range(20)] and model.sizes == [8, 8, 4]


def test_a_model_of_fixed_size_is_filled_up() -> None:
    model = Doubler()
    found = run(submit_all(model, limits(max_batch=5, fixed_rows=5), [asked(1, 2), asked(3)]))
    assert [one[0][:, 0].tolist() for one in found] == [[2, 4], [6]] and model.sizes == [5]


def test_a_full_queue_refuses() -> None:
    found = run(submit_all(Doubler(), limits(max_queue=3), [asked(i) for i in range(5)]))
    assert [isinstance(one, QueueFull) for one in found] == [False, False, False, True, True]


def test_requests_that_were_given_up_are_not_run() -> None:
    async def scenario() -> None:
        model = Doubler()
        batcher = Batcher(model, limits(max_delay_s=0.5))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(batcher.submit(asked(1)), 0.005)
        async with asyncio.timeout(30):
            while batcher.waiting_rows:
                await asyncio.sleep(0.01)
        assert model.sizes == []
        await batcher.close()

    run(scenario())


@settings(max_examples=25, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    most=st.integers(1, 9),
    preferred=st.lists(st.integers(1, 9), max_size=2),
    fixed=st.booleans(),
)
def test_every_row_comes_back_to_who_sent_it(counts: list[int], most: int, preferred: list[int], fixed: bool) -> None:
    model = Doubler()
    requests = [asked(*(100 * i + k for k in range(count))) for i, count in enumerate(counts)]
    wanted = limits(
        max_batch=most,
        max_delay_s=0.0,
        max_queue=1000,
        fixed_rows=most if fixed else None,
        preferred=tuple(size for size in preferred if size <= most),
    )
    found = run(submit_all(model, wanted, requests))
    assert [one[0][:, 0].tolist() for one in found] == [[2.0 * v for v in one.arrays[0][:, 0]] for one in requests]
    assert all(size <= most for size in model.sizes)
