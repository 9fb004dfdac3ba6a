"""Packed models through the C++ kernels: near the dequantised ones, and no more memory than the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.forward import Forward
from armillary.engine.runner.linear.native_linear import NativeLinear
from armillary.kernels.core.agreement import relative_error
from armillary.kernels.core.dtype import DTYPES
from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from armillary.store.gguf.local_folder import gguf_folder
from armillary.store.home import Home
from tests.engine.runner.test_packed_experts import packed_folder
from tests.model.quantized.folders import FOLDERS, tiny_llama
from tests.model.weights.test_gguf_weights import Q, write_gguf

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 64}
SERVE = Serve(kv_bytes=200_000, max_running=2, dtype="fp32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TAKEN = ("int8", "int4", "nvfp4", "mxfp4", "gptq", "awq", "llm_int8")  # the others are no integers


def forward_of(llm: LLM) -> Forward:
    return llm.engine.loop.executor.forward  # type: ignore[attr-defined,no-any-return]


def native_layers(forward: Forward) -> list[NativeLinear]:
    linears = [getattr(layer, name) for layer in forward.layers for name in ("qkv", "out", "up", "down")]
    return [linear for linear in linears if isinstance(linear, NativeLinear)]


def held_bytes(forward: Forward) -> int:
    """Of all weights once the engine has put them into the order of the kernels."""
    heads = [run for module in packed_modules(forward.model) if isinstance(run := module._run, NativeLinear)]
    native = {id(linear): linear.nbytes for linear in (*native_layers(forward), *heads)}
    return sum(native.values()) + loaded_bytes(forward.model)


@pytest.mark.parametrize("name", FOLDERS)
@torch.no_grad()
def test_a_folder_runs_as_it_is(name: str, tmp_path: Path) -> None:
    folder = FOLDERS[name](tmp_path, tiny_llama(**WIDE))
    llm, dense = LLM(folder, SERVE, device="cpu"), load_model(folder).blocks["0"].attention.qkv
    forward, x = forward_of(llm), torch.randn(5, 256)
    native = native_layers(forward)
    assert len(native) == (4 if name.startswith(TAKEN) else 0)
    assert relative_error(forward.layers[0].qkv(x), dense(x)) < 2e-2
    assert held_bytes(forward) <= 1.05 * (folder / "model.safetensors").stat().st_size
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].tokens) == 4


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Q8_0", "fp32"), ("Q4_0", "bf16"), ("Q4_K", "fp32"), ("Q5_K", "fp32"), ("Q6_K", "fp32")]
)
@torch.no_grad()
def test_a_gguf_file_runs_as_it_is_with_its_embedding_and_head(kind: str, dtype: str, tmp_path: Path) -> None:
    ends = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(**WIDE), "llama", dict.fromkeys(ends, Q[kind]))
    plain = load_model(gguf_folder(path, Home.at(tmp_path)), dtype="fp32")
    llm = LLM(path, Serve(kv_bytes=200_000, max_running=2, dtype=dtype), device="cpu", home=Home.at(tmp_path))
    forward, x = forward_of(llm), torch.randn(3, 256).to(DTYPES[dtype])
    assert len(native_layers(forward)) == 4
    assert held_bytes(forward) <= 1.05 * path.stat().st_size
    assert relative_error(forward.head(x), plain.head(x.float())) < 2e-2
    tokens = torch.tensor([[5, 63, 0]])
    places = torch.arange(3)[None]
    assert relative_error(forward.model.embed(tokens, places), plain.embed(tokens, places)) < 1e-2
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].tokens) == 4


@torch.no_grad()
def test_parts_of_several_formats_are_joined_in_order(tmp_path: Path) -> None:
    """As in a Q4_K_M file, where V has more bits than Q and K."""
    kinds = {"q_proj": Q["Q4_0"], "k_proj": Q["Q4_0"], "v_proj": Q["Q8_0"]}
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(**WIDE), "llama", kinds)
    dense = load_model(gguf_folder(path, Home.at(tmp_path)), dtype="fp32").blocks["0"].attention.qkv
    qkv, x = forward_of(LLM(path, SERVE, device="cpu", home=Home.at(tmp_path))).layers[0].qkv, torch.randn(7, 256)
    assert isinstance(qkv, NativeLinear) and len(qkv.parts) == 3
    assert relative_error(qkv(x), dense(x)) < 2e-2


@torch.no_grad()
def test_experts_are_not_dequantised(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "int4 groups with zeros")
    llm, plain = LLM(folder, SERVE, device="cpu"), load_model(folder, dtype="fp32")
    assert not any(linear.weight.parts for linear in packed_modules(forward_of(llm).model))
    mixture, x = forward_of(llm).layers[0].mixture, torch.randn(1, 9, 160)
    assert mixture is not None and relative_error(mixture(x), plain.blocks["0"].mlp(x)) < 3e-2
    assert len(llm.generate([[1, 2, 3]], GREEDY)[0].tokens) == 4


@torch.no_grad()
def test_plain_weights_are_rounded_at_load_the_head_too(tmp_path: Path) -> None:
    tiny_llama(**WIDE).save_pretrained(tmp_path / "m")
    llm = LLM(tmp_path / "m", Serve(kv_bytes=200_000, dtype="fp32", weights="int8"), device="cpu")
    plain, forward, x = load_model(tmp_path / "m", dtype="fp32"), forward_of(llm), torch.randn(5, 256)
    assert len(native_layers(forward)) == 4
    assert relative_error(forward.layers[0].qkv(x), plain.blocks["0"].attention.qkv(x)) < 2e-2
    assert relative_error(forward.head(x), plain.head(x)) < 2e-2


@torch.no_grad()
def test_a_head_that_bf16_holds_stays_in_bf16(tmp_path: Path) -> None:
    model = tiny_llama(**WIDE)
    model.lm_head.weight.copy_(model.lm_head.weight.bfloat16())
    folder = FOLDERS["int8 per row"](tmp_path, model)
    forward, x = forward_of(LLM(folder, SERVE, device="cpu")), torch.randn(3, 256)
    assert relative_error(forward.head(x), x @ model.lm_head.weight.t()) < 1e-6
    assert forward.model.output is not None and not forward.model.output.weight.numel(), "fp32 is freed"
