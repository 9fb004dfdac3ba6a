"""Stages of layers and groups of experts give the tokens of one rank, and hold their part of the weights only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.engine.cache.layer_groups import stage_layers
from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.rank_layout import Experts, check_division
from armillary.errors import BadInput, BadLayout
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.quantizing.quantize_model import quantize
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.world import join_world
from armillary.spec.hf.config import from_hf
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from tests.engine.runner.test_packed_ranks import written
from tests.model.families import random_config, random_model
from tests.model.layers.test_attention_forms import small
from tests.ranks import Ranks

TABLE = Serve(block_tokens=4, kv_bytes=400_000, max_running=4, max_model_len=48, dtype="fp32")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
DRAWN = SamplingParams(max_tokens=6, temperature=1.0, seed=3, frequency_penalty=0.4, logprobs=2)
PROMPTS = [[2 + i, 3, 4, 5] * (i + 1) for i in range(3)]
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn": 16, "shared_ffn": 16}
FAMILIES = ("llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3")
"""dense; tied with windows; experts; experts with biases, windows and sinks; latent attention with a shared expert"""
SPARSE = ("mixtral", "gpt_oss", "deepseek_v3")


LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
}
LAYOUTS = ({"tp": 4, "ep": 4}, {"tp": 4, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2})


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """A random model that can be divided in every way."""
    changes |= LATENT if family == "deepseek_v3" else {}
    seed = next(seed for seed in range(300) if divides(family, seed, changes))
    random_model(family, seed, **changes).save_pretrained(folder / family)
    return folder / family


def divides(family: str, seed: int, changes: dict[str, Any]) -> bool:
    config = from_hf(random_config(family, seed, **changes).to_dict(), name=family)
    try:
        for layout in LAYOUTS:
            check_division(config, **(layout if config.moe is not None else {**layout, "ep": 1}))
    except BadLayout:
        return False
    return True


def answers(where: str, layout: dict[str, int]) -> list[Any]:
    """[tokens of each prompt], and the bytes of the weights, on each rank."""
    with join_world("cpu") as world, LLM(where, replace(TABLE, **layout), world=world) as llm:
        executor: Any = llm.engine.loop.executor
        size = sum(parameter.nbytes for parameter in executor.executor.forward.model.parameters())
        return [size, [[llm.follow()]] if world.rank else generated(llm)]


def generated(llm: LLM) -> list[Any]:
    found = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, DRAWN)
    return [(made.error, made.tokens, [round(each.value, 4) for each in made.logprobs]) for made in found]


def all_answers(folders: list[str], layouts: list[dict[str, int]]) -> list[list[Any]]:
    return [answers(folder, layout) for folder, layout in zip(folders, layouts, strict=True)]


def check(ranks: Ranks, folders: dict[str, Path], layouts: dict[str, dict[str, int]], size: int) -> list[list[Any]]:
    found = ranks.run(size, all_answers, [str(folders[name]) for name in layouts], list(layouts.values()))
    for at, name in enumerate(layouts):
        alone = generated(LLM(folders[name], TABLE, device="cpu"))
        assert found[0][at][1] == alone, name
    return found


def test_two_ranks_give_the_tokens_of_one(ranks: Ranks, tmp_path: Path) -> None:
    layouts = {"gemma2": {"pp": 2}, "gpt_oss": {"ep": 2}}
    folders = {name: saved(tmp_path, name) for name in layouts}
    first, second = check(ranks, folders, layouts, 2)
    model = load_model(folders["gemma2"], dtype="fp32")
    whole, head = (sum(each.nbytes for each in part.parameters()) for part in (model, model.embedding))
    assert first[0][0] + second[0][0] == whole + head  # each stage has its layers, and both the tied matrix


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"ep": 2}], ids=str)
def test_two_ranks_of_every_kind(ranks: Ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    names = SPARSE if "ep" in layout else FAMILIES
    check(ranks, {name: saved(tmp_path, name) for name in names}, dict.fromkeys(names, layout), 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "ep": 2}, {"ep": 4}, {"ep": 2}], ids=str)
def test_four_ranks_of_every_kind(ranks: Ranks, tmp_path: Path, layout: dict[str, int]) -> None:
    """tp is what is left: 2 × 2, or 4."""
    names = SPARSE if "ep" in layout else FAMILIES
    check(ranks, {name: saved(tmp_path, name) for name in names}, dict.fromkeys(names, layout), 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp4"])
def test_quantized_stages(ranks: Ranks, tmp_path: Path, name: str) -> None:
    folders = {name: written(tmp_path, name)}
    for size in (2, 4):
        check(ranks, folders, {name: {"pp": 2}}, size)


@pytest.mark.slow
def test_quantized_experts_and_stages(ranks: Ranks, tmp_path: Path) -> None:
    """Experts stay packed; each rank has some of them."""
    plain = saved(tmp_path, "mixtral", tie_word_embeddings=False)
    source = resolve_model(str(plain), Home.at(tmp_path), need_weights=True)
    quantize(source, tmp_path / "packed", "fp8")
    folders = {"mixtral": tmp_path / "packed"}
    assert isinstance(load_model(folders["mixtral"], packed=True).blocks["0"].mlp.experts, PackedExperts)
    for layout in ({"ep": 2}, {"pp": 2}):
        check(ranks, folders, {"mixtral": layout}, 2)


def test_layers_are_divided_evenly() -> None:
    assert stage_layers(5, 2) == [range(0, 2), range(2, 5)]
    assert stage_layers(3, 1) == [range(3)]


def test_experts_are_divided_into_groups() -> None:
    assert [Experts(parts=2, part=part).own(8) for part in range(2)] == [range(4), range(4, 8)]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ({"tp": 1, "pp": 3}, "serve.pp=3 stages need as many layers and small has 2; lower it"),
        ({"tp": 2, "ep": 2}, "small has no experts for serve.ep=2; leave it 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(layout: dict[str, int], sentence: str) -> None:
    with pytest.raises(BadLayout) as refused:
        check_division(small(name="small"), **layout)
    assert str(refused.value) == sentence


def test_groups_of_experts_divide_ranks_and_experts() -> None:
    with pytest.raises(BadLayout, match=r"serve\.ep=3 does not divide 4 ranks, 4 experts .* try --set serve.ep=2 or 4"):
        check_division(small(name="small", kv_heads=4, moe=EXPERTS), tp=4, ep=3)


def test_stages_need_ranks(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"serve\.pp=2 and serve\.ep=1 need several ranks"):
        LLM(saved(tmp_path, "llama"), replace(TABLE, pp=2), device="cpu")
