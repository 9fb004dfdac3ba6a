"""Adapters on packed weights: outputs and gradients of the dequantised model, and a run on a quantized folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from armillary.model.layers.attention_forms import plain
from armillary.model.lora import PackedLoraLinear, adapters
from armillary.model.quantized.packed_linear import PackedLinear, loaded_bytes, packed_modules
from armillary.model.quantized.packed_rows import FusedRows
from armillary.model.quantizing.quantize_model import quantize
from armillary.model.weights.hf_weights import hf_tensors, load_model
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import model_table
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from armillary.training.prepare_run import train_recipe
from armillary.training.step.lora import add_lora
from tests.model.quantized.folders import FOLDERS, tiny_llama
from tests.model.weights.test_gguf_weights import MIXED, write_gguf

JOB = TrainJob(lora_rank=3, lora_alpha=5.0)


def write(name: str, folder: Path) -> Path:
    model = tiny_llama(num_hidden_layers=2)
    if name == "gguf":  # parts of a fused matrix in different formats
        return write_gguf(folder.with_suffix(".gguf"), model, "llama", MIXED)
    return FOLDERS[name](folder, model)


@pytest.mark.parametrize("name", ["nf4", "int4 groups with zeros", "fp8 per row", "int8", "gguf"])
def test_gradients_are_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    folder = write(name, tmp_path / "m")
    packed, dense = load_model(folder, dtype="fp32", packed="dense"), load_model(folder, dtype="fp32")
    count = 6 if name == "gguf" else 8  # that file holds one of each block's four plain
    assert len(packed_modules(packed)) == count and loaded_bytes(packed) < 0.9 * loaded_bytes(dense)
    tokens, grads, outputs = torch.arange(24).view(2, 12), [], []
    for model in (packed, dense):
        add_lora(model, JOB)
        generator = torch.Generator().manual_seed(0)
        for _, module in adapters(model):
            module.lora_b.data.normal_(0, 0.1, generator=generator)
        outputs.append(model.head(model(tokens, torch.arange(12).expand(2, 12), plain)))
        outputs[-1].square().mean().backward()
        grads.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert sum(isinstance(module, PackedLoraLinear) for _, module in adapters(packed)) == count
    assert torch.allclose(*outputs, rtol=1e-4, atol=1e-4)
    assert grads[0].keys() == grads[1].keys() and all(each.endswith(("lora_a", "lora_b")) for each in grads[0])
    for each, expected in grads[1].items():
        assert (grads[0][each] - expected).norm() <= 1e-4 * expected.norm(), each


def test_columns_in_another_order_and_rows_of_several_parts(tmp_path: Path) -> None:
    """GPTQ's act-order and a fused matrix whose parts are in another order."""
    model = load_model(FOLDERS["gptq"](tmp_path, tiny_llama(num_hidden_layers=1)), dtype="fp32", packed=True)
    (part,) = model.blocks["0"].attention.qkv.weight.parts  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(0)
    columns = torch.randperm(part.columns, generator=generator).int()
    rows = torch.randperm(2 * part.num_rows, generator=generator).int()
    linear = PackedLinear(FusedRows(parts=(replace(part, order_K=columns), part), order_N=rows))
    x = torch.randn(3, 5, part.columns, requires_grad=True)
    dy = torch.randn(3, 5, 2 * part.num_rows)
    (found,) = torch.autograd.grad(linear(x), x, dy)
    weight = linear.weight.dequantised().float()
    assert torch.allclose(linear(x), x @ weight.t(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(found, dy @ weight, rtol=1e-4, atol=1e-3)


def test_a_run_on_a_quantized_folder(home: Home, recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The base stays as it was; the export is the dequantised base with adapters merged in."""
    first = train_recipe(recipe("train.steps=1", "train.profile_every=0"), home=home, device="cpu")
    source = resolve_model(str(first.export), home, need_weights=True)
    quantize(source, tmp_path / "int4", "int4-rtn", group=32)
    settings = ["train.steps=3", "train.lora_rank=2", "train.lr=0.01", "train.profile_every=0"]
    ready = replace(recipe(*settings, "layout.precision=fp32"), model=model_table({"path": str(tmp_path / "int4")}))
    losses: list[float] = []
    done = train_recipe(ready, home=home, device="cpu", watch=lambda report: losses.append(report.gauges["loss"]))
    assert done.export is not None and losses[-1] < losses[0]
    found = load_file(done.run.folder / "adapter/3/adapter_model.safetensors")
    assert found and done.export is not None
    before = dict(hf_tensors(load_model(tmp_path / "int4", dtype="fp32"), torch.float32))
    after = load_file(done.export / "model.safetensors")
    for name, weight in before.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in found:
            weight = weight + 2.0 * found[f"{prefix}.lora_B.weight"] @ found[f"{prefix}.lora_A.weight"]
            assert not torch.equal(weight, before[name])
        assert torch.allclose(after[name].float(), weight, rtol=1e-4, atol=1e-5), name
