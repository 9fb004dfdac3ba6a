"""Products in the form a CPU is quickest with: near to the plain ones, the same whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn
from armillary.engine.runner.linear.linear_formats import Int8Dense, PackedDense, int8_linear, packs
from armillary.model.transformer import build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.model.layers.test_attention_forms import small

needs_bf16 = pytest.mark.skipif(not packs(torch.empty(0, dtype=torch.bfloat16)), reason="a CPU without bf16 products")


@pytest.mark.parametrize(
    ("make", "most"),
    [
        pytest.param(PackedDense, 5e-3, marks=needs_bf16),
        (Int8Dense.rounded, 3e-2),
        (int8_linear, 3e-2),
        pytest.param(partial(PackedDense, plain=True), 5e-3, marks=needs_bf16),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_off_by_the_rounding_alone(make: Callable[..., LinearFn], most: float, biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 48, generator=generator), torch.randn(37, 48, generator=generator)
    bias = torch.randn(24, generator=generator) if biased else None
    narrow = [None if part is None else part.bfloat16() for part in (weight, bias)]
    right = Dense(weight, bias)(x)
    for rows in (slice(0, 1), slice(0, 4), slice(None)):
        found = make(*narrow)(x[rows].bfloat16())
        assert found.dtype == torch.bfloat16
        assert (found.float() - right[rows]).norm() / right[rows].norm() < most


@needs_bf16
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_in_bf16_is_as_near_as_the_model_and_lets_weights_go(tied: bool) -> None:
    config = small(tied=tied, logit_softcap=20.0, logit_scale=0.5)
    wide, model = (build(config, dtype=dtype, device="cpu", seed=3) for dtype in (torch.float32, torch.bfloat16))
    wish = {"temperature": 0.0, "logprobs": 1, "prompt_logprobs": 0}
    serve = Serve(kv_bytes=1_000_000, max_running=2, block_tokens=4)

    def prompt_logprobs(made: object, owns_model: bool) -> torch.Tensor:
        engine, _ = make_engine(made, None, serve, owns_model=owns_model)  # type: ignore[arg-type]
        (answer,) = engine.generate([ask("a", range(2, 30), 4, **wish)])
        return torch.tensor([one.value for one in answer.prompt_logprobs])

    right = prompt_logprobs(wide, False)
    found, again = prompt_logprobs(model, False), prompt_logprobs(model, True)
    assert torch.equal(found, again) and (found - right).abs().max() < 0.05
    assert not model.blocks["0"].attention.qkv.weight.numel()  # type: ignore[union-attr, operator]
