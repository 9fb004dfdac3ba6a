"""Weights in fp8: near to the wide ones, the same whatever the batch, and refused where the chip has no fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.linear.linear_fn import Dense
from armillary.engine.runner.linear.linear_formats import Fp8Dense, to_fp8
from armillary.errors import BadInput
from armillary.kernels.fp8.matmul import reference
from armillary.model.transformer import build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import serve
from tests.model.layers.test_attention_forms import small


def test_a_product_is_off_by_the_rounding_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 48, generator=generator), torch.randn(5, 48, generator=generator)
    bias = torch.randn(24, generator=generator)
    wide, narrow = Dense(weight, bias), Fp8Dense(weight, bias, run=reference)
    error = (narrow(x) - wide(x)).norm() / wide(x).norm()
    assert 1e-4 < error < 5e-2
    torch.testing.assert_close(narrow(x[2:3]), narrow(x)[2:3], rtol=1e-5, atol=1e-4)  # scales are of a token alone


def test_answers_do_not_depend_on_the_batch_and_wide_weights_are_let_go() -> None:
    config = small(head_dim=16, hidden=32, ffn=64)
    weights = build(config, dtype=torch.float32, device="cpu", seed=3)

    def rounded(model: Any, *args: Any, **named: Any) -> FastExecutor:
        executor = FastExecutor(model, *args, **named)
        to_fp8(executor.forward, reference, let_go=True)
        return executor

    requests = [ask(f"r{i}", [2 + i, 3, 4], 8, temperature=0.0) for i in range(4)]
    together = serve(config, weights, requests, executor=rounded)
    assert not weights.blocks["0"].attention.qkv.weight.numel()  # type: ignore[union-attr, operator]
    weights = build(config, dtype=torch.float32, device="cpu", seed=3)
    alone = serve(config, weights, requests, executor=rounded, batching="none")
    assert [made.tokens for made in together] == [made.tokens for made in alone]


def test_a_cpu_has_none() -> None:
    model = build(small(), dtype=torch.bfloat16, device="cpu", seed=3)
    with pytest.raises(BadInput, match="compute capability"):
        make_engine(model, None, Serve(weights="fp8", kv_bytes=100_000, max_running=2))


@pytest.mark.gpu
def test_on_a_gpu_the_answers_are_those_of_the_reference() -> None:
    config = small(hidden=256, heads=8, kv_heads=2, head_dim=64, ffn=512, vocab=1000, num_layers=3, context=128)
    model = build(config, dtype=torch.bfloat16, device="cuda", seed=3)
    engine, _ = make_engine(model, None, Serve(weights="fp8", kv_bytes=10_000_000, max_running=8))
    (made,) = engine.generate([ask("a", [2, 3, 4, 5], 12, temperature=0.0)])
    assert made.finish == "length" and len(made.tokens) == 12
    executor: Any = engine.loop.executor
    x = torch.randn(7, 256, device="cuda").bfloat16()
    found = executor.forward.layers[0].up(x)
    right = reference(x, executor.forward.layers[0].up.weight_NK, executor.forward.layers[0].up.scale_N1)
    assert (found - right).float().norm() / right.float().norm() < 2e-2
