"""Tensors of files through threads and buffers come out as they are stored, in their order, whatever their sizes."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from armillary.errors import BadModel
from armillary.model.weights import host_to_device as sending
from armillary.model.weights.host_to_device import Sender
from armillary.model.weights.safetensors_folder import TensorFolder


def sent(groups: list[list[Tensor]], device: str) -> list[list[Tensor]]:
    with TemporaryDirectory() as folder:
        named = {f"{i}.{j}": part for i, group in enumerate(groups) for j, part in enumerate(group)}
        save_file(named | {"other": torch.ones(3)}, Path(folder) / "model.safetensors")
        with TensorFolder(Path(folder)) as stored, Sender(torch.device(device)) as sender:
            places = ([stored.where(f"{i}.{j}") for j in range(len(group))] for i, group in enumerate(groups))
            return list(sender.send(places))


def agree(arrived: list[list[Tensor]], groups: list[list[Tensor]]) -> bool:
    pairs = [
        (a.cpu(), b) for mine, theirs in zip(arrived, groups, strict=True) for a, b in zip(mine, theirs, strict=True)
    ]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=3), max_size=12),
    piece=st.sampled_from([64, 1 << 20]),
    ahead=st.sampled_from([1, 10_000]),
)
def test_what_is_stored_arrives(shapes: list[list[list[int]]], piece: int, ahead: int) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    groups = [[torch.randn(shape).to(dtypes[len(shape) % 3]) for shape in group] for group in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "_PIECE_BYTES", piece)
        patch.setattr(sending, "_AHEAD_BYTES", ahead)
        assert agree(sent(groups, "cpu"), groups)


def test_a_file_that_ends_too_early_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100)}, path)
    with TensorFolder(tmp_path) as stored, Sender(torch.device("cpu")) as sender:
        place = stored.where("a")
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(BadModel, match="ends too early"):
            list(sender.send([[place]]))


@pytest.mark.gpu
def test_to_a_gpu() -> None:
    groups = [[torch.randn(1 << 20), torch.randn(3000, 5000).bfloat16(), torch.randn(7)] for _ in range(6)]
    assert agree(sent(groups, "cuda"), groups)
