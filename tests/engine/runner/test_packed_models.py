"""Quantized folders run packed: transformers' logits, the tokens of the dequantised model, and no more memory than the
file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from armillary.engine.build import make_engine
from armillary.engine.llm import LLM
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.engine_kernels import REFERENCE
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.linear import linear_formats, native_linear
from armillary.engine.runner.linear.linear_formats import Int8Dense, PackedDense, int8_is_fast, replace_linears
from armillary.engine.runner.linear.packed_cpu import IntegerLinear
from armillary.errors import BadInput, BadModel
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.gemm import skinny
from armillary.kernels.quantized import weight_only
from armillary.model.quantized.packed_kernels import PackedKernel
from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.model.families import random_model
from tests.model.quantized.folders import compressed_folder, linears, scheme_of, tiny_llama, write_folder
from tests.model.test_agreement import assert_close, full_logits

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SERVE = Serve(kv_bytes=200_000, max_running=4, dtype="fp32")
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
INT8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
INT8_INPUTS = {"num_bits": 8, "strategy": "token", "dynamic": True}


def int4(folder: Path) -> Path:
    return compressed_folder(folder, tiny_llama(), scheme_of(INT4), "pack-quantized")


def fp8(folder: Path) -> Path:
    return compressed_folder(folder, tiny_llama(attention_bias=True), scheme_of(FP8), "float-quantized")


def w8a8(folder: Path) -> Path:
    return compressed_folder(folder, tiny_llama(), scheme_of(INT8, INT8_INPUTS), "int-quantized")


def nf4(folder: Path) -> Path:
    from bitsandbytes import functional

    model, packed = tiny_llama(), {}
    for name, weight in linears(model).items():
        codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        tensors = {f"weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        packed[name] = tensors | {"weight": codes}
    return write_folder(folder, model, {"quant_method": "bitsandbytes", "load_in_4bit": True}, packed)


def wide_int8(folder: Path) -> Path:
    return compressed_folder(folder, tiny_llama(**WIDE), scheme_of(INT8, INT8_INPUTS), "int-quantized")


def wide_int4(folder: Path) -> Path:
    int4 = INT4 | {"group_size": 128}
    return compressed_folder(folder, tiny_llama(**WIDE), scheme_of(int4), "pack-quantized")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one: torch's kernels run."""
    monkeypatch.setattr(native_linear, "library", lambda: None)


def tensor_bytes(folder: Path) -> int:
    return (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize("write", [int4, fp8, pytest.param(nf4, marks=pytest.mark.peers)])
@torch.no_grad()
def test_packed_models_agree_with_dequantised_ones(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    model, dense = load_model(folder, packed=True), load_model(folder)
    assert len(packed_modules(model)) == 8 and not packed_modules(dense)
    assert loaded_bytes(model) <= 1.05 * tensor_bytes(folder)
    assert loaded_bytes(model) < 0.7 * loaded_bytes(dense)
    assert_close(full_logits(model, TOKENS), full_logits(dense, TOKENS))
    found = LLM(folder, SERVE, device="cpu").generate(TOKENS.tolist(), GREEDY)
    engine, _ = make_engine(dense, None, SERVE)
    requests = [Request(id=str(i), prompt=row, params=GREEDY) for i, row in enumerate(TOKENS.tolist())]
    assert [made.tokens for made in found] == [made.tokens for made in engine.generate(requests)]


@pytest.mark.parametrize("write", [int4, fp8])
@torch.no_grad()
def test_logits_are_those_of_transformers(write: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_close(full_logits(load_model(folder, packed=True), TOKENS), theirs(TOKENS, use_cache=False).logits)


@torch.no_grad()
def test_a_single_token_is_fused_with_norms_gates_and_residuals(tmp_path: Path) -> None:
    """On a GPU by kernels, here by their reference; other numbers of tokens run as they do without."""
    model = load_model(fp8(tmp_path / "m"), packed=True)
    requests = [ask("long", [2, 3, 4, 5], 8, temperature=0.0), ask("short", [7], 3, temperature=0.0)]
    plain = serve(model.config, model, requests, executor=FastExecutor)
    calls: list[int] = []

    def fused(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(x))
        return weight_only.reference(x, *rest)

    for linear in packed_modules(model):
        (part,) = linear.weight.parts
        runs = dict.fromkeys(("single", "few", "many"), weight_only.reference)
        columns = part.columns
        linear.kernels = (
            PackedKernel(part=part, dtype=torch.float32, format="fp8", group=columns, fused=fused, **runs),
        )
    kernels = replace(REFERENCE, small=skinny.reference)
    found = serve(model.config, model, requests, executor=partial(FastExecutor, kernels=kernels))
    assert [made.tokens for made in found] == [made.tokens for made in plain]
    assert set(calls) == {1} and len(calls) >= 4 * len(packed_modules(model))


@torch.no_grad()
def test_latent_attention_runs_packed(tmp_path: Path) -> None:
    """All but the up-projection of latents, which is multiplied with queries."""
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "vocab_size": 96}
    folder = compressed_folder(
        tmp_path / "m", random_model("deepseek_v3", 1, **sizes), scheme_of(FP8), "float-quantized"
    )
    model, dense = load_model(folder, packed=True), load_model(folder)
    attention = dict(model.blocks["0"].attention.named_children())
    are_packed = {name for name, module in attention.items() if module in packed_modules(model)}
    assert are_packed == {"q_down", "q", "kv_down", "out"}
    assert_close(full_logits(model, TOKENS), full_logits(dense, TOKENS))
    found = LLM(folder, SERVE, device="cpu").generate(TOKENS.tolist(), GREEDY)
    engine, _ = make_engine(dense, None, SERVE)
    requests = [Request(id=str(i), prompt=row, params=GREEDY) for i, row in enumerate(TOKENS.tolist())]
    assert [made.tokens for made in found] == [made.tokens for made in engine.generate(requests)]


@pytest.mark.usefixtures("no_compiler")
@torch.no_grad()
def test_int8_inputs_are_rounded_per_token(tmp_path: Path) -> None:
    """W8A8: near the dequantised model, and no copy of the weights is kept beside the int8 one."""
    folder = w8a8(tmp_path / "m")
    llm = LLM(folder, SERVE, device="cpu")
    forward = llm.engine.loop.executor.forward  # type: ignore[attr-defined]
    assert not any(module.weight.parts for module in packed_modules(forward.model))
    assert isinstance(forward.layers[1].qkv, Int8Dense if int8_is_fast() else IntegerLinear)
    x, packed = torch.randn(5, 64), load_model(folder, packed=True).blocks["1"].attention.qkv
    error = (forward.layers[1].qkv(x) - packed(x)).norm() / packed(x).norm()
    assert 1e-5 < error < 0.02
    made = llm.generate(TOKENS.tolist(), replace(GREEDY, ignore_eos=True))
    assert [each.finish for each in made] == ["length"] * 2


@pytest.mark.usefixtures("no_compiler")
@torch.no_grad()
def test_int8_inputs_of_latent_projections_are_rounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W8A8 with latent attention: both halves of the first GEMM and the queries from their latent."""
    monkeypatch.setattr(linear_formats, "int8_is_fast", lambda: True)
    sizes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "vocab_size": 96}
    scheme = scheme_of(INT8, INT8_INPUTS)
    folder = compressed_folder(tmp_path / "m", random_model("deepseek_v3", 1, **sizes), scheme, "int-quantized")
    attention, llm = load_model(folder, packed=True).blocks["0"].attention, LLM(folder, SERVE, device="cpu")
    forward = llm.engine.loop.executor.forward  # type: ignore[attr-defined]
    assert not any(
        module.weight.parts for module in packed_modules(forward.model) if module is not forward.model.output
    )
    layer, x_TH = forward.layers[0], torch.randn(5, forward.model.config.hidden)
    x_TC = torch.randn(5, 12)
    for linear, packed in (
        (layer.qkv.parts[0], attention.q_down),
        (layer.qkv.parts[1], attention.kv_down),
        (layer.latent.q, attention.q),
    ):
        assert isinstance(linear, Int8Dense)
        x = x_TC if linear is layer.latent.q else x_TH
        error = (linear(x) - packed(x)).norm() / packed(x).norm()
        assert 1e-5 < error < 0.02
    assert [made.finish for made in llm.generate(TOKENS.tolist(), GREEDY)] == ["length"] * 2
    before = layer.latent.q
    replace_linears(forward, PackedDense, let_go=False)  # as on a CPU with bf16 units: what is int8 stays
    assert layer.latent.q is before and all(isinstance(part, Int8Dense) for part in layer.qkv.parts)


@pytest.mark.usefixtures("no_compiler")
@torch.no_grad()
def test_int8_layers_start_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There plain layers are packed, too; int8 ones are already."""
    monkeypatch.setattr(linear_formats, "int8_is_fast", lambda: True)
    llm = LLM(w8a8(tmp_path / "m"), replace(SERVE, dtype="bf16"), device="cpu")
    forward = llm.engine.loop.executor.forward  # type: ignore[attr-defined]
    assert all(isinstance(layer.down, Int8Dense) for layer in forward.layers)
    (made,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    assert len(made.tokens) == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("write", [wide_int8, wide_int4])
@pytest.mark.usefixtures("no_compiler")
@torch.no_grad()
def test_integers_run_as_they_are(
    write: Callable[[Path], Path], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without int8 units; the engine holds no more than the file."""
    monkeypatch.setattr(linear_formats, "int8_is_fast", lambda: False)
    folder = write(tmp_path / "m")
    dense = load_model(folder, dtype=dtype).blocks["0"].attention.qkv
    llm = LLM(folder, replace(SERVE, dtype=dtype), device="cpu")
    forward = llm.engine.loop.executor.forward  # type: ignore[attr-defined]
    (layer,) = forward.layers
    linears_of_layer = [layer.qkv, layer.out, layer.up, layer.down]
    assert all(isinstance(linear, IntegerLinear) for linear in linears_of_layer)
    held = sum(linear.nbytes for linear in linears_of_layer) + loaded_bytes(forward.model)
    assert held <= 1.05 * tensor_bytes(folder)
    for tokens in (1, 70):
        x = torch.randn(tokens, 256).to(DTYPES[dtype])
        assert relative_error(layer.qkv(x), dense(x)) < 2e-2
    made = llm.generate(TOKENS.tolist(), replace(GREEDY, ignore_eos=True))
    assert [len(each.tokens) for each in made] == [8, 8]


def test_what_packed_weights_cannot_do_is_one_line(tmp_path: Path) -> None:
    folder = int4(tmp_path / "m")
    with pytest.raises(BadInput, match=r"already quantized; leave serve\.weights=auto"):
        LLM(folder, Serve(weights="int8"), device="cpu")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 128', '"intermediate_size": 160'))
    with pytest.raises(BadModel, match=r"mlp\.\w+\.weight_packed has shape"):
        load_model(folder, packed=True)
    (folder / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))
    with pytest.raises(BadModel, match="is not part of a llama model of this shape"):
        load_model(folder, packed=True)
