"""Rounding of router and experts in bf16, beside that of transformers' own layer over the same weights, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.kernels.moe.moe import GROUPED_MOE, SMALL_MOE, MoEWeights, prefers_small
from armillary.spec.model import MoE
from tests.kernels.agreeing import loaded

pytestmark = pytest.mark.gpu
SHAPE = MoE(num_experts=128, top_k=8, ffn=768)
HIDDEN = 2048


def their_layer() -> Any:
    """Qwen3-30B-A3B's, with random weights."""
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=SHAPE.num_experts,
        num_experts_per_tok=SHAPE.top_k,
        moe_intermediate_size=SHAPE.ffn,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    layer = modeling.Qwen3MoeSparseMoeBlock(config).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        layer.gate.weight.mul_(3)
    return layer


def our_weights(layer: Any) -> MoEWeights:
    experts = layer.experts
    if hasattr(experts, "gate_up_proj"):
        up, down = experts.gate_up_proj.data, experts.down_proj.data
    else:  # releases before 5
        up = torch.stack([torch.cat([one.gate_proj.weight.data, one.up_proj.weight.data]) for one in experts])
        down = torch.stack([one.down_proj.weight.data for one in experts])
    gate, linear = up.chunk(2, dim=1)
    alternating = torch.stack([gate, linear], dim=2).flatten(1, 2).contiguous()
    return MoEWeights(router_EH=layer.gate.weight.data, up_E2FH=alternating, down_EHF=down.contiguous())


def output(layer: Any, x_MH: Tensor) -> Tensor:
    made = layer(x_MH[None])
    return (made[0] if isinstance(made, tuple) else made).reshape(x_MH.shape)


@torch.inference_mode()
def test_error_is_at_most_twice_that_of_transformers() -> None:
    layer = their_layer()
    weights, wide = our_weights(layer), their_layer().float()
    x = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = {}
    for tokens in (1, 2, 8, 64, 512):
        op = SMALL_MOE if prefers_small(tokens, weights, SHAPE) else GROUPED_MOE
        right = output(wide, x[:tokens].float())
        ours = loaded(op)(x[:tokens], weights, SHAPE, "silu", None, None, 1e-6)
        theirs = output(layer, x[:tokens])
        found[tokens] = tuple(float((y.float() - right).norm() / right.norm()) for y in (ours, theirs))
    print({tokens: f"{ours:.2e} (transformers {theirs:.2e})" for tokens, (ours, theirs) in found.items()})
    for tokens, (ours, theirs) in found.items():
        assert ours <= 2 * theirs + 1e-6, f"{tokens} tokens: {ours:.2e} against {theirs:.2e}"
