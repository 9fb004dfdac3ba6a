"""Two ranks give the tokens of one, for models of every kind, KV heads fewer than ranks among them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from armillary.engine.cache.kv_capacity import plan_kv
from armillary.engine.engine import Engine
from armillary.engine.llm import LLM
from armillary.engine.output.output_text import OutputProcessor
from armillary.engine.runner.engine_kernels import REFERENCE
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.latent_layer import attend_latents
from armillary.engine.runner.layer import Layer, make_layer
from armillary.engine.runner.rank_layout import Experts, check_division
from armillary.engine.runner.tensor_parallel import (
    Leader,
    _shard_rest,
    _shard_weights,
    follow,
    local_kv_heads,
    shard,
)
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import settings_for
from armillary.engine.scheduler.step_loop import Loop
from armillary.errors import BadInput, BadLayout
from armillary.kernels.latent.latent_forms import LatentBatch
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.collectives import Group
from armillary.parallel.world import join_world
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.output.test_output_text import Letters
from tests.engine.runner.test_families import TOKENS, models, their_answer
from tests.engine.runner.test_reference_executor import MODELS
from tests.engine.test_llm import GREEDY, TEXTS, folder  # noqa: F401
from tests.model.families import FAMILIES
from tests.model.layers.test_attention_forms import latent, small
from tests.ranks import Ranks

TABLE = Serve(block_tokens=4, kv_bytes=100_000, max_running=4)

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 18}

CASES = MODELS | {
    "norm over heads": small(qk_norm="all"),
    "norm over heads, one KV head": small(qk_norm="all", kv_heads=1),
    "experts": small(moe={"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 16}),
    "a dense layer before experts": small(ffn=46, dense_first=1, moe=EXPERTS),
}


def requests() -> list[Any]:
    made = [ask(f"r{i}", [2 + i, 3, 4, 5] * (i + 1), 8, temperature=0.0) for i in range(4)]
    return [*made, ask("drawn", [5, 6], 8, temperature=1.0, seed=3, n=2, logprobs=2, frequency_penalty=0.4)]


def answers(name: str, size: int, rank: int) -> list[list[int]]:
    return served(build(CASES[name], dtype=torch.float32, device="cpu", seed=3), requests(), size, rank)


def served(weights: Transformer, wanted: list[Any], size: int, rank: int) -> list[list[int]]:
    config = weights.config
    table = Serve(block_tokens=4, max_tokens_per_step=8, max_running=4)
    plan = plan_kv(config, table, 1_000_000, dtype="fp32")
    plan = replace(plan, budget_bytes=plan.block_bytes * (30 * len(plan.groups) + 1))
    scheduler = Scheduler(settings_for(config, table), plan.make())
    executor = FastExecutor(
        weights,
        scheduler.cache,
        max_running=4,
        max_model_len=config.context,
        kv_heads=local_kv_heads(config, size),
        ranks=size,
    )
    if size == 1:
        return run(scheduler, executor, wanted)
    group = Group(name=dist.group.WORLD.group_name, size=size, rank=rank)  # type: ignore[union-attr]
    shard(executor, config, group)
    if rank:
        return [[follow(executor)]]
    leader = Leader(executor)
    found = run(scheduler, leader, wanted)
    leader.stop()
    return found


def run(scheduler: Scheduler, executor: Any, wanted: list[Any]) -> list[list[int]]:
    engine = Engine(Loop(scheduler, executor), OutputProcessor(scheduler, Letters))
    return [made.tokens for made in engine.generate(wanted)]


def all_answers(size: int, names: list[str]) -> dict[str, list[list[int]]]:
    return {name: answers(name, size, dist.get_rank()) for name in names}


FEW = ["multi-query", "norm over heads", "a dense layer before experts", "gated delta-net"]


@pytest.mark.parametrize("names", [FEW, pytest.param(list(CASES), marks=pytest.mark.slow)], ids=["few", "all"])
def test_two_ranks_give_the_tokens_of_one(ranks: Ranks, names: list[str]) -> None:
    first, second = ranks.run(2, all_answers, 2, names)
    assert set(FEW) <= set(CASES)
    for name in names:
        assert first[name] == answers(name, 1, 0), name
        assert second[name][0][0] > 5


@pytest.mark.parametrize("q_rank", [10, None])
@torch.no_grad()
def test_shards_of_latent_attention_add_up(q_rank: int | None) -> None:
    """In one process: the outputs of both ranks' heads, summed, are those of all heads."""
    config = latent(q_rank=q_rank, qkv_bias=True, out_bias=True)
    block = build(config, dtype=torch.float64, device="cpu", seed=3).blocks["0"]
    for parameter in block.attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, x = 9, torch.randn(9, config.hidden, dtype=torch.float64)
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.1])
    batch = PagedBatch(
        tables_BP=torch.tensor([[2, 0, 1]], dtype=torch.int32),
        starts=torch.tensor([0, tokens], dtype=torch.int32),
        lengths_B=torch.tensor([tokens], dtype=torch.int32),
        max_query=tokens,
    )

    def output(layer: Layer) -> torch.Tensor:
        assert layer.latent is not None
        cache = torch.zeros(3, 4, 20, dtype=torch.float64)
        slots = batch.tables_BP[0].repeat_interleave(4)[:tokens] * 4 + torch.arange(tokens) % 4
        step = LatentBatch(absorbed=batch)
        cos_sin = (angles.cos(), angles.sin())
        return layer.out(attend_latents(layer.latent, layer.qkv(x), cache, step, slots, cos_sin, REFERENCE))

    parts = []
    for rank in range(2):
        layer, group = make_layer(block, 0, 0), Group(name="", size=2, rank=rank)
        _shard_weights(layer, config, group, Experts(tp=2))
        _shard_rest(layer, config, group)
        parts.append(output(layer))
    torch.testing.assert_close(sum(parts), output(make_layer(block, 0, 0)), rtol=1e-10, atol=1e-10)


PROMPTS = (tuple(3 + i % 5 for i in range(11)), tuple(3 + i % 5 for i in range(19)), (7,))


def family_answers(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    wanted = [ask(f"r{i}", prompt, TOKENS, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    return {name: served(load_model(Path(where)), wanted, 2, dist.get_rank()) for name, where in folders.items()}


@pytest.mark.parametrize(
    "families", [["llama", "mixtral"], pytest.param(list(FAMILIES), marks=pytest.mark.slow)], ids=["few", "every"]
)
def test_two_ranks_give_the_tokens_of_transformers_for_every_family(
    ranks: Ranks, tmp_path: Path, families: list[str]
) -> None:
    seeds = {family: next(seed for seed in range(20) if can_be_cut(family, seed)) for family in families}
    for family, seed in seeds.items():
        models(family, seed)[0].save_pretrained(tmp_path / family)
    first, _ = ranks.run(2, family_answers, {family: str(tmp_path / family) for family in families})
    for family, seed in seeds.items():
        assert first[family] == [their_answer(family, seed, prompt) for prompt in PROMPTS], family


def can_be_cut(family: str, seed: int) -> bool:
    try:
        check_division(models(family, seed)[1].config, tp=2)
    except BadLayout:
        return False
    return True


def together(where: str) -> list[list[int]]:
    """The Python object on each rank, as under torchrun."""
    with join_world("cpu") as world, LLM(where, TABLE, world=world) as llm:
        if world.rank:
            return [[llm.follow()]]
        return [made.tokens for made in llm.generate(TEXTS, GREEDY)]


def test_the_python_object_over_ranks(ranks: Ranks, folder: Path) -> None:  # noqa: F811
    first, second = ranks.run(2, together, str(folder))
    alone = LLM(folder, TABLE, device="cpu")
    assert first == [made.tokens for made in alone.generate(TEXTS, GREEDY)] and second[0][0] > 5
    with pytest.raises(BadInput, match="call generate"):
        alone.follow()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (dict(heads=6, kv_heads=3), "tp=2 does not divide 3 KV heads of small; try --tp 1 or 3"),
        (dict(ffn=47), "tp=2 does not divide the ffn of 47 of small; try --tp 1"),
        (
            dict(ffn=47, dense_first=1, moe=EXPERTS),
            "tp=2 does not divide the ffn of 47 in the dense layers of small; try --tp 1",
        ),
        (
            dict(ffn=48, dense_first=1, moe=EXPERTS | {"ffn": 15}),
            "tp=2 does not divide the expert ffn of 15 of small; try --tp 1",
        ),
        (
            dict(moe=EXPERTS | {"shared_ffn": 17}),
            "tp=2 does not divide the shared-expert ffn of 17 of small; try --tp 1",
        ),
        (
            dict(qk_norm="all", norm="layer"),
            "small norms all heads together by their mean, which is not sharded here; use --tp 1",
        ),
    ],
)
def test_what_cannot_be_cut_evenly_is_refused(fields: dict[str, Any], sentence: str) -> None:
    """Rows would be left out of a layer without a word."""
    with pytest.raises(BadLayout) as refused:
        check_division(small(**fields | {"name": "small"}), tp=2)
    assert str(refused.value) == sentence


def test_the_ffn_of_dense_layers_that_a_model_does_not_have_is_not_looked_at() -> None:
    check_division(small(ffn=47, moe=EXPERTS), tp=2)
