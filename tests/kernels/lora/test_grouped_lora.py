"""Adapters of many rows: the kernels and the grouped GEMMs agree with the change of the matrix, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from armillary.kernels.lora.grouped_lora import LORA, LoraCase, add_lora, lora_rows
from tests.kernels.agreeing import assert_agrees
from tests.kernels.interpreter import needs_interpreter

SMALL = LoraCase(rows=23, slots=5, rank=4, outputs=48, inputs=40, dtype="fp32", device="cpu")
CASES = {
    "one matrix": SMALL,
    "queries, keys, values": replace(SMALL, parts=3),
    "gate and up, rank 8": replace(SMALL, parts=2, rank=8),
    "one row": replace(SMALL, rows=1, parts=3),
    "nothing divides": replace(SMALL, rows=37, outputs=35, inputs=67, rank=3, parts=3),
    "16 bits": replace(SMALL, dtype="bf16", parts=3),
}


@pytest.mark.parametrize("name", list(CASES))
def test_groups_agree_with_rows(name: str) -> None:
    assert_agrees(LORA, CASES[name], "by adapter")


@needs_interpreter
@pytest.mark.parametrize("name", list(CASES))
def test_kernels_agree_with_rows(name: str) -> None:
    assert_agrees(LORA, CASES[name])


@needs_interpreter
def test_many_rows_of_one_adapter_and_none_of_others() -> None:
    from armillary.kernels.lora.grouped_lora_triton import LoraTile
    from armillary.kernels.lora.grouped_lora_triton import add_lora as by_kernels

    y, x, a, b, part, _ = LORA.inputs(replace(SMALL, rows=40, parts=2), torch.Generator().manual_seed(1))
    rows = lora_rows(torch.tensor([3] * 39 + [-1]), 5)
    tall, long = LoraTile(rows=64, step=16, columns=16, splits=1), LoraTile(step=16, columns=16, splits=16, chunks=4)
    for tile in (LoraTile(), tall, long):
        found = by_kernels(y.clone(), x, a, b, part, rows, tile)
        torch.testing.assert_close(found, add_lora(y.clone(), x, a, b, part, rows))


def test_rows_are_sorted_by_adapter() -> None:
    rows = lora_rows(torch.tensor([2, -1, 0, 2, 0], dtype=torch.int32), 3)
    assert rows.order_T.tolist() == [2, 4, 0, 3, 1] and rows.ends_S.tolist() == [2, 2, 4]


def test_alternating_columns_have_their_own_a() -> None:
    """Rows of gate and up alternate in the fused matrix."""
    a, b = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.ones(1, 4, 1)
    x, part, rows = torch.tensor([[5.0, 7.0]]), torch.tensor([0, 1, 0, 1]), lora_rows(torch.tensor([0]), 1)
    for version in LORA.all_versions[1:]:
        assert version.run(torch.zeros(1, 4), x, a, b, part, rows).tolist() == [[5.0, 7.0, 5.0, 7.0]]
