"""What a decoding step looks up of its rows in one launch, against a lookup each by torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import needs_interpreter

PLACES = {"rows_T": 0, "positions_T": 5, "angles_T": 10, "rows_B": 15}


@needs_interpreter
@pytest.mark.parametrize(("sequences", "groups", "pages", "half_dim"), [(1, 1, 3, 16), (5, 2, 300, 24)])
def test_rows_are_looked_up(sequences: int, groups: int, pages: int, half_dim: int) -> None:
    from armillary.kernels.paged.decode_inputs_triton import look_up

    torch.manual_seed(0)
    rows, longest, angles = 7, 50, 40
    packed = torch.randint(0, rows, (23,), dtype=torch.int32)
    tokens, tables = torch.randint(0, 99, (rows, longest)).int(), torch.randint(0, 99, (groups, rows, pages)).int()
    cos_sin = torch.randn(angles, half_dim), torch.randn(angles, half_dim)
    floats, ints = torch.randn(6, rows), torch.randint(0, 99, (3, rows))
    found = look_up(packed, PLACES, sequences, tokens, tables, cos_sin, floats, ints)
    part = {name: packed[at : at + sequences].long() for name, at in PLACES.items()}
    assert torch.equal(found.wide, packed.long())
    assert torch.equal(found.tokens_B, tokens[part["rows_T"], part["positions_T"]].long())
    assert torch.equal(found.tables_GBP, tables[:, part["rows_B"]])
    assert torch.equal(found.cos_BA, cos_sin[0][part["angles_T"]])
    assert torch.equal(found.sin_BA, cos_sin[1][part["angles_T"]])
    assert torch.equal(found.floats_FB, floats[:, part["rows_B"]])
    assert torch.equal(found.ints_IB, ints[:, part["rows_B"]])
    assert torch.equal(found.top_k_B, ints[1, part["rows_B"]].int())


@needs_interpreter
def test_tokens_are_put_into_their_rows() -> None:
    from armillary.kernels.paged.decode_inputs_triton import put

    wide, rows = torch.tensor([9, 2, 0, 1, 4, 4, 3]), torch.zeros(3, 6, dtype=torch.int32)
    put(torch.tensor([7, -1, 8]), wide, 1, 4, rows)
    assert rows.tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 0, 8, 0, 0], [0, 0, 0, 0, 7, 0]]
