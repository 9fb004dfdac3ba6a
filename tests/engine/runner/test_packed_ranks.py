"""Packed weights over ranks: each keeps its rows or columns as they are stored, and two give the tokens of one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.linear import linear_formats
from armillary.engine.runner.linear.linear_formats import Int8Dense, int8_is_fast
from armillary.engine.runner.linear.native_linear import NativeLinear
from armillary.engine.runner.rank_layout import RankLayout
from armillary.engine.runner.sharded_weights import RankShard, load_shard
from armillary.errors import BadLayout
from armillary.kernels.native.library import library
from armillary.model.quantized.packed_linear import loaded_bytes, packed_modules
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.collectives import Group
from armillary.parallel.world import join_world
from armillary.spec.tables.serve import Serve
from tests.model.quantized.folders import FOLDERS, tiny_llama
from tests.ranks import Ranks

TABLE = Serve(block_tokens=4, kv_bytes=200_000, max_running=4, dtype="fp32")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [20, 21, 22, 23]]
FORMATS = ("int4 groups with zeros", "fp8 per row", "int8 per row", "mxfp4", "nvfp4", "fp8 blocks")


def written(where: Path, name: str) -> Path:
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    wide |= {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if name == "fp8 blocks" else {}
    return FOLDERS[name](where / name.replace(" ", "-"), tiny_llama(attention_bias=True, **wide))


def together(folders: list[str]) -> list[list[list[int]]]:
    found = []
    with join_world("cpu") as world:
        for folder in folders:
            with LLM(folder, TABLE, world=world) as llm:
                if world.rank:
                    llm.follow()
                else:
                    found.append([made.tokens for made in llm.generate(PROMPTS, GREEDY)])
    return found


def test_two_ranks_give_the_tokens_of_one(ranks: Ranks, tmp_path: Path) -> None:
    """In fp32. The C++ kernels round inputs of int4 and int8 layers per 32 columns, which ranks do not divide; torch's
    kernels, where there is no compiler, take inputs in bf16, where ties fall either way."""
    names = [name for name in FORMATS if "int" not in name or shutil.which("g++")]
    folders = [str(written(tmp_path, name)) for name in names]
    found = ranks.run(2, together, folders)[0]
    alone = [LLM(folder, TABLE, device="cpu").generate(PROMPTS, GREEDY) for folder in folders]
    expected = [[made.tokens for made in each] for each in alone]
    assert [name for name, ours, theirs in zip(names, found, expected, strict=True) if ours != theirs] == []


def test_inputs_in_int8_are_rounded_by_whole_rows(ranks: Ranks, tmp_path: Path) -> None:
    """W8A8: a scale per token, whose row two ranks divide."""
    folder = written(tmp_path, "int8 per row")
    config = json.loads((folder / "config.json").read_text())
    (scheme,) = config["quantization_config"]["config_groups"].values()
    scheme["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    alone = LLM(folder, TABLE, device="cpu")
    down = alone.engine.loop.executor.forward.layers[0].down  # type: ignore[attr-defined]
    if not isinstance(down, Int8Dense):
        assert isinstance(down, NativeLinear) and down.parts[0].weight.first_rows.inputs == "token"
    expected = [made.tokens for made in alone.generate(PROMPTS, GREEDY)]
    assert ranks.run(2, together, [str(folder)])[0] == [expected]


def unlike(folder: str) -> list[list[int]] | None:
    """The second rank has no C++ compiler and no int8 units."""
    if torch.distributed.get_rank():
        linear_formats.library = lambda: None  # type: ignore[assignment]
        linear_formats.int8_is_fast = lambda: False  # type: ignore[assignment]
    try:
        with join_world("cpu") as world, LLM(folder, replace(TABLE, weights="int8"), world=world) as llm:
            if world.rank:
                llm.follow()
                return None
            return [made.tokens for made in llm.generate(PROMPTS, GREEDY)]
    finally:
        linear_formats.library, linear_formats.int8_is_fast = library, int8_is_fast


def test_ranks_round_inputs_together_or_not_at_all(ranks: Ranks, tmp_path: Path) -> None:
    """Else one waits in an all-reduce of the rows' largest numbers that the other does not call."""
    tiny_llama(hidden_size=128, intermediate_size=256, head_dim=32).save_pretrained(tmp_path / "m")
    assert [len(tokens) for tokens in ranks.run(2, unlike, str(tmp_path / "m"))[0]] == [8, 8, 8]


@pytest.mark.parametrize("name", FORMATS)
def test_a_rank_holds_half_of_the_packed_weights(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name)
    whole = load_model(folder, packed=True)
    for rank in range(2):
        layout = RankLayout.sharded(Group(name="", size=2, rank=rank))
        part = load_shard(
            folder, whole.config, dtype=torch.float32, device=torch.device("cpu"), ranks=layout, machines=()
        )
        assert len(packed_modules(part)) == len(packed_modules(whole)) == 8
        packed, full = (sum(module.weight.nbytes for module in packed_modules(each)) for each in (part, whole))
        assert packed <= 0.56 * full, "scales per row of a divided input stay whole"
        assert loaded_bytes(part) < loaded_bytes(whole)
        down = whole.blocks["0"].mlp.down.weight.dequantised()
        half = down.shape[1] // 2
        mine = part.blocks["0"].mlp.down.weight.dequantised()
        assert torch.equal(mine, down[:, rank * half : (rank + 1) * half])
        up = whole.blocks["1"].mlp.up.weight.dequantised()
        own = slice(rank * len(up) // 2, (rank + 1) * len(up) // 2)
        assert torch.equal(part.blocks["1"].mlp.up.weight.dequantised(), up[own])


def test_columns_that_share_a_scale_stay_together(tmp_path: Path) -> None:
    folder = FOLDERS["int4 groups with zeros"](tmp_path / "m", tiny_llama(intermediate_size=192))  # 48 columns per rank
    config = load_model(folder, packed=True).config
    with pytest.raises(BadLayout, match="columns that share a scale stay together; take fewer ranks"):
        load_model(folder, packed=True, shard=RankShard(config, RankLayout.sharded(Group(name="", size=4, rank=0))))
