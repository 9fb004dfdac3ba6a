"""The staging buffer: copies that would span two pinned pieces are split where the pieces meet."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from armillary.training.checkpoint import staging
from armillary.training.checkpoint.container import container
from armillary.training.checkpoint.save_plan import Place, WriteChunk
from armillary.training.checkpoint.staging import StagingBuffer, copy_in_pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("piece", [7, 4096, 1 << 30])
def test_a_tensor_is_copied_whole_over_any_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(staging, "_PINNED_AT_ONCE", piece)
    source = torch.randint(-100, 100, (120, 11)).to(dtype).T  # not contiguous
    shape = tuple(source.shape)
    chunk = WriteChunk("w", (0, 0), shape, shape, dtype)
    wrapper = container(shape, dtype)
    length = len(wrapper.head) + chunk.bytes + len(wrapper.tail)
    place = Place(chunk, 64, length, 64 + len(wrapper.head))
    buffer = StagingBuffer((place,), 64 + length, tmp_path, pin=False)
    ends = buffer.piece_ends(place)
    borders = [0, *ends, chunk.bytes]
    assert borders == sorted(set(borders))
    assert all((place.data + end) % piece == 0 for end in ends)
    assert all(end - begin <= piece for begin, end in pairwise(borders))
    copy_in_pieces(buffer.tensor(place), source, ends)
    assert torch.equal(buffer.tensor(place), source)
