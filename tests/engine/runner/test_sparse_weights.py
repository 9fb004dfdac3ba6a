"""Weights that are 2:4: compressed on a GPU, refused where they or the device are not made for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.runner.linear import sparse_linear
from armillary.engine.runner.linear.linear_fn import Dense
from armillary.errors import BadInput
from armillary.kernels.quantized.sparse import is_pruned, prune
from armillary.model.transformer import Transformer, build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.model.layers.test_attention_forms import small

LINEARS = ("qkv.weight", "out.weight", "up.weight", "down.weight")


def pruned(device: str, **changes: Any) -> Transformer:
    config = small(hidden=256, heads=8, kv_heads=2, head_dim=64, ffn=512, vocab=1000, num_layers=3, context=128)
    model = build(config, dtype=torch.bfloat16, device=device, seed=3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(LINEARS):
                weight.copy_(prune(weight))
    return model


def test_what_counts_as_pruned() -> None:
    weight = torch.randn(8, 16)
    assert is_pruned(prune(weight)) and is_pruned(torch.zeros(4, 8)) and not is_pruned(weight)
    assert not is_pruned(torch.zeros(4, 6)), "no fours"


@pytest.mark.parametrize(("dtype", "why"), [(torch.bfloat16, "GPU"), (torch.float32, "16 bits")])
def test_a_cpu_and_wide_weights_are_refused(dtype: torch.dtype, why: str) -> None:
    with pytest.raises(BadInput, match=rf"2:4 .*{why}.*leave serve.weights=auto"):
        make_engine(pruned("cpu").to(dtype), None, Serve(weights="2:4", kv_bytes=1_000_000, max_running=2))


def test_layers_that_are_not_pruned_or_do_not_agree_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = prune(torch.randn(64, 128)).bfloat16()
    monkeypatch.setattr(sparse_linear, "refuses", lambda weight: None)
    monkeypatch.setattr(sparse_linear, "SparseLinear", lambda weight, bias: lambda x: x @ weight.t())
    assert not isinstance(sparse_linear.sparse_linear(weight), Dense)
    assert isinstance(sparse_linear.sparse_linear(torch.randn(64, 128).bfloat16()), Dense)
    monkeypatch.setattr(sparse_linear, "SparseLinear", lambda weight, bias: lambda x: x @ weight.t() * 1.1)
    assert isinstance(sparse_linear.sparse_linear(weight), Dense)


@pytest.mark.gpu
def test_on_a_gpu_layers_are_compressed_and_agree() -> None:
    serve = {"kv_bytes": 10_000_000, "max_running": 8}
    asked = ask("a", list(range(2, 90)), 1, temperature=0.0)
    made = {}
    for weights in ("auto", "2:4"):
        engine, _ = make_engine(pruned("cuda"), None, Serve(weights=weights, **serve), owns_model=True)  # type: ignore[arg-type]
        executor: Any = engine.loop.executor
        x = torch.randn(40, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
        made[weights] = executor.forward.layers[0].up(x)
        assert engine.generate([asked])[0].finish == "length"
    assert type(executor.forward.layers[0].up).__name__ == "SparseLinear"
    assert (made["2:4"] - made["auto"]).float().norm() < 2e-2 * made["auto"].float().norm()
