"""Rounding, GPTQ and AWQ: each against its definition, and better than the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from armillary.kernels.quantized.sparse import is_pruned, prune
from armillary.model.quantizing.awq import fold_factors, output_error, weight_of
from armillary.model.quantizing.block_stages import Stages, input_statistics, run_stage
from armillary.model.quantizing.compressed_writer import _weight_arguments, module_tensors
from armillary.model.quantizing.gptq import gptq
from armillary.model.quantizing.quantization_targets import TARGETS, find_target
from armillary.model.quantizing.rounding import IntGrid
from armillary.model.quantizing.sparsegpt import sparsegpt
from armillary.model.weights.hf_weights import load_model
from armillary.model.weights.safetensors_folder import TensorFolder
from tests.model.families import FAMILIES, GATED, random_model
from tests.model.quantized.folders import decompress, scheme_of

FORMATS = {"fp8": "float-quantized", "int8": "int-quantized", "mxfp4": "mxfp4-pack-quantized"}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [64, 96, 1024])
@pytest.mark.parametrize("to", [name for name in TARGETS if "gguf" not in name and name != "2:4"])
def test_tensors_are_read_by_their_own_package(to: str, columns: int, dtype: torch.dtype) -> None:
    packed = find_target(to, dtype, 128).round(numbers(11, columns))
    tensors = module_tensors(packed)
    scheme = scheme_of(json.loads(_weight_arguments(packed)))
    expected = decompress(tensors, scheme, FORMATS.get(to, "pack-quantized"))
    assert torch.equal(packed.dequantised().to(expected.dtype), expected)
    error = (packed.dequantised().float() - numbers(11, columns)).norm() / numbers(11, columns).norm()
    assert error < {"fp8": 0.03, "int8": 0.01}.get(to, 0.16)


def test_zeros_and_constant_rows_are_kept() -> None:
    weight = torch.zeros(4, 64)
    weight[1], weight[2] = 0.25, -1e-30
    for to in (name for name in TARGETS if name != "2:4"):
        found = find_target(to, torch.bfloat16, 32).round(weight).dequantised().float()
        assert torch.isfinite(found).all() and torch.allclose(found, weight, atol=0.02), to


def inputs(columns: int) -> torch.Tensor:
    """With a few large channels, and all of them related, as behind a norm."""
    mix = numbers(columns, columns, seed=1) / columns**0.5 + torch.eye(columns)
    return numbers(400, columns, seed=2) @ mix * torch.exp(numbers(columns, seed=3))


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_what_solving_for_each_column_gives(act_order: bool) -> None:
    """The slow twin: after each column, least squares for all columns that are left."""
    x, weight = inputs(32).double(), numbers(3, 32).double()
    gram = x.T @ x
    grid = IntGrid(bits=4, group=16, symmetric=True, scale_dtype=torch.float64)
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(32)
    scale, zero = (each.repeat_interleave(16, 1) for each in grid.fit(weight, gram.diagonal()))
    order = gram.diagonal().argsort(descending=True).tolist() if act_order else list(range(32))
    expected = weight.clone()
    for at, k in enumerate(order):
        rounded = (grid.codes(expected[:, k], scale[:, k], zero[:, k]) - zero[:, k]) * scale[:, k].float()
        change, left = rounded - expected[:, k], order[at + 1 :]
        if left:
            expected[:, left] -= torch.linalg.solve(damped[left][:, left], damped[left, k])[None] * change[:, None]
        expected[:, k] = rounded
    found = gptq(weight, gram, grid, act_order=act_order).dequantised()
    assert torch.allclose(found, expected, atol=1e-6)


def test_gptq_changes_outputs_less_than_rounding() -> None:
    x, weight = inputs(128), numbers(40, 128)
    gram = x.T @ x
    grid = IntGrid(bits=4, group=32, symmetric=True, scale_dtype=torch.float32)

    def error(found: torch.Tensor) -> float:
        return output_error(found - weight, gram)

    plain, weighted = (error(grid.round(weight, each).dequantised()) for each in (None, gram.diagonal()))
    ordered, natural = (error(gptq(weight, gram, grid, act_order=each).dequantised()) for each in (True, False))
    assert ordered < 0.7 * plain and natural < 0.8 * plain and weighted < plain
    unseen = gptq(weight, torch.zeros(128, 128), grid).dequantised()
    assert torch.equal(unseen, grid.round(weight).dequantised()), "an expert without tokens is rounded"


def test_sparsegpt_is_what_solving_for_each_column_gives() -> None:
    """The slow twin: which two of four go is decided by the loss of each, then least squares for what is left."""
    x, weight = inputs(32).double(), numbers(5, 32).double()
    gram = x.T @ x
    damped = gram + 0.01 * gram.diagonal().mean() * torch.eye(32)
    expected = weight.clone()
    for k in range(32):
        left = list(range(k + 1, 32))
        if k % 4 == 0:
            fours = [torch.linalg.inv(damped[j:, j:])[0, 0] for j in range(k, k + 4)]
            loss = expected[:, k : k + 4].square() / torch.stack(fours)
            gone = torch.zeros_like(loss).scatter_(1, loss.argsort(dim=1)[:, :2], 1.0)
        change = -expected[:, k] * gone[:, k % 4]
        if left:
            expected[:, left] -= torch.linalg.solve(damped[left][:, left], damped[left, k])[None] * change[:, None]
        expected[:, k] += change
    found = sparsegpt(weight, gram)
    assert is_pruned(found) and torch.allclose(found, expected, atol=1e-6)


def test_sparsegpt_changes_outputs_less_than_magnitudes() -> None:
    x, weight = inputs(256), numbers(40, 256)  # two blocks of columns
    gram = x.T @ x
    errors = [output_error(found - weight, gram) for found in (sparsegpt(weight, gram), prune(weight))]
    assert errors[0] < 0.5 * errors[1]
    assert torch.equal(sparsegpt(weight, torch.zeros(256, 256)), prune(weight)), "an expert without tokens"


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in ("gpt_oss", *GATED)])  # stacked; refused
@torch.no_grad()
def test_awq_folds_factors_without_changing_the_model(family: str, tmp_path: Path) -> None:
    random_model(family, 1, num_hidden_layers=1).save_pretrained(tmp_path)
    config = load_model(tmp_path).config
    with TensorFolder(tmp_path) as stored:
        stages = Stages(config=config, stored=stored, device=torch.device("cpu"))
        stage = stages.block(0)
    block, x = stage.blocks["0"], numbers(2, 24, config.hidden) * torch.exp(numbers(config.hidden, seed=5))
    names = {f"{name}.weight" for name, each in block.named_modules() if isinstance(each, torch.nn.Linear)}
    if config.moe is not None and config.layers[0].mlp == "moe":
        names |= {f"mlp.experts.{part}#{e}" for part in ("up_E2FH", "down_EHF") for e in range(config.moe.num_experts)}
    names = {name for name in names if weight_of(block, name).shape[1] % 2 == 0}  # the others are not rounded
    grids = {
        name: IntGrid(bits=4, group=weight_of(block, name).shape[1], symmetric=False, scale_dtype=torch.float32)
        for name in names
    }
    before, weights = run_stage(stage, x), {name: weight_of(block, name).clone() for name in names}
    statistics = input_statistics(stage, block, x, names)
    folded = fold_factors(block, statistics, grids)
    assert torch.allclose(run_stage(stage, x), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))
    changed = [name for name in names if not torch.equal(weight_of(block, name), weights[name])]
    assert changed, "no layer had anything before it to take the factors"
    now = input_statistics(stage, block, x, names)
    for name in changed:
        expected = folded[name].gram_KK
        assert torch.allclose(now[name].gram_KK, expected, rtol=1e-2, atol=1e-3 * float(expected.max()) + 1e-6), name
