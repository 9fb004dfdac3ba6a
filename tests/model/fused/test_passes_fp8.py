"""Blocks with fp8 products: fused passes say what the layers say one by one; kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from armillary.model.fused import dispatch as fused_block
from armillary.model.fused.passes import FusedOptions
from armillary.model.layers.attention_forms import plain
from armillary.model.low_precision.fp8 import Fp8Gemms, Fp8Linear, Fp8Weights, Multiply, use_fp8
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.transformer import Transformer
from armillary.spec.model import ModelConfig
from tests.kernels.interpreter import needs_interpreter
from tests.model.fused.test_passes import far, model_of, run
from tests.model.layers.test_attention_forms import small

FIT = {
    "llama": small(num_layers=1),
    "layer norm with bias, plain mlp": small(
        num_layers=1, norm="layer", norm_bias=True, gated=False, activation="relu2"
    ),
    "gemma's norms and gelu": small(num_layers=1, norm_plus_one=True, activation="gelu_tanh"),
}


def in_fp8(config: ModelConfig, scaling: str, fused: FusedOptions | None = None) -> Transformer:
    model = model_of(config, fused)
    assert use_fp8(model, scaling=scaling) == ["attention.qkv", "attention.out", "mlp.up", "mlp.down"]
    return model


def fused_fp8(scaling: str, **how: object) -> FusedOptions:
    return FusedOptions(fp8=Fp8Gemms(scaling=scaling, weights=Fp8Weights(scaling)), **how)  # type: ignore[arg-type]


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "scaling", "recompute"),
    [
        ("llama", "token", False),
        ("llama", "tensor", True),
        ("gemma's norms and gelu", "token", True),
        ("layer norm with bias, plain mlp", "row", True),
    ],
)
def test_fused_passes_agree_with_layers(name: str, scaling: str, recompute: bool) -> None:
    hidden, grads = run(in_fp8(FIT[name], scaling))
    model = in_fp8(FIT[name], scaling, fused_fp8(scaling, recompute=recompute))
    assert all(fused_block.fits(block) for block in model.blocks.values())
    fused_hidden, fused_grads = run(model)
    # numbers at a tie are rounded one way or the other: a few of them differ by a step of fp8
    assert far(fused_hidden, hidden) < 1e-2 and fused_grads.keys() == grads.keys()
    assert max(far(fused_grads[key], grads[key]) for key in grads) < 3e-2


@needs_interpreter
def test_fp8_is_near_fp32_and_not_it() -> None:
    hidden, grads = run(model_of(small()))
    narrow_hidden, narrow_grads = run(in_fp8(small(), "token", fused_fp8("token")))
    assert 1e-3 < far(narrow_hidden, hidden) < 0.2
    last = [key for key in grads if key.startswith("blocks.1.")]  # gradients of earlier layers add up their errors
    assert last and 1e-3 < max(far(narrow_grads[key], grads[key]) for key in last) < 0.6


@needs_interpreter
def test_gradients_can_be_summed_where_they_are_made() -> None:
    one = small(num_layers=1)
    _, once = run(in_fp8(one, "token", fused_fp8("token")))
    _, twice = run(in_fp8(one, "token", fused_fp8("token", accumulate=True)), times=2)
    assert max(far(twice[key], 2 * once[key]) for key in once) < 1e-5


@needs_interpreter
def test_weights_are_rounded_again_only_when_they_changed() -> None:
    weights, weight = Fp8Weights("row"), nn.Parameter(torch.randn(32, 48))
    first = weights.rows(weight)
    assert weights.transposed(weight).values.shape == (48, 32) and weights.rows(weight) is first
    with torch.no_grad():
        weight.mul_(2.0)
    torch.testing.assert_close(weights.rows(weight).scale, 2 * first.scale)
    gathered = nn.Parameter(torch.randn(16, 16).bfloat16())
    weights.rows(gathered)
    assert list(weights.operands) == [weight] and weights.nbytes == 2 * 32 * 48 + 4 * (32 + 48)


@needs_interpreter
def test_a_half_stream_keeps_weights_in_fp32() -> None:
    weights_16bit = Weights16Bit(torch.bfloat16)
    hidden, grads = run(in_fp8(small(num_layers=1), "tensor", fused_fp8("tensor", weights_16bit=weights_16bit)))
    assert hidden.dtype == torch.bfloat16 and not weights_16bit.copies
    assert all(grad.dtype == torch.float32 for grad in grads.values())


def test_layers_with_a_bias_or_something_else_stay_as_they_are() -> None:
    model = Transformer(small(mlp_bias=True))
    block = model.blocks["0"]
    block.attention.out = nn.Sequential(block.attention.out)  # type: ignore[union-attr, assignment]
    made = use_fp8(model, scaling="row", exclude=["attention.qkv"])
    assert set(made) == {"attention.out", "mlp.up", "mlp.down"}  # the first of the other block
    assert type(block.attention.out) is nn.Sequential and type(block.attention.qkv) is nn.Linear  # type: ignore[union-attr]
    up: Fp8Linear = block.mlp.up  # type: ignore[union-attr, assignment]
    x: Tensor = torch.randn(2, 3, up.in_features)
    nn.init.constant_(up.weight, 0.0)
    nn.init.constant_(up.bias, 0.5)
    assert torch.equal(up(x), torch.full((2, 3, up.out_features), 0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("scaling", ["tensor", "row", "token"])
def test_on_a_gpu(scaling: str, recompute: bool) -> None:
    """Fused passes beside layers by themselves, and both beside fp32: with the library's products, sums in fp32 too."""
    from armillary.kernels.fp8.linear_triton import library_linear

    config = small(hidden=256, heads=4, head_dim=64, ffn=384, num_layers=2)
    torch.manual_seed(3)
    tokens_BT, positions_BT = torch.randint(0, 50, (2, 77)).cuda(), torch.arange(77).expand(2, -1).cuda()
    weigh = torch.randn(2, 77, 256).cuda()

    def run(multiply: Multiply | None, fused: FusedOptions | None = None, times: int = 1) -> dict[str, Tensor]:
        model = model_of(config, fused).cuda()
        if multiply is not None:
            use_fp8(model, scaling=scaling, multiply=multiply)
        for _ in range(times):
            with torch.autocast("cuda", torch.bfloat16, enabled=multiply is not None):
                hidden = model(tokens_BT, positions_BT, plain)
            (hidden.float() * weigh).sum().backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"hidden": hidden.detach()} | grads

    def half(**how: Any) -> FusedOptions:
        return fused_fp8(scaling, weights_16bit=Weights16Bit(torch.bfloat16), recompute=recompute, **how)

    right, layers = run(None), run(library_linear)
    for found, times in ((run(library_linear, half()), 1), (run(library_linear, half(accumulate=True), 2), 2)):
        assert found.keys() == right.keys()
        for name in right:
            share = 1 if name == "hidden" or times == 1 else times
            off = far(found[name] / share, right[name])
            assert off < max(0.05, 1.5 * far(layers[name], right[name])), (name, times, off)
