"""LoRA as the planner sees it: exact counts, states for adapters alone, less to keep where nothing is adapted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.planning.device_model.frameworks import PHYSICS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training.activations import activation_bytes
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.step_time import step_time
from armillary.planning.training.train_case import Lora, lora_of
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout
from armillary.spec.lora import adapter_weights
from armillary.spec.tables.train import TrainJob
from tests.planning.cases import case_of, small_model

ALL = TrainJob(lora_rank=16)
ATTENTION = TrainJob(lora_rank=16, lora_on=("qkv", "out"))
Cli = Callable[..., Any]


def test_gradients_and_moments_are_those_of_the_adapters() -> None:
    case = case_of("llama-3.1-8b", "h200x8", lora=lora_of(case_of("llama-3.1-8b", "h200").model, ALL))
    trained = adapter_weights(case.model, rank=16, on=ALL.lora_on)
    found = memory(case, as_arrays([Layout()]))
    assert found.gradients[0] in (2 * trained, 4 * trained)
    assert found.optimizer[0] == 8 * trained and found.master[0] == 4 * trained
    assert found.weights[0] == pytest.approx(2 * (parameters(case.model).total + trained))
    shared = memory(case, as_arrays([Layout(dp=8, zero=3)]))
    assert shared.weights[0] == pytest.approx(found.weights[0] / 8)


def test_tensor_parallelism_leaves_one_side_of_each_adapter_whole() -> None:
    """Counted from the tensors: A of QKV and gate-up, B of out and down stay; the other sides are cut."""
    model = small_model(num_layers=1)
    lora = lora_of(model, TrainJob(lora_rank=4))
    assert lora is not None
    columns, rows = 3 * 1024 + 2 * 1024, 1024 + 4096
    b_columns, b_rows = (16 + 8 + 8) * 64 + 2 * 4096, 1024 + 1024
    assert lora.parameters == 4 * (columns + rows + b_columns + b_rows)
    assert lora.per_device(2) == 4 * (columns + rows / 2 + b_columns / 2 + b_rows)


def test_what_nothing_reads_is_not_kept() -> None:
    """Against what autograd really keeps: the difference between adapters everywhere and on attention alone."""
    import torch

    from armillary.model.layers.attention_forms import plain
    from armillary.model.transformer import build
    from armillary.training.step.lora import add_lora

    model = small_model(num_layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=96, context=64)

    def saved(job: TrainJob) -> int:
        built = build(model, dtype=torch.float32, device="cpu", seed=0)
        add_lora(built, job)
        found: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            if tensor.shape[:2] == (2, 15) or tensor.shape[0] == 30:  # of tokens, not of weights
                found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.arange(30).view(2, 15)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = built(tokens, tokens, plain)
        assert out.requires_grad
        return sum(found.values())

    cases = [case_of(model, "h200", sequence=15, sequences=2, lora=lora_of(model, job)) for job in (ALL, ATTENTION)]
    layouts = as_arrays([Layout(precision="fp32", micro_batch=2)])
    less = np.subtract(*(float(activation_bytes(case, layouts).no_recompute[0]) for case in cases)) * 30 * 3
    assert saved(ALL) - saved(ATTENTION) == pytest.approx(less, rel=0.1)


def test_adapters_cost_time_but_less_than_training_all() -> None:
    case = case_of("llama-3.1-8b", "h200", sequences=8)
    full, none, thin, thick = (
        step_time(case_of("llama-3.1-8b", "h200", sequences=8, lora=lora), as_arrays([Layout()]))
        for lora in (
            None,
            lora_of(case.model, ATTENTION),
            lora_of(case.model, ALL),
            lora_of(case.model, TrainJob(lora_rank=64)),
        )
    )
    assert none.total[0] < thin.total[0] <= thick.total[0] < full.total[0]
    assert thin.memory[0] > full.memory[0] and thin.gemm[0] < 0.7 * full.gemm[0]


def test_mfu_counts_frozen_weights_as_four() -> None:
    case = case_of("llama-3.1-8b", "h200")
    lora = lora_of(case.model, ALL)
    assert lora is not None
    found = predict(case_of("llama-3.1-8b", "h200", lora=lora), as_arrays([Layout(recompute="full")]))
    whole = predict(case, as_arrays([Layout()]))
    multiplied = parameters(case.model).multiplied
    assert found.model_flops == pytest.approx(whole.model_flops - 2 * multiplied + 6 * lora.parameters)
    again = 2 * (multiplied - case.model.vocab * case.model.hidden + lora.parameters)
    assert found.hfu() / found.mfu[0] > 1 + 0.9 * again / found.model_flops


def test_a_recipe_with_adapters_is_planned_with_them(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "lora.toml"
    path.write_text(
        '[model]\nname = "llama-3.1-8b"\n[hardware]\non = "h200"\n[train]\nlora_rank = 16\n'
        "sequence = 4096\nbatch_tokens = 32_768\n"
    )
    found = cli("plan", str(path), "--json").json
    gauges = found["plan"]["predicted"]
    assert found["fits"] and gauges["memory_optimizer_bytes"] == 8 * 41_943_040
    assert any("41.9 M weights of adapters are trained" in note for note in found["plan"]["notes"])
    full = cli("plan", str(path), "--set", "train.lora_rank=0", "--json").json
    assert full["plan"]["predicted"]["model_flops_per_token"] > 1.3 * gauges["model_flops_per_token"]


def test_dropout_stores_its_result_and_a_mask_in_place_of_the_adapters_inputs() -> None:
    """Inputs of frozen GEMMs are not read again; what dropout wrote is, with one byte of mask per element."""
    model = case_of("llama-3.1-8b", "h100").model
    attention = Lora(parameters=1, on=frozenset({"qkv"}))
    everywhere = Lora(parameters=1)
    layouts = as_arrays([Layout()])

    def stored(lora: Lora, *, dropout: bool) -> float:
        software = replace(PHYSICS, adapter_dropout=dropout, fused_layers=True)
        case = replace(case_of("llama-3.1-8b", "h100", lora=lora), software=software)
        return float(activation_bytes(case, layouts).no_recompute[0])

    hidden, ffn, heads = model.hidden, model.ffn, model.heads * model.head_dim
    assert stored(attention, dropout=True) - stored(attention, dropout=False) == 3 * hidden - 2 * hidden
    dropped, unread = 3 * (hidden + heads + 2 * hidden + ffn), 2 * (2 * hidden + ffn)
    assert stored(everywhere, dropout=True) - stored(everywhere, dropout=False) == dropped - unread
