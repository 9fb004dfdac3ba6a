"""The model on a GPU says what it says on a CPU."""

from __future__ import annotations

import pytest
import torch

from armillary.engine.request.sampling_params import Sampling
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from tests.model.layers.test_attention_forms import SHAPES, small
from tests.model.plain_generation import generate_tokens
from tests.model.test_agreement import full_logits
from tests.model.test_transformer import PARTS

pytestmark = pytest.mark.gpu
ALL = SHAPES | PARTS


@pytest.mark.parametrize("name", ALL)
def test_logits_equal_the_cpu_s(name: str) -> None:
    tokens_BT = torch.randint(0, 50, (2, 33))
    cpu = build(ALL[name], dtype=torch.float64, device="cpu", seed=1)
    gpu = build(ALL[name], dtype=torch.float64, device="cuda", seed=1)
    positions_BT = torch.arange(33, device="cuda").expand(2, -1)
    ours = gpu.head(gpu(tokens_BT.cuda(), positions_BT, plain)).cpu()
    # weights and sums are in fp64, but cos and sin of the rotary angles are fp32 everywhere
    torch.testing.assert_close(ours, full_logits(cpu, tokens_BT), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_bf16_is_near_fp32(name: str) -> None:
    """Relative to the norm: 2e-2, as bf16 is held to everywhere."""
    tokens_BT = torch.randint(0, 50, (2, 33))
    exact = full_logits(build(ALL[name], dtype=torch.float32, device="cpu", seed=1), tokens_BT)
    half = build(ALL[name], dtype=torch.bfloat16, device="cuda", seed=1)
    positions_BT = torch.arange(33, device="cuda").expand(2, -1)
    made = half.head(half(tokens_BT.cuda(), positions_BT, plain)).float().cpu()
    assert (made - exact).norm() / exact.norm() < 2e-2


def test_greedy_generation_equals_the_cpu_s() -> None:
    made = [
        generate_tokens(
            build(small(), dtype=torch.float64, device=device, seed=3),
            [[1, 2, 3], [4]],
            Sampling(temperature=0, max_tokens=20),
        )
        for device in ("cpu", "cuda")
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("name", [name for name in ALL if not ALL[name].num_moe_layers])
def test_a_forward_can_be_captured_in_a_cuda_graph(name: str) -> None:
    """No host tensor is copied and nothing waits, as serving needs. (Plain dispatch to experts does wait.)"""
    model = build(ALL[name], dtype=torch.float32, device="cuda", seed=1)
    tokens_BT = torch.randint(0, 50, (2, 33), device="cuda")
    positions_BT = torch.arange(33, device="cuda").expand(2, -1).contiguous()
    with torch.no_grad():
        expected = model.head(model(tokens_BT, positions_BT, plain))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = model.head(model(tokens_BT, positions_BT, plain))
        graph.replay()
    torch.testing.assert_close(made, expected)
