"""Whole models: what is written is read bit for bit, by other packages too, and is as good as was said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig

from armillary.errors import BadInput, BadModel
from armillary.kernels.quantized.sparse import is_pruned
from armillary.model.evaluation.perplexity import compare, model_logits
from armillary.model.evaluation.text_windows import text_windows
from armillary.model.quantized.packed_linear import packed_modules
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.quantization_config import packed_reader
from armillary.model.quantizing.compressed_writer import split_packed
from armillary.model.quantizing.quantize_model import quantize
from armillary.model.quantizing.quantized_stages import QuantizedStages
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.gguf_weights import GgufTensors
from armillary.model.weights.hf_weights import load_model
from armillary.model.weights.packed_weights import PackedFolder
from armillary.model.weights.safetensors_folder import TensorFolder
from armillary.store.gguf.gguf_config import to_hf_config
from armillary.store.gguf.gguf_header import read_header
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model
from tests.model.families import random_model
from tests.model.quantizing.tiny_source import write_source, write_text
from tests.model.test_agreement import assert_close, full_logits

Made = dict[str, PackedRows]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Every packed Hugging Face matrix that is made, by name."""
    found: Made = {}
    tensors = QuantizedStages.tensors

    def noted(self: QuantizedStages) -> Any:
        for rule, fused in tensors(self):
            if isinstance(fused, PackedRows):
                found.update(zip(rule.hf_names, split_packed(rule, fused), strict=True))
            yield rule, fused

    monkeypatch.setattr(QuantizedStages, "tensors", noted)
    return found


def read_back(source: ModelSource, path: Path) -> Made:
    """Every packed matrix of a folder or file, as the loader reads it."""
    if path.suffix == ".gguf":
        stored: Any = GgufTensors(path, source.config)
        folder = PackedFolder(source.config, stored, stored.read_module)
    else:
        reader = packed_reader(json.loads((path / "config.json").read_text()))
        assert reader is not None
        folder = PackedFolder(source.config, TensorFolder(path), reader)
    parts = {rule.hf_names: folder.packed(rule) for rule in folder.rules if folder.is_packed(rule)}
    return {name: part for names, each in parts.items() for name, part in zip(names, each, strict=True)}


@pytest.mark.parametrize("to", ["fp8", "int8", "int4-gptq", "int4-awq", "mxfp4", "gguf", "gguf-q4_0"])
def test_what_is_written_is_read_bit_for_bit(to: str, source: ModelSource, made: Made, tmp_path: Path) -> None:
    out = tmp_path / ("m.gguf" if "gguf" in to else "m")
    text = write_text(tmp_path / "text")
    quantized = quantize(source, out, to, text=text, samples=6)
    found = read_back(source, out)
    assert found.keys() == made.keys() and len(found) == 14 + 2 * ("gguf" in to)
    for name, packed in found.items():
        assert packed.format == made[name].format, name
        for key, rows in packed.rows.items():
            assert rows.dtype == made[name].rows[key].dtype and torch.equal(rows, made[name].rows[key]), (name, key)
    comparison = quantized.comparison
    assert comparison is not None and 0 < comparison.kl.value < 0.5
    folder = gguf_folder(out, Home.at(tmp_path)) if "gguf" in to else out
    model, original = load_model(folder, dtype="fp32", packed=True), load_model(source.folder or "", dtype="fp32")
    assert packed_modules(model)
    if to in ("fp8", "int8"):  # measured with rounded inputs, which the reference here has not
        return
    windows = text_windows(Tokenizer.load(folder), text, length=64, most=8)
    windows = windows if "gguf" in to or to == "mxfp4" else windows.split(4)[1]
    if "int4" in to:
        again = compare(model_logits(model), model_logits(original), windows)
        assert again.reference.value == pytest.approx(comparison.reference.value, rel=1e-4)
        assert again.perplexity.value == pytest.approx(comparison.perplexity.value, rel=2e-3)


@pytest.mark.parametrize("to", ["int4-awq", "int8", "fp8"])
@torch.no_grad()
def test_transformers_loads_the_folder(to: str, tmp_path: Path) -> None:
    source = write_source(tmp_path, dtype="fp32")  # scales of 16 bits are widened before use there, and here after
    quantize(source, tmp_path / "m", to, text=write_text(tmp_path / "text"), samples=3, keep=["*.0.mlp.down_proj"])
    table = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate({key: table[key] for key in table if key != "quant_method"})
    assert "model.layers.0.mlp.down_proj" in config.ignore
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens = torch.arange(40)[None] + 4
    expected = theirs(tokens, use_cache=False).logits
    found = full_logits(load_model(tmp_path / "m", dtype="fp32", packed=True), tokens)
    if to == "int4-awq":
        assert_close(found, expected)
    else:  # transformers rounds the inputs, too
        assert (found - expected).norm() < 0.15 * expected.norm()


@torch.no_grad()
def test_a_pruned_folder_is_one_of_floats(tmp_path: Path) -> None:
    source = write_source(tmp_path)
    text = write_text(tmp_path / "text")
    made = quantize(source, tmp_path / "m", "2:4", text=text, samples=6, keep=["*.0.*down_proj"])
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())
    dense = []
    with TensorFolder(tmp_path / "m") as stored:
        for name in (name for name in stored.names() if name.endswith("proj.weight")):
            dense += [] if is_pruned(stored.read(name)) else [name]
    assert dense == ["model.layers.0.mlp.down_proj.weight"] and made.bytes == made.source_bytes
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    tokens = torch.arange(40)[None] + 4
    assert_close(full_logits(load_model(tmp_path / "m", dtype="fp32"), tokens), theirs(tokens, use_cache=False).logits)
    assert made.comparison is not None and made.comparison.kl.value > 0
    with pytest.raises(BadInput, match="no scales of a KV cache"):
        quantize(source, tmp_path / "k", "2:4", text=write_text(tmp_path / "text"), kv="fp8")


def test_gguf_files_are_read_by_their_own_package(source: ModelSource, tmp_path: Path) -> None:
    quantize(source, tmp_path / "m.gguf", "gguf", text=write_text(tmp_path / "text"))
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with TensorFolder(source.folder or "") as stored:
        down = stored.read("model.layers.1.mlp.down_proj.weight").float().numpy()
        norm = stored.read("model.layers.1.input_layernorm.weight").float().numpy()
    found = tensors["blk.1.ffn_down.weight"]
    expected = gguf.quants.quantize(down, gguf.GGMLQuantizationType.Q8_0)
    assert found.tensor_type.name == "Q8_0" and np.array_equal(found.data, expected)
    assert np.array_equal(tensors["blk.1.attn_norm.weight"].data, norm)
    header = read_header(tmp_path / "m.gguf")
    raw = json.loads(((source.folder or tmp_path) / "config.json").read_text())
    again = to_hf_config(header)
    assert {key: again[key] for key in again if key in raw} == {key: raw[key] for key in again if key in raw} | {
        "torch_dtype": again["torch_dtype"]
    } | {key: again[key] for key in again if key.endswith("_token_id")}
    resolved = resolve_model(str(tmp_path / "m.gguf"), Home.at(tmp_path), need_weights=True)
    ours, theirs = Tokenizer.load(resolved.folder or ""), Tokenizer.load(source.folder or "")
    assert ours.encode("def f_12(x): return 345") == theirs.encode("def f_12(x): return 345")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "phi3"])
def test_experts_and_stacked_projections(family: str, tmp_path: Path) -> None:
    """Models without a tokenizer are rounded without being measured; odd widths stay as they are."""
    random_model(family, 3, num_hidden_layers=1).save_pretrained(tmp_path / "plain")
    source = resolve_model(str(tmp_path / "plain"), Home.at(tmp_path), need_weights=True)
    quantized = quantize(source, tmp_path / "m", "int4-rtn")
    assert quantized.comparison is None and quantized.notes
    model = load_model(tmp_path / "m", packed=True)
    tokens = torch.arange(20)[None] + 3
    with torch.no_grad():
        assert_close(full_logits(model, tokens), full_logits(load_model(tmp_path / "m"), tokens))
    with pytest.raises(BadInput, match="no tokenizer"):
        quantize(source, tmp_path / "g", "int4-gptq")


def test_better_methods_stay_closer_to_the_original(source: ModelSource, tmp_path: Path) -> None:
    text, kl = write_text(tmp_path / "text"), {}
    for to in ("int4-rtn", "int4-gptq", "int4-awq", "int8", "fp8"):
        made = quantize(source, tmp_path / to, to, text=text, samples=12)
        assert made.comparison is not None
        kl[to] = made.comparison.kl.value
    assert max(kl["int4-gptq"], kl["int4-awq"]) < 0.8 * kl["int4-rtn"]
    assert max(kl["int8"], kl["fp8"]) < 0.3 * kl["int4-rtn"]


def test_what_cannot_be_done_is_one_line(source: ModelSource, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    (tmp_path / "short").write_text("too short")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe" * 50)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("int4-rtn", {"keep": ["*.nothing"]}, "names no module"),
        ("int4-rtn", {"group": 100}, "power of two"),
        ("int4-gptq", {"text": tmp_path / "short"}, "fewer than a window"),
        ("fp8", {"text": tmp_path / "bytes"}, "not UTF-8"),
        ("gguf", {}, "does not end in .gguf"),
        ("int3", {}, "is no format"),
    ]
    for to, options, message in cases:
        with pytest.raises(BadInput, match=message) as error:
            quantize(source, tmp_path / "out", to, **({"text": text} | options))
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    gated = replace(source, config=replace(source.config, attention_gate=True))
    with pytest.raises(BadInput, match=r"gated layers of .* are not quantized"):
        quantize(gated, tmp_path / "out", "fp8", text=text)
    quantize(source, tmp_path / "m", "fp8", text=text)
    again = resolve_model(str(tmp_path / "m"), Home.at(tmp_path), need_weights=True)
    with pytest.raises(BadModel, match="quantized already"):
        quantize(again, tmp_path / "n", "int8")
