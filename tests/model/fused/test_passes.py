"""Blocks as two fused passes say what plain blocks say, forward and backward; kernels run in Triton's interpreter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.kernels.gemm.gemm import TunedGemms
from armillary.model.fused import dispatch as fused_block
from armillary.model.fused.passes import FusedOptions
from armillary.model.layers.attention_forms import packed, plain
from armillary.model.low_precision.weights_16bit import Weights16Bit
from armillary.model.transformer import Transformer
from armillary.planning.device_model.frameworks import has_fused_block
from armillary.spec.model import ModelConfig
from tests.emulated_bf16 import any_cpu
from tests.kernels.interpreter import needs_interpreter
from tests.model.layers.test_attention_forms import randomised, small

pytestmark = needs_interpreter

ONE = small(num_layers=1)
FIT = {
    "llama": small(),
    "window": small(attention_pattern=["sliding", "full"], window=5),
    "gemma's norms and gelu": small(num_layers=1, norm_plus_one=True, activation="gelu_tanh"),
    "layer norm with bias, plain mlp": small(
        num_layers=1, norm="layer", norm_bias=True, gated=False, activation="relu2"
    ),
    "interleaved, part of a head": small(num_layers=1, rope={"interleaved": True, "fraction": 0.5}),
    "softcap": small(num_layers=1, attention_softcap=2.0),
}
UNFIT = {
    "qk norm": small(qk_norm="head"),
    "parallel": small(parallel="one_norm"),
    "norms after": small(norm_at="after"),
    "biases": small(mlp_bias=True),
    "learned positions": small(positions="learned", learned_positions=64),
    "output gates": small(attention_gate=True),
    "gated delta-net": small(
        attention_pattern=["gated_delta"],
        gated_delta={"key_heads": 2, "value_heads": 2, "key_dim": 4, "value_dim": 4},
    ),
}


def model_of(config: ModelConfig, fused: FusedOptions | None = None) -> Transformer:
    import armillary.kernels.norm.norm_triton
    import armillary.kernels.pointwise.activation_triton
    import armillary.kernels.pointwise.rope_triton  # noqa: F401

    model = randomised(config).float()
    for block in model.blocks.values():
        block.fused = fused
    return model


def run(model: Transformer, times: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    tokens_BT, positions_BT = torch.randint(0, 50, (2, 9)), torch.arange(9).expand(2, -1)
    documents_BT = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    weigh = torch.randn(2, 9, model.config.hidden)
    for _ in range(times):
        hidden = model(tokens_BT, positions_BT, packed(documents_BT))
        (hidden.float() * weigh).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def far(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12))


PASSES = [
    pytest.param(name, recompute, marks=[] if recompute or name == "llama" else pytest.mark.slow)
    for name in FIT
    for recompute in (False, True)
]


@pytest.mark.parametrize(("name", "recompute"), PASSES)
def test_fused_blocks_agree_with_plain_ones(name: str, recompute: bool) -> None:
    hidden, grads = run(model_of(FIT[name]))
    model = model_of(FIT[name], FusedOptions(recompute=recompute))
    assert all(fused_block.fits(block) for block in model.blocks.values())
    fused_hidden, fused_grads = run(model)
    assert far(fused_hidden, hidden) < 1e-5
    assert fused_grads.keys() == grads.keys()
    assert max(far(fused_grads[key], grads[key]) for key in grads) < 1e-5


@pytest.mark.parametrize("name", [*FIT, *UNFIT])
def test_the_planner_knows_which_blocks_are_fused(name: str) -> None:
    config = (FIT | UNFIT)[name]
    assert has_fused_block(config) == all(fused_block.fits(block) for block in Transformer(config).blocks.values())


@pytest.mark.parametrize("name", UNFIT)
def test_other_blocks_keep_their_layers(name: str) -> None:
    model = model_of(UNFIT[name], FusedOptions())
    assert not any(fused_block.fits(block) for block in model.blocks.values())
    assert far(run(model)[0], run(model_of(UNFIT[name]))[0]) < 1e-6


def test_a_product_may_add_the_residual_itself() -> None:
    hidden, grads = run(model_of(ONE))
    fused_hidden, fused_grads = run(model_of(ONE, FusedOptions(gemms=TunedGemms({}))))
    assert TunedGemms.fused_add and far(fused_hidden, hidden) < 1e-5
    assert max(far(fused_grads[key], grads[key]) for key in grads) < 1e-5


def test_gradients_can_be_summed_where_they_are_made() -> None:
    _, once = run(model_of(ONE))
    _, twice = run(model_of(ONE, FusedOptions(accumulate=True)), times=2)
    assert max(far(twice[key], 2 * once[key]) for key in once) < 1e-5


def test_half_weights_are_as_near_to_fp32_as_autocast_is() -> None:
    hidden, grads = run(model_of(ONE))
    weights_16bit = Weights16Bit(torch.bfloat16)
    with any_cpu():
        half_hidden, half_grads = run(model_of(ONE, FusedOptions(weights_16bit=weights_16bit)))
    with any_cpu(), torch.autocast("cpu", torch.bfloat16):
        cast_hidden, cast_grads = run(model_of(ONE))
    assert half_hidden.dtype == torch.bfloat16 and len(weights_16bit.copies) == 4
    assert far(half_hidden, hidden) < max(2e-2, 2 * far(cast_hidden, hidden))
    for key in grads:
        assert half_grads[key].dtype == torch.float32
        assert far(half_grads[key], grads[key]) < max(2e-2, 2 * far(cast_grads[key], grads[key])), key


def test_a_wrapped_layer_is_noticed_when_it_is_called() -> None:
    model = model_of(ONE, FusedOptions())
    block = model.blocks["0"]
    handle = block.attention.qkv.register_forward_hook(lambda module, args, out: out * 2)
    assert not fused_block.fits(block)
    handle.remove()
    assert fused_block.fits(block)

    class Adapter(nn.Linear):
        pass

    block.mlp.down.__class__ = Adapter
    assert not fused_block.fits(block)


def test_a_frozen_weight_gets_no_gradient() -> None:
    model = model_of(ONE, FusedOptions())
    model.blocks["0"].mlp.up.weight.requires_grad_(False)
    _, grads = run(model)
    assert "blocks.0.mlp.up.weight" not in grads and "blocks.0.mlp.down.weight" in grads


def test_a_fused_block_can_be_recomputed_whole() -> None:
    _, expected = run(model_of(ONE))
    model = model_of(ONE, FusedOptions())
    for block in model.blocks.values():
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    _, grads = run(model)
    assert max(far(grads[key], expected[key]) for key in expected) < 1e-5


def test_16_bit_weights_follow_their_parameter() -> None:
    weights_16bit, weight = Weights16Bit(torch.bfloat16), nn.Parameter(torch.ones(3))
    first = weights_16bit.of(weight)
    assert weights_16bit.of(weight) is first
    with torch.no_grad():
        weight.mul_(2)
    assert weights_16bit.of(weight).tolist() == [2, 2, 2] and weights_16bit.of(weight) is first
    (weights_16bit(weight) * 3).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3, 3, 3]
    duplicate = copy.deepcopy(weight)
    assert weights_16bit.of(duplicate) is not first


def test_plain_attention_on_fused_blocks() -> None:
    tokens_BT, positions_BT = torch.randint(0, 50, (2, 9)), torch.arange(9).expand(2, -1)
    with torch.no_grad():
        made = model_of(ONE, FusedOptions())(tokens_BT, positions_BT, plain)
        assert far(made, model_of(ONE)(tokens_BT, positions_BT, plain)) < 1e-5
