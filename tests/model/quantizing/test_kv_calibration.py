"""Scales of a KV cache in 8 bits: calibrated, written as compressed-tensors and vLLM name them, read, and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput, BadModel
from armillary.model.layers.attention_forms import plain
from armillary.model.quantizing.kv_calibration import KvCalibration
from armillary.model.quantizing.quantize_model import quantize
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.store.resolve_model import ModelSource
from tests.model.quantizing.tiny_source import TEXT, write_source, write_text

PROMPTS = [TEXT[:90], TEXT[200:240]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return write_source(tmp_path_factory.mktemp("source"), dtype="fp32")


@torch.no_grad()
def largest_of(model: torch.nn.Module, tokens: list[int]) -> dict[int, torch.Tensor]:
    """[2, K] of each layer, from the model itself."""
    found = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: object) -> torch.Tensor:
        found[layer] = torch.stack([k.abs().amax(dim=(0, 1, 3)), v.abs().amax(dim=(0, 1, 3))])
        return plain(layer, q, k, v, options)  # type: ignore[arg-type]

    model(torch.tensor([tokens]), torch.arange(len(tokens))[None], attend)
    return found


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_calibrated_cache_agrees_with_a_plain_one(kind: str, source: ModelSource, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    quantized = quantize(source, folder, "int8", text=write_text(tmp_path / "text"), samples=6, kv=kind)
    assert quantized.comparison is not None and abs(quantized.comparison.ratio.value - 1) < 0.05
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    scheme = QuantizationConfig.model_validate(raw["quantization_config"]).kv_cache_scheme
    assert scheme is not None and scheme.num_bits == 8 and scheme.type == {"fp8": "float", "int8": "int"}[kind]
    assert tensors["model.layers.1.self_attn.v_scale"].shape == ((1,) if kind == "fp8" else (2,))
    model = load_model(folder, packed=True)
    llm = LLM(folder, Serve(kv_bytes=200_000, kv_dtype=kind, dtype="fp32"), device="cpu")  # type: ignore[arg-type]
    seen = largest_of(model, llm.tokenizer.encode(PROMPTS[0]))  # type: ignore[union-attr]
    for number, block in model.blocks.items():
        found = seen[int(number)].amax(1, keepdim=True) if kind == "fp8" else seen[int(number)]
        ratio = block.attention.kv_range_2K / found
        assert (ratio > 0.8).all() and (ratio < 3).all(), "ranges are those of the text"
    exact = LLM(folder, Serve(kv_bytes=200_000, dtype="fp32"), device="cpu")
    wish = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    for near, right in zip(llm.generate(PROMPTS, wish), exact.generate(PROMPTS, wish), strict=True):
        tolerance = 0.1 if kind == "int8" else 0.3  # fp8 has 3 bits behind the first
        assert near.logprobs[0].value == pytest.approx(right.logprobs[0].value, abs=tolerance)
        assert near.logprobs[0].value != right.logprobs[0].value, "the cache was not in 8 bits"
    blocks = llm.engine.loop.executor.rows.blocks  # type: ignore[attr-defined]
    assert blocks.itemsize == 1


def test_fp8_needs_no_scales_and_int8_does(source: ModelSource) -> None:
    assert source.folder is not None
    llm = LLM(source.folder, Serve(kv_bytes=200_000, kv_dtype="fp8", dtype="fp32"), device="cpu")
    assert len(llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=2))[0].tokens) == 2
    with pytest.raises(BadInput, match="no scales for a KV cache in int8"):
        LLM(source.folder, Serve(kv_bytes=200_000, kv_dtype="int8"), device="cpu")


def test_rounding_is_to_the_nearest_code() -> None:
    x = torch.randn(3, 50, 2, 8, generator=torch.Generator().manual_seed(0))
    for kind, largest in (("int8", 0.5 / 127), ("fp8", 2.0**-4)):
        calibration = KvCalibration(kind=kind)
        calibration.observed(4)(0, x, x, 2 * x, _options())
        scale = calibration.scales(4)
        cached = calibration._as_cached(x, scale[0])
        bound = largest * calibration.ranges[4][0][:, None] if kind == "int8" else largest * x.abs() + 1e-3
        assert ((cached - x).abs() <= bound * 1.001).all()
        assert torch.allclose(scale[1], 2 * scale[0])


def _options() -> object:
    from armillary.kernels.attention.attention import AttentionOptions

    return AttentionOptions(scale=1.0)


def test_scales_of_plain_folders_are_read_and_wrong_ones_refused(source: ModelSource, tmp_path: Path) -> None:
    """As a folder whose weights stay plain holds them, under both names."""
    assert source.folder is not None
    tensors = load_file(source.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((source.folder / "config.json").read_text())
    names = [f"model.layers.{i}.self_attn.{x}" for i in range(2) for x in ("k_scale", "v_scale")]
    names[2:] = ["model.layers.1.self_attn.k_proj.k_scale", "model.layers.1.self_attn.v_proj.v_scale"]
    save_file(tensors | {name: torch.tensor(0.5) for name in names}, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert all((block.attention.kv_range_2K == 224.0).all() for block in model.blocks.values())
    for wrong in (torch.zeros(3), torch.zeros(1), torch.tensor(float("nan")), torch.ones(1, dtype=torch.int32)):
        save_file(tensors | {name: wrong.clone() for name in names}, tmp_path / "model.safetensors")
        with pytest.raises(BadModel, match="scale"):
            load_model(tmp_path)
