"""LoRA adapters: requests for different ones share steps, and each gets the tokens of the merged model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput, BadRecipe
from armillary.model.lora import adapters
from armillary.parallel.world import join_world
from armillary.spec.tables.serve import Serve
from armillary.training.step.lora import save_adapter
from tests.engine.runner.test_tensor_parallel import can_be_cut
from tests.ranks import Ranks
from tests.training.step.test_lora import ALL, adapted, save_merged

TABLE = Serve(block_tokens=4, kv_bytes=200_000, max_running=8, max_adapters=3, adapter_rank=4, max_tokens_per_step=24)
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)  # a merged folder names no end token
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [5, 6, 7, 8, 9, 10, 11, 12, 14]]


def make_adapters(where: Path, family: str, count: int = 2, on: tuple[str, ...] = ALL, *, seed: int = 3) -> list[Path]:
    """`base`, and for each number an adapter folder and the merged model."""
    model, job = adapted(where, family, seed=seed, lora_on=on)
    folders = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for _, module in adapters(model):
            module.lora_a.data.normal_(0, 0.4, generator=generator)
            module.lora_b.data.normal_(0, 0.4, generator=generator)
        base, folder = str(where / "base"), where / f"adapter{number}"
        folders.append(save_adapter(model.state_dict(), model.config, job, folder, base=base))
        save_merged(model, job, where / f"merged{number}")
    return folders


def merged_answers(where: Path, name: str) -> list[list[int]]:
    return [made.tokens for made in LLM(where / name, TABLE, device="cpu", dtype="fp32").generate(PROMPTS, GREEDY)]


def mixed(llm: LLM) -> dict[str, list[list[int]]]:
    """Every prompt for every adapter and the base, all at once."""
    names = ["", "a", "b"]
    made = llm.generate([p for p in PROMPTS for _ in names], GREEDY, adapter=names * len(PROMPTS))
    return {name: [each.tokens for each in made[i :: len(names)]] for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("family", "on"),
    [
        ("llama", ALL),
        ("qwen2", ("q", "v", "gate")),
        ("phi3", ALL),
        ("mixtral", ("qkv", "out")),
        pytest.param("gemma2", ALL, marks=pytest.mark.slow),
        pytest.param("olmo2", ("k", "up", "out"), marks=pytest.mark.slow),
        pytest.param("gpt_oss", ("qkv", "out"), marks=pytest.mark.slow),
    ],
)
def test_each_request_gets_the_tokens_of_its_merged_model(tmp_path: Path, family: str, on: tuple[str, ...]) -> None:
    first, second = make_adapters(tmp_path, family, on=on)
    steps: list[dict[str, Any]] = []

    def record(gauges: dict[str, Any], **_: Any) -> None:
        steps.append(gauges)

    llm = LLM(tmp_path / "base", TABLE, device="cpu", dtype="fp32", record=record)
    llm.load_adapter("a", first)
    llm.load_adapter("b", second)
    found = mixed(llm)
    assert found[""] == merged_answers(tmp_path, "base")
    assert found["a"] == merged_answers(tmp_path, "merged0")
    assert found["b"] == merged_answers(tmp_path, "merged1")
    assert len({json.dumps(tokens) for tokens in found.values()}) == 3, "the adapters change nothing"
    assert max(gauges.get("adapters", 0) for gauges in steps) == 2, "two adapters in one step"
    assert found == mixed(llm), "the prefix cache mixes them up"
    assert llm.engine.scheduler.totals.hits > 0


def over_ranks(where: str, **changes: Any) -> dict[str, list[list[int]]]:
    table = Serve(**{**TABLE.__dict__, "adapters": f"{where}/loaded"} | changes)
    with join_world("cpu") as world, LLM(f"{where}/base", table, world=world, dtype="fp32") as llm:
        if world.rank:
            llm.follow()
            return {}
        return mixed(llm)


def test_ranks_hold_their_shards(ranks: Ranks, tmp_path: Path) -> None:
    """Loaded at the start, from a folder of adapters."""
    seed = next(seed for seed in range(20) if can_be_cut("llama", seed))
    for name, folder in zip("ab", make_adapters(tmp_path, "llama", seed=seed), strict=True):
        shutil.copytree(folder, tmp_path / "loaded" / name)
    found = ranks.run(2, over_ranks, str(tmp_path))[0]
    wanted = {"": "base", "a": "merged0", "b": "merged1"}
    assert found == {name: merged_answers(tmp_path, folder) for name, folder in wanted.items()}


def over_copies(where: str) -> dict[str, list[list[int]]]:
    return over_ranks(where, dp_attention=2)


def over_stages(where: str) -> dict[str, list[list[int]]]:
    return over_ranks(where, pp=2)


def test_copies_of_attention_have_them_whole(ranks: Ranks, tmp_path: Path) -> None:
    """On the attention of a model with experts, which are divided."""
    check_mixtral(ranks.run(2, over_copies, str(with_loaded(tmp_path)))[0], tmp_path)


@pytest.mark.slow
def test_stages_have_those_of_their_layers(ranks: Ranks, tmp_path: Path) -> None:
    check_mixtral(ranks.run(2, over_stages, str(with_loaded(tmp_path)))[0], tmp_path)


def with_loaded(where: Path) -> Path:
    """A model with experts for two ranks, and two adapters to load at the start."""
    seed = next(seed for seed in range(40) if can_be_cut("mixtral", seed))
    for name, folder in zip("ab", make_adapters(where, "mixtral", on=("qkv", "out"), seed=seed), strict=True):
        shutil.copytree(folder, where / "loaded" / name)
    return where


def check_mixtral(found: dict[str, list[list[int]]], where: Path) -> None:
    wanted = {"": "base", "a": "merged0", "b": "merged1"}
    assert found == {name: merged_answers(where, folder) for name, folder in wanted.items()}


def test_an_unloaded_adapter_leaves_its_slot_to_another(tmp_path: Path) -> None:
    first, second = make_adapters(tmp_path, "llama")
    table = Serve(**{**TABLE.__dict__, "max_adapters": 1})
    llm = LLM(tmp_path / "base", table, device="cpu", dtype="fp32")
    llm.load_adapter("a", first)
    before = [made.tokens for made in llm.generate(PROMPTS, GREEDY, adapter="a")]
    with pytest.raises(BadInput, match=r"1 adapters are loaded .* unload one or raise serve.max_adapters"):
        llm.load_adapter("b", second)
    llm.unload_adapter("a")
    with pytest.raises(BadInput, match="no adapter 'a' is loaded"):
        llm.unload_adapter("a")
    assert "no adapter 'a' is loaded" in llm.generate(PROMPTS[:1], GREEDY, adapter="a")[0].error
    llm.load_adapter("a", second)  # the same name, other weights: nothing of the prefix cache fits
    after = [made.tokens for made in llm.generate(PROMPTS, GREEDY, adapter="a")]
    assert before == merged_answers(tmp_path, "merged0") and after == merged_answers(tmp_path, "merged1")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "has DoRA"),
        ({"bias": "all"}, "trained biases"),
        ({"peft_type": "IA3"}, "is no LoRA adapter"),
        ({"r": 2}, "has rank 3 and adapter_config.json says 2"),
        ({"rank_pattern": {"(a+)+": 2}}, "has the pattern"),
        ({"lora_alpha": 0}, "no positive lora_alpha"),
    ],
)
def test_what_is_not_served_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    (folder,) = make_adapters(tmp_path, "llama", count=1)
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    llm = LLM(tmp_path / "base", TABLE, device="cpu", dtype="fp32")
    with pytest.raises(BadInput, match=why):
        llm.load_adapter("a", folder)


def test_memory_is_kept_only_for_the_projections_of_adapter_on(tmp_path: Path) -> None:
    first, second = make_adapters(tmp_path, "llama", on=("qkv", "out"))
    (other,) = make_adapters(tmp_path / "other", "llama", count=1, on=("down",))
    table = replace(TABLE, adapter_on=("out", "qkv"))
    llm = LLM(tmp_path / "base", table, device="cpu", dtype="fp32")
    llm.load_adapter("a", first)
    llm.load_adapter("b", second)
    assert mixed(llm)["b"] == merged_answers(tmp_path, "merged1")
    with pytest.raises(BadInput, match=r"has adapters on down, .* set serve.adapter_on=out,qkv,down"):
        llm.load_adapter("c", other)
    slots = llm.engine.loop.executor.forward.adapters
    assert slots is not None and {module for _, module in slots.modules} == {"attention.qkv", "attention.out"}
    with pytest.raises(BadRecipe, match=r"serve.adapter_on=.* must be some of qkv, out, gate_up, down"):
        replace(TABLE, adapter_on=("kv",))


def test_adapters_of_another_model_or_too_large_are_refused(tmp_path: Path) -> None:
    (folder,) = make_adapters(tmp_path / "one", "llama", count=1)
    make_adapters(tmp_path / "two", "mixtral", count=0)
    with pytest.raises(BadInput, match=r"belongs to another model|does not have or are not served"):
        LLM(tmp_path / "two" / "base", TABLE, device="cpu", dtype="fp32").load_adapter("a", folder)
    small = Serve(**{**TABLE.__dict__, "adapter_rank": 2})
    with pytest.raises(BadInput, match=r"set serve.adapter_rank=3"):
        LLM(tmp_path / "one" / "base", small, device="cpu", dtype="fp32").load_adapter("a", folder)
    with pytest.raises(BadInput, match="takes no adapters"):
        LLM(tmp_path / "one" / "base", Serve(kv_bytes=200_000), device="cpu", dtype="fp32").load_adapter("a", folder)
