"""Folders in and out: shards, dtypes, and one line for everything that can be wrong with them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from armillary.errors import ArmillaryError
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model, save_model
from tests.model.families import random_model, transformers
from tests.model.layers.test_attention_forms import small

MOE = small(family="mixtral", ffn=0, moe={"num_experts": 3, "top_k": 2, "ffn": 16, "aux_loss": 0.001})


def same(one: Transformer, other: Transformer) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in one.named_parameters())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(build(small(), dtype=torch.float32, device="cpu", seed=1), tmp_path / "model")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    for config in (small(), small(tied=True), MOE):
        model = build(config, dtype=torch.bfloat16, device="cpu", seed=1)
        seen: list[tuple[int, int]] = []
        note = functools.partial(lambda into, *at: into.append(at), seen)
        folder = save_model(model, tmp_path / config.family / str(config.tied), progress=note)
        again = load_model(folder)
        assert next(again.parameters()).dtype == torch.bfloat16, "the folder's own dtype is kept"
        assert same(model, again)
        assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("config", [small(), MOE], ids=["dense", "moe"])
def test_sharded_folders_have_an_index_that_transformers_reads(config, tmp_path: Path) -> None:
    model = build(config, dtype=torch.float32, device="cpu", seed=1)
    folder = save_model(model, tmp_path / "sharded", shard_bytes=8_000)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    assert same(model, load_model(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())


def test_stacked_experts_are_read_too(tmp_path: Path) -> None:
    """Newer files may keep experts stacked, as the module of transformers 5 has them."""
    theirs = random_model("qwen3_moe", 1)
    theirs.save_pretrained(tmp_path / "apart")
    one_by_one = load_model(tmp_path / "apart")
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors), "transformers no longer stacks experts"
    (tmp_path / "stacked").mkdir()
    (tmp_path / "stacked" / "config.json").write_text((tmp_path / "apart" / "config.json").read_text())
    save_file(tensors, tmp_path / "stacked" / "model.safetensors")
    assert same(one_by_one, load_model(tmp_path / "stacked"))


def test_of_a_model_with_vision_the_text_part_is_read(tmp_path: Path) -> None:
    theirs = random_model("llama4_text", 1)
    theirs.save_pretrained(tmp_path / "text")
    tensors = {
        f"language_model.{name}": tensor for name, tensor in load_file(tmp_path / "text/model.safetensors").items()
    }
    (tmp_path / "vision").mkdir()
    save_file(tensors | {"vision_model.class_embedding": torch.ones(4)}, tmp_path / "vision" / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    raw = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    (tmp_path / "vision" / "config.json").write_text(json.dumps(raw))
    assert same(load_model(tmp_path / "text"), load_model(tmp_path / "vision"))


def test_of_newer_models_with_vision_too(tmp_path: Path) -> None:
    theirs = random_model("qwen3_5_text", 1, tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path / "text")
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(tmp_path / "text/model.safetensors").items()
    }
    (tmp_path / "vision").mkdir()
    save_file(tensors | {"model.visual.pos_embed": torch.ones(4)}, tmp_path / "vision" / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    raw = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "vision" / "config.json").write_text(json.dumps(raw))
    assert same(load_model(tmp_path / "text"), load_model(tmp_path / "vision"))


def test_dtype_is_changed_on_request(folder: Path, tmp_path: Path) -> None:
    assert next(load_model(folder, dtype="bf16").parameters()).dtype == torch.bfloat16
    half = save_model(load_model(folder), tmp_path / "half", dtype="fp16")
    assert json.loads((half / "config.json").read_text())["torch_dtype"] == "float16"
    assert all(tensor.dtype == torch.float16 for tensor in load_file(half / "model.safetensors").values())


def test_tokenizer_files_and_token_ids_travel(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": 7}))
    copy = save_model(load_model(folder), tmp_path / "copy", template=folder)
    assert (copy / "tokenizer.json").read_text() == "{}"
    assert json.loads((copy / "config.json").read_text())["eos_token_id"] == 7


# --- broken folders


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.int8)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:8].clone()


def different_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "JSON"),
    "unknown family": (lambda f: edit_config(f, model_type="lama"), "did you mean llama"),
    "missing key": (lambda f: edit_config(f, num_attention_heads=None), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    "truncated": (truncate, "truncated"),
    "garbage": (lambda f: (f / "model.safetensors").write_bytes(b"\x00" * 400), "truncated or not safetensors"),
    "wrong dtype": (lambda f: edit_tensors(f, quantise), "is int8, not a plain float"),
    "vocab mismatch": (lambda f: edit_config(f, vocab_size=60), "50 rows but config.json says vocab_size 60"),
    "untied without head": (
        lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")),
        "tie_word_embeddings to true",
    ),
    "tied with another head": (
        lambda f: (edit_config(f, tie_word_embeddings=True), edit_tensors(f, different_head)),
        "tie_word_embeddings to false",
    ),
    "missing tensor": (
        lambda f: edit_tensors(f, lambda t: t.pop("model.norm.weight")),
        "missing, the first model.norm",
    ),
    "more layers than said": (lambda f: edit_config(f, num_hidden_layers=1), "not part of a llama model"),
    "wrong shape": (lambda f: edit_tensors(f, reshape), "not of one model"),
    "other ffn": (lambda f: edit_config(f, intermediate_size=64), "not of one model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_line(name: str, folder: Path) -> None:
    spoil, expected = BROKEN[name]
    spoil(folder)
    with pytest.raises(ArmillaryError) as caught:
        load_model(folder)
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tied_folder_may_repeat_its_embedding(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load_model(folder).output is None


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("armillary.model.weights.safetensors_writer.save_file", full)
    with pytest.raises(ArmillaryError):
        save_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten_unasked(folder: Path) -> None:
    model = load_model(folder)
    with pytest.raises(ArmillaryError, match=r"is there|exists|already"):
        save_model(model, folder)
    save_model(model, folder, overwrite=True)


def test_what_a_family_cannot_say_is_refused(tmp_path: Path) -> None:
    model = build(small(qk_norm="head"), dtype=torch.float32, device="cpu", seed=1)
    with pytest.raises(ArmillaryError, match="cannot express qk_norm"):
        save_model(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
