"""What a Hugging Face folder holds, and what is wrong with one that lacks something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from armillary.errors import BadModel, NotFound
from armillary.store.hf_folder import GGUF_MARKER, INDEX, gguf_file, has_weights, read_config, weight_files
from tests.store.conftest import CONFIG


def test_a_single_file(model_folder: Path) -> None:
    assert weight_files(model_folder) == [model_folder / "model.safetensors"]
    assert read_config(model_folder) == CONFIG == read_config(model_folder / "config.json")


def test_shards_named_by_the_index(model_folder: Path) -> None:
    shard(model_folder, ["model-1-of-2.safetensors", "model-2-of-2.safetensors"])
    (model_folder / "consolidated.safetensors").write_bytes(b"")
    assert [path.name[:12] for path in weight_files(model_folder)] == ["model-1-of-2", "model-2-of-2"]


def test_a_missing_shard(model_folder: Path) -> None:
    shard(model_folder, ["model-1-of-2.safetensors", "model-2-of-2.safetensors"])
    (model_folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(BadModel, match=r"lacks 1 of 2 weight files, the first model-2-of-2\.safetensors; download"):
        weight_files(model_folder)


def test_an_index_that_points_elsewhere(model_folder: Path) -> None:
    (model_folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../../secret.safetensors"}}))
    with pytest.raises(BadModel, match="points outside its folder"):
        weight_files(model_folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_a_broken_index(model_folder: Path, text: str) -> None:
    (model_folder / INDEX).write_text(text)
    with pytest.raises(BadModel, match=r"model\.safetensors\.index\.json .*; download or export"):
        weight_files(model_folder)


def test_other_safetensors_are_not_the_model(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "adapter_model.safetensors")
    assert not has_weights(model_folder)
    (model_folder / "weights.safetensors").write_bytes(b"")
    assert weight_files(model_folder) == [model_folder / "weights.safetensors"]


def test_only_pickles(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    (model_folder / "training_args.bin").write_bytes(b"")
    with pytest.raises(BadModel, match=r"has no weights \(\*\.safetensors\); give a folder that has, or add"):
        weight_files(model_folder)
    (model_folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadModel, match=r"only pickled weights \(pytorch_model\.bin\).*convert them with transformers"):
        weight_files(model_folder)


def test_configs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has no config\.json; give a Hugging Face model folder"):
        read_config(tmp_path)
    with pytest.raises(NotFound, match=r"no file .*other\.json"):
        read_config(tmp_path / "other.json")
    for text, says in (("{", "is not JSON"), ("3", "is not a JSON object"), ("{}", "names no model_type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadModel, match=rf"config\.json {says}"):
            read_config(tmp_path)


def shard(folder: Path, names: list[str]) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(b"")
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b"])
def test_names_that_no_file_can_have(name: str, model_folder: Path) -> None:
    (model_folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadModel, match="lacks 1 of 1 weight files"):
        weight_files(model_folder)


@pytest.mark.parametrize("content", [b"a" * 5000, b"a\0b", b"\xff\xfe", b"", b"/nowhere.gguf"])
def test_markers_of_gguf_files_that_are_not_there(content: bytes, model_folder: Path) -> None:
    (model_folder / GGUF_MARKER).write_bytes(content)
    with pytest.raises(BadModel, match="is no longer there"):
        gguf_file(model_folder)
