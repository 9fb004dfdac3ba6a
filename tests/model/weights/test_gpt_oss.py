"""GPT-OSS as published: attention sinks, biases everywhere, experts stacked in MXFP4, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.executor import FastExecutor
from armillary.errors import BadModel
from armillary.kernels.moe.packed_stack import PackedStack
from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.kernels.interpreter import needs_interpreter
from tests.model.test_agreement import assert_close, full_logits

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
EXPERTS, HIDDEN, FFN = 4, 64, 96


def plain_model() -> Any:
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=8,
        max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=False,
        rope_parameters={"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0,
                         "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def packed_folder(folder: Path) -> Path:
    """The experts in MXFP4, with random codes."""
    plain_model().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[path]
            shape = (EXPERTS, rows, columns // 32)
            tensors[f"{path}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{path}_scales"] = torch.randint(122, 126, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@torch.no_grad()
def test_plain_experts(tmp_path: Path) -> None:
    theirs = plain_model()
    theirs.save_pretrained(tmp_path)
    assert_close(full_logits(load_model(tmp_path), TOKENS), theirs(TOKENS, use_cache=False).logits)


@torch.no_grad()
def test_mxfp4_experts_stay_packed(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), attn_implementation="eager"
    ).float()  # it dequantises to bf16, which holds every number of MXFP4
    expected = theirs(TOKENS, use_cache=False).logits
    model, dense = load_model(folder, packed=True), load_model(folder)
    assert len(packed_modules(model)) == 2 * 2 * EXPERTS and not packed_modules(dense)
    assert loaded_bytes(model) <= 1.05 * (folder / "model.safetensors").stat().st_size
    assert_close(full_logits(model, TOKENS), expected)
    assert_close(full_logits(dense, TOKENS), expected)
    llm = LLM(folder, Serve(kv_bytes=200_000, max_running=4, dtype="fp32"), device="cpu")
    made = llm.generate(TOKENS.tolist(), SamplingParams(temperature=0.0, max_tokens=4))
    wanted = theirs.generate(TOKENS, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert [each.tokens for each in made] == wanted[:, TOKENS.shape[1] :].tolist()


def test_wrong_stacks_are_one_line(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m")
    good = load_file(folder / "model.safetensors")
    path = "model.layers.0.mlp.experts.down_proj"
    for name, tensor, text in (
        (f"{path}_blocks", good[f"{path}_blocks"][:, :, :-1].clone(), "has shape"),
        (f"{path}_blocks", good[f"{path}_blocks"].int(), "is int32"),
        (f"{path}_scales", good[f"{path}_scales"][:3].clone(), "has shape"),
        (f"{path}_scales", None, "is missing"),
    ):
        changed = {key: value for key, value in (good | {name: tensor}).items() if value is not None}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(BadModel, match=text):
            load_model(folder, packed=True)


@needs_interpreter
@torch.inference_mode()
def test_kernels_read_all_experts_of_a_layer(tmp_path: Path) -> None:
    """The engine with the kernels of GPUs: few tokens by codes, many dequantised."""
    from armillary.kernels.moe.grouped_moe_triton import grouped_moe_pointers
    from armillary.kernels.moe.small_moe_triton import small_moe

    folder = packed_folder(tmp_path / "m")
    prompts = [ask("a", [*range(2, 14)], 4, temperature=0.0), ask("b", [7], 4, temperature=0.0)]
    plainly, stacked = load_model(folder, packed=True).eval(), load_model(folder, packed=True).eval()
    right = serve(plainly.config, plainly, prompts)
    kernels = EngineKernels(moe=small_moe, grouped_moe=grouped_moe_pointers)
    found = serve(
        stacked.config, stacked, prompts, executor=lambda *args, **named: FastExecutor(*args, kernels=kernels, **named)
    )
    assert [made.tokens for made in found] == [made.tokens for made in right]
    experts = stacked.blocks["0"].mlp.experts
    assert isinstance(experts.up_E2FH, PackedStack) and experts.linears[0].weight.nbytes
    codes = experts.linears[1].weight.parts[0].rows["codes"]
    assert codes.untyped_storage().data_ptr() == experts.up_E2FH.codes_ENB.untyped_storage().data_ptr()
