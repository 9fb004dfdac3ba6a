"""The module: stages make up the whole, weights are a function of seed and name, shapes are what the spec says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from armillary.errors import BadModel
from armillary.model.layers.attention_forms import plain
from armillary.model.supported_shapes import unbuildable
from armillary.model.transformer import Transformer, build
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from tests.model.layers.test_attention_forms import SHAPES, randomised, small

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(catalogue.models()))
def test_predicted_parameters_equal_the_module(name: str) -> None:
    config = catalogue.model(name).config
    if unbuildable(config):
        with torch.device("meta"), pytest.raises(BadModel, match="cannot be built"):
            Transformer(config)
        return
    with torch.device("meta"):
        module = Transformer(config)
    assert sum(p.numel() for p in module.parameters()) == parameters(config).total


def test_most_of_the_catalogue_can_be_built() -> None:
    configs = [entry.config for entry in catalogue.models().values()]
    assert sum(unbuildable(config) is None for config in configs) >= 0.8 * len(configs)


@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_stages_make_up_the_whole(tied: bool) -> None:
    config = small(num_layers=5, tied=tied, attention_pattern=["sliding", "full"], window=4)
    whole = build(config, dtype=torch.float64, device="cpu", seed=7)
    first = Transformer(config, layers=range(0, 2), last=False).double()
    middle = Transformer(config, layers=range(2, 3), first=False, last=False).double()
    last = Transformer(config, layers=range(3, 5), first=False).double()
    for stage in (first, middle, last):
        stage.initialize(seed=7)
    tokens_BT, positions_BT = torch.randint(0, 50, (2, 9)), torch.arange(9).expand(2, -1)
    hidden = tokens_BT
    for stage in (first, middle, last):
        hidden = stage(hidden, positions_BT, plain)
    expected = whole(tokens_BT, positions_BT, plain)
    assert torch.equal(hidden, expected)
    assert torch.equal(last.head(hidden), whole.head(expected))


def test_initial_weights_depend_on_the_seed_and_the_name_only() -> None:
    one, again, other = (build(small(), dtype=torch.float32, device="cpu", seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    deeper = build(small(num_layers=3), dtype=torch.float32, device="cpu", seed=1)
    assert torch.equal(one.blocks["0"].attention.qkv.weight, deeper.blocks["0"].attention.qkv.weight)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = randomised(SHAPES[name])
    tokens_BT, positions_BT = torch.randint(0, 50, (2, 9)), torch.arange(9).expand(2, -1)
    model.head(model(tokens_BT, positions_BT, plain)).square().mean().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert idle == []


PARTS = {
    "learned positions": small(
        positions="learned", learned_positions=64, norm="layer", norm_bias=True, gated=False, activation="gelu"
    ),
    "parallel, one norm": small(parallel="one_norm", norm="layer", norm_bias=True),
    "parallel, two norms": small(parallel="two_norms"),
    "gemma-like": small(norm_at="both", norm_plus_one=True, embedding_scale=5.6, logit_softcap=10.0, tied=True),
    "olmo-like": small(norm_at="after", qk_norm="all"),
    "shared expert": small(moe={"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 24, "shared_gate": True}),
    "gpt-oss-like": small(
        activation="swiglu_clamped",
        sinks=True,
        qkv_bias=True,
        out_bias=True,
        moe={
            "num_experts": 4,
            "top_k": 2,
            "ffn": 16,
            "score": "softmax_topk",
            "router_bias": True,
            "expert_bias": True,
        },
    ),
    "sigmoid groups": small(
        moe={
            "num_experts": 8,
            "top_k": 2,
            "ffn": 16,
            "score": "sigmoid",
            "selection_bias": True,
            "groups": 4,
            "top_groups": 2,
            "routed_scale": 2.5,
        },
    ),
    "nope layers": small(num_layers=4, nope_every=2),
    "scales": small(residual_scale=0.3, attention_scale=0.1, logit_scale=0.5, qkv_clip=1.0),
}


@pytest.mark.parametrize("name", PARTS)
def test_every_part_counts_exactly_and_is_causal(name: str) -> None:
    config = PARTS[name]
    model = randomised(config)
    assert sum(p.numel() for p in model.parameters()) == parameters(config).total
    tokens_BT, positions_BT = torch.randint(0, 50, (1, 9)), torch.arange(9)[None]
    before = model(tokens_BT, positions_BT, plain)
    changed = tokens_BT.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 50
    after = model(changed, positions_BT, plain)
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[:, 6:], before[:, 6:])


COMPILED = """
import torch
from torch._dynamo.utils import counters
from armillary.model.layers.attention_forms import plain
from tests.model.contiguous_cache import ContiguousCache
from armillary.model.transformer import build
from tests.model.layers.test_attention_forms import small

config = small(num_layers=12)
model = build(config, dtype=torch.float32, device="cpu", seed=1)
cache = ContiguousCache(config, batch=1, length=16, dtype=torch.float32, device="cpu")
positions_BT = torch.arange(9)[None]
with torch.no_grad():
    expected = model(positions_BT, positions_BT, plain)
    for block in model.blocks.values():
        block.compile(backend="eager")
    made = model(positions_BT, positions_BT, cache.at(positions_BT, upto=9))
torch.testing.assert_close(made, expected)
assert counters["stats"]["unique_graphs"] <= 2, counters["stats"]
"""


@pytest.mark.slow
def test_compiled_blocks_of_one_kind_share_a_graph_whatever_attend_does_with_the_layer() -> None:
    """A cache is indexed by layer; with the index baked in, the compiler would give up after eight layers.
    In a process of its own: once torch's compiler has run, its profiler records no Python stacks."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_tables_survive_casts_and_moves() -> None:
    """Frequencies, slopes and the selection bias stay fp32 and right; weights take the dtype."""
    moe = {"num_experts": 8, "top_k": 2, "ffn": 16, "score": "sigmoid", "selection_bias": True}
    for config in (small(rope={"theta": 5e5, "local_theta": 1e4}), small(positions="alibi"), small(moe=moe)):
        fresh = Transformer(config)
        cast = build(config, dtype=torch.bfloat16, device="cpu").to(torch.float16)
        assert {p.dtype for p in cast.parameters()} == {torch.float16}
        for (name, ours), (_, theirs) in zip(cast.named_buffers(), fresh.named_buffers(), strict=True):
            assert ours.dtype == torch.float32 and torch.equal(ours, theirs), name


def test_a_settled_rope_length_gives_what_the_length_would_give() -> None:
    rope = {
        "scaling": "longrope",
        "factor": 4.0,
        "original_context": 16,
        "short_factors": [1.0] * 4,
        "long_factors": [2.0] * 4,
    }
    config = small(rope=rope)
    free, settled = (build(config, dtype=torch.float32, device="cpu", seed=1, rope_length=n) for n in (None, 64))
    for length, equal in ((10, False), (30, True)):
        tokens_BT, positions_BT = torch.ones(1, length, dtype=torch.long), torch.arange(length)[None]
        same = torch.equal(free(tokens_BT, positions_BT, plain), settled(tokens_BT, positions_BT, plain))
        assert same == equal, "up to the original context the settled model uses the long factors already"
