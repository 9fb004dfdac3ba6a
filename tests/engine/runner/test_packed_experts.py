"""Packed experts in the engine: in stacks that kernels read, with the tokens of the same weights dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.executor import FastExecutor
from armillary.kernels.moe.packed_stack import PackedStack
from armillary.kernels.quantized.weight_only import WeightFormat
from armillary.model.moe.packed_experts import PackedExperts, stackable_experts
from armillary.model.quantized.formats import IntGroups, pack_nibbles
from armillary.model.quantized.packed_linear import loaded_bytes
from armillary.model.quantized.packed_rows import FusedRows, PackedRows
from armillary.model.weights.hf_weights import hf_tensors, load_model
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.kernels.interpreter import needs_interpreter
from tests.model.quantized.folders import SCHEMES, compress, scheme_of, write_folder
from tests.model.test_agreement import assert_close, full_logits

TOKENS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
FORMATS = {
    "int4 groups with zeros": WeightFormat("int4", 32, zeros=True),
    "int8 per row": WeightFormat("int8", 0),
    "llm.int8": WeightFormat("int8", 0),
    "nvfp4": WeightFormat("nvfp4", 16),
    "fp8 blocks": WeightFormat("fp8", 128),
}


class _Named:
    """A config and its tensors, as `write_folder` takes them."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.state_dict = config, lambda: tensors


def packed_folder(where: Path, name: str) -> Path:
    """A small mixture of experts in one of the formats, all of its linear layers but the head."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=160, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, initializer_range=0.1, norm_topk_prob=True,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).eval().save_pretrained(where / "plain")
    tensors = dict(hf_tensors(load_model(where / "plain"), torch.float32))
    weights = {key.removesuffix(".weight"): each for key, each in tensors.items() if key.endswith("_proj.weight")}
    table, packed = _packed(name, weights)
    return write_folder(where / "m", _Named(config, tensors), table, packed)


def _packed(name: str, weights: dict[str, torch.Tensor]) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """(quantization_config, the tensors of each module)."""
    if name == "fp8 blocks":
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}, {
            module: {
                "weight": (400 * weight).clamp(-448, 448).to(torch.float8_e4m3fn),
                "weight_scale_inv": (0.5 + torch.rand(-(-len(weight) // 128), -(-weight.shape[1] // 128))) / 400,
            }
            for module, weight in weights.items()
        }
    if name == "llm.int8":
        return {"quant_method": "bitsandbytes", "load_in_8bit": True}, {
            module: {
                "weight": (127 * weight / weight.abs().amax(1, keepdim=True)).round().to(torch.int8),
                "SCB": weight.abs().amax(1),
            }
            for module, weight in weights.items()
        }
    format, args = SCHEMES[name]
    table = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": args}}}
    return table, {module: compress(weight, scheme_of(args), format) for module, weight in weights.items()}


@torch.no_grad()
def test_experts_stay_packed(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, "int4 groups with zeros")
    model = load_model(folder, packed=True)
    assert loaded_bytes(model) <= 1.05 * (folder / "model.safetensors").stat().st_size
    assert_close(full_logits(model, TOKENS), full_logits(load_model(folder), TOKENS))
    llm = LLM(folder, Serve(kv_bytes=200_000, max_running=4, dtype="fp32"), device="cpu")
    found = llm.generate(TOKENS.tolist(), SamplingParams(temperature=0.0, max_tokens=8))
    assert [made.finish for made in found] == ["length"] * 2


@needs_interpreter
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_kernels_read_all_experts_of_a_layer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens by codes, many in tiles; one long step is dequantised."""
    from armillary.kernels.moe import grouped_moe_triton
    from armillary.kernels.moe.small_moe_triton import small_moe

    monkeypatch.setattr(grouped_moe_triton, "_DEQUANTISED_ROWS", 6)
    folder = packed_folder(tmp_path, name)
    prompts = [ask("a", [*range(2, 27)], 3, temperature=0.0), ask("b", [7], 3, temperature=0.0)]
    model, stacked = (load_model(folder, packed=True).eval() for _ in range(2))
    right = serve(model.config, model, prompts)
    kernels = EngineKernels(moe=small_moe, grouped_moe=grouped_moe_triton.grouped_moe_pointers, capturable=True)
    executors: list[FastExecutor] = []

    def executor(*given: Any, **named: Any) -> FastExecutor:
        executors.append(FastExecutor(*given, kernels=kernels, **named))
        return executors[0]

    found = serve(stacked.config, stacked, prompts, executor=executor)
    assert [made.tokens for made in found] == [made.tokens for made in right]
    assert executors[0].kernels.capturable
    experts = stacked.blocks["0"].mlp.experts
    assert isinstance(experts.up_E2FH, PackedStack) and experts.up_E2FH.format == FORMATS[name]
    for linear, stack in ((experts.up[1], experts.up_E2FH), (experts.down[3], experts.down_EHF)):
        codes = linear.weight.parts[0].rows["codes"]
        assert codes.untyped_storage().data_ptr() == stack.codes_ENB.untyped_storage().data_ptr()
    assert loaded_bytes(stacked) <= 1.05 * (folder / "model.safetensors").stat().st_size


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_steps_are_captured(name: str, tmp_path: Path) -> None:
    folder = packed_folder(tmp_path, name)
    prompts = [ask("a", [*range(2, 27)], 12, temperature=0.0), ask("b", [7], 9, temperature=0.0)]
    model, stacked = load_model(folder).eval(), load_model(folder, packed=True, device="cuda").eval()
    executors: list[FastExecutor] = []

    def executor(*given: Any, **named: Any) -> FastExecutor:
        executors.append(FastExecutor(*given, **named))
        return executors[0]

    found = serve(stacked.config, stacked, prompts, executor=executor)
    assert executors[0].kernels.capturable and executors[0].kernels.moe is not None
    assert [made.tokens for made in found] == [made.tokens for made in serve(model.config, model, prompts)]


def expert_part(*, zeros: bool, group: int = 32, order: bool = False) -> PackedRows:
    tensors: dict[str, Any] = {
        "codes": pack_nibbles(torch.randint(0, 16, (8, 64), dtype=torch.uint8)),
        "scale": torch.rand(8, 64 // group),
    }
    if zeros:
        tensors["zero"] = torch.randint(0, 16, (8, 64 // group), dtype=torch.uint8)
    format = IntGroups(bits=4, group=group, zeros=zeros)
    return PackedRows(format=format, rows=tensors, columns=64, order_K=torch.randperm(64) if order else None)


def layer_of(tmp_path: Path, *parts: PackedRows) -> PackedExperts:
    """A layer whose first experts have these weights for gate and up."""
    model = load_model(packed_folder(tmp_path, "int4 groups with zeros"), packed=True)
    experts: PackedExperts = model.blocks["0"].mlp.experts
    for each in (experts.up, experts.down):
        for number, linear in enumerate(each):
            part = parts[number % len(parts)] if each is experts.up else expert_part(zeros=True)
            linear.weight = FusedRows(parts=(part,))
    assert bool(stackable_experts(model)) == (experts.weight_format is not None)
    return experts


def test_experts_without_zeros_get_the_middle_beside_others_that_have_some(tmp_path: Path) -> None:
    parts = expert_part(zeros=True), expert_part(zeros=False)
    experts = layer_of(tmp_path, *parts)
    experts.stack()
    numbers = experts.up_E2FH.select(torch.tensor([0, 1]), torch.float32)
    assert torch.equal(numbers, torch.stack([part.dequantised().float() for part in parts]))


def test_what_is_not_stacked_runs_expert_by_expert(tmp_path: Path) -> None:
    for index, other in enumerate((expert_part(zeros=True, group=16), expert_part(zeros=True, order=True))):
        assert layer_of(tmp_path / str(index), expert_part(zeros=True), other).weight_format is None
