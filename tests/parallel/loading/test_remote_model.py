"""A model folder in a store: its address is a name of the model, and only the bytes that are needed are fetched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.errors import BadData, BadModel
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import full_names, load_model, save_model
from armillary.parallel.loading.model_folder import load_folder
from armillary.parallel.loading.read_plan import box_need, shard_box
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from tests.model.layers.test_attention_forms import small


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Transformer, str]:
    """A model in several files, and its address."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    folder = save_model(model, tmp_path / "bucket" / "model", shard_bytes=8_000)
    return model, f"file://{folder}"


def test_a_shard_is_fetched_by_ranges(stored: tuple[Transformer, str]) -> None:
    model, url = stored
    wanted: dict[str, Any] = {}
    targets: dict[str, Tensor] = {}
    for name, tensor in full_names(model).items():
        offsets, sizes = shard_box(tensor.shape, [(0, 4, 2)])
        wanted[name] = box_need(tensor.shape, offsets, sizes)
        targets[name] = torch.zeros(sizes)
    loaded = load_folder(model, url, targets, wanted)
    assert loaded.read_bytes == sum(target.nbytes for target in targets.values())
    for name, tensor in full_names(model).items():
        offsets, sizes = shard_box(tensor.shape, [(0, 4, 2)])
        assert torch.equal(targets[name], tensor[offsets[0] : offsets[0] + sizes[0]]), name


def test_its_address_is_a_name_of_the_model(stored: tuple[Transformer, str], tmp_path: Path) -> None:
    model, url = stored
    source = resolve_model(url, Home.at(tmp_path / "home"), need_weights=True)
    assert (source.name, source.origin, source.weights) == ("model", "store", url)
    assert source.folder is not None and not list(source.folder.glob("*.safetensors"))
    for place in (source.folder, url):
        loaded = dict(load_model(place).named_parameters())
        assert all(torch.equal(loaded[name], p) for name, p in model.named_parameters())


def test_what_is_not_there_is_said_in_one_line(stored: tuple[Transformer, str], tmp_path: Path) -> None:
    _, url = stored
    with pytest.raises(BadModel, match=r"has no config\.json; give the address"):
        load_model(f"{url}-2")
    file = next((tmp_path / "bucket" / "model").glob("*.safetensors"))
    shutil.copy(file, tmp_path / "kept")
    file.write_bytes(b"\0" * 20)
    with pytest.raises(BadModel, match="truncated or not safetensors"):
        load_model(url)
    file.unlink()
    with pytest.raises(BadData, match="is missing; check the address"):
        load_model(url)
