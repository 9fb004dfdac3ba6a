"""Rows of a serving step: each sequence as if it were alone, in its own row, whatever the step and the rows hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from armillary.kernels.core.op import find_op
from armillary.kernels.delta.delta_rows import DELTA_ROWS, DeltaRowsCase, RowBatch, RowStates, delta_rows
from tests.kernels.interpreter import needs_interpreter

CASE = DeltaRowsCase(sequences=4, tokens=5, key_heads=2, values=2, key_dim=16, value_dim=16, dtype="fp32", device="cpu")


def drawn(case: DeltaRowsCase = CASE) -> Any:
    return DELTA_ROWS.inputs(case, torch.Generator().manual_seed(0))


def test_every_sequence_is_computed_as_if_alone() -> None:
    fused, weights, states, _ = drawn()
    batch = RowBatch(torch.tensor([3, 0, 4, 1]), torch.tensor([0, 1, 2, 9, 12]), torch.tensor([30, 1, 7, 9]), 20)
    held = RowStates(*(x.clone() for x in states))
    together = delta_rows(fused, weights, states, batch)
    for b, (row, length) in enumerate(zip(batch.rows_B.tolist(), batch.lengths_B.tolist(), strict=True)):
        span = slice(int(batch.starts[b]), int(batch.starts[b + 1]))
        own = RowStates(*(x[row : row + 1].clone() for x in held))
        size = span.stop - span.start
        alone = RowBatch(torch.tensor([0]), torch.tensor([0, size]), torch.tensor([length]), 20)
        torch.testing.assert_close(together[span], delta_rows(fused[span], weights, own, alone))
        for x, y in zip(states, own, strict=True):
            torch.testing.assert_close(x[row], y[0])
    torch.testing.assert_close(states.matrices_RVDE[2], held.matrices_RVDE[2])  # the row of no sequence


def test_decoding_continues_a_prompt_in_chunks() -> None:
    fused, weights, states, _ = drawn(replace(CASE, sequences=1, tokens=12))
    wanted = delta_rows(fused, weights, states, _one(0, 12))
    found = []
    for begin, end in ((0, 7), (7, 10), (10, 11), (11, 12)):
        found.append(delta_rows(fused[begin:end], weights, states, _one(begin, end)))
    torch.testing.assert_close(torch.cat(found), wanted)


def test_a_row_that_was_used_before_begins_with_nothing() -> None:
    fused, weights, states, _ = drawn(replace(CASE, sequences=1, tokens=6))
    clean = RowStates(*(torch.zeros_like(x) for x in states))
    torch.testing.assert_close(
        delta_rows(fused, weights, states, _one(0, 6)), delta_rows(fused, weights, clean, _one(0, 6))
    )


def _one(begin: int, end: int) -> RowBatch:
    return RowBatch(torch.tensor([0]), torch.tensor([0, end - begin]), torch.tensor([end]), end - begin)


def test_it_is_an_op_with_a_price() -> None:
    assert find_op("delta_rows") is DELTA_ROWS
    decoding = DELTA_ROWS.work(DeltaRowsCase(sequences=8))
    assert decoding.bytes == pytest.approx(8 * 32 * 128 * 128 * 4 * 2, rel=0.02)  # states, read and written


@needs_interpreter
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("values", [1, 2])
def test_the_kernel_agrees_with_the_reference(tokens: int, values: int) -> None:
    from armillary.kernels.delta.delta_rows_triton import delta_rows as fast

    fused, weights, states, batch = drawn(replace(CASE, tokens=tokens, values=values, sequences=3))
    other = RowStates(*(x.clone() for x in states))
    wanted, found = delta_rows(fused, weights, states, batch), fast(fused, weights, other, batch)
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    for x, y in zip(other, states, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()
