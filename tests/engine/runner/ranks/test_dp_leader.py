"""Data-parallel attention gives the tokens of one rank, with a KV cache per rank and divided experts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from armillary.engine import build_linears
from armillary.engine.engine import Completion
from armillary.engine.llm import LLM
from armillary.engine.request.pooling import Pooling
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.cuda_graphs import GraphSteps, Steps, row_sizes, token_sizes
from armillary.engine.runner.executor import FastExecutor, Launched
from armillary.engine.runner.linear.linear_formats import Int8Units
from armillary.engine.runner.rank_layout import check_division
from armillary.engine.runner.ranks import step_reports
from armillary.engine.runner.ranks.token_gather import GatheredTokens
from armillary.engine.runner.step_bytes import PREFIX, StepReport, decode_report, encode_report
from armillary.engine.runner.step_channel import RankGone
from armillary.engine.runner.step_input import Shape
from armillary.errors import BadInput, BadLayout, BadRecipe
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.quantizing.quantize_model import quantize
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.collectives import Group, all_reduce
from armillary.parallel.world import join_world
from armillary.spec.hf.config import from_hf
from armillary.spec.tables.serve import Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from tests.engine.runner.test_rank_layout import EXPERTS, SPARSE, saved
from tests.model.families import random_config, random_model
from tests.model.layers.test_attention_forms import small
from tests.ranks import Ranks

TABLE = Serve(
    block_tokens=4,
    kv_bytes=400_000,
    max_running=4,
    max_model_len=48,
    max_tokens_per_step=16,
    dtype="fp32",
    check_every=1,
)
PROMPTS = [[2 + i % 3, 3, 4, 5] * (1 + i % 4) for i in range(9)]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
REPEATED = [[5, 6, 7, 8] * 5 + [5, 6], [9, 3] * 9, [4] * 15]
LONGER = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
MORE = (
    SamplingParams(max_tokens=8, temperature=1.0, seed=3, frequency_penalty=0.4, logprobs=2, n=2),
    SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1),
    SamplingParams(max_tokens=1, temperature=0.0, pooling=Pooling(mode="mean")),
)


def generated(llm: LLM) -> list[Any]:
    """[what is equal, numbers that are close] of each completion: everything that a rank tells another."""
    completions = [made for params in (GREEDY, *MORE) for made in llm.generate(PROMPTS, params)]
    return [[(made.error, made.tokens, made.finish), numbers(made)] for made in completions]


def numbers(made: Completion) -> list[float]:
    return [each.value for each in (*made.logprobs, *made.prompt_logprobs)] + made.pooled


def check_same(found: list[Any], expected: list[Any]) -> None:
    assert [words for words, _ in found] == [words for words, _ in expected]
    for (_, values), (_, right) in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, right, rtol=1e-4, atol=1e-5)
    assert sum(len(values) for _, values in expected) > 200


def served(where: str, table: Serve) -> dict[str, Any]:
    """On each rank."""
    with join_world("cpu") as world, LLM(where, table, world=world) as llm:
        executor: Any = llm.engine.loop.executor
        model = executor.executor.forward.model
        weights = {name: parameter.numel() for name, parameter in model.named_parameters()}
        if world.rank:
            return {"weights": weights, "steps": llm.follow()}
        alone = [made.tokens for made in llm.generate(PROMPTS[:1], GREEDY)]
        every = generated(llm)
        return {"weights": weights, "alone": alone, "every": every, "state": llm.engine.state()}


def all_served(folders: list[str], tables: list[Serve]) -> list[dict[str, Any]]:
    return [served(folder, table) for folder, table in zip(folders, tables, strict=True)]


def check(ranks: Ranks, folders: list[Path], size: int, **layout: int) -> list[list[dict[str, Any]]]:
    """The same from several ranks as from one, which has a cache of the same size."""
    names, table = [str(folder) for folder in folders], replace(TABLE, **layout)
    found = ranks.run(size, all_served, names, [table] * len(names))
    for at, folder in enumerate(folders):
        llm, first = LLM(folder, TABLE, device="cpu"), found[0][at]
        assert first["alone"] == [made.tokens for made in llm.generate(PROMPTS[:1], GREEDY)], folder
        check_same(first["every"], generated(llm))
        assert all(other[at]["steps"] > 5 for other in found[1:])
        state, own = first["state"], llm.engine.state()
        copies, capacity = layout["dp_attention"], state["kv_capacity_tokens"]
        assert capacity >= copies * own["kv_capacity_tokens"] and state["dp_ranks"] == copies
        assert capacity == copies * own["kv_capacity_tokens"] or size > copies  # tp divides KV heads
        assert bool(state["prefix_hits_total"]) == bool(own["prefix_hits_total"])
        assert not state["running"] and not state["kv_used_fraction"]
    return found


def test_two_ranks_give_the_tokens_of_one(ranks: Ranks, tmp_path: Path) -> None:
    """Experts with latent attention and a shared expert, and experts divided within each."""
    found = check(ranks, [saved(tmp_path, "deepseek_v3")], 2, dp_attention=2, ep=2)
    model = load_model(tmp_path / "deepseek_v3", dtype="fp32")
    for rank in found:
        for name, parameter in model.named_parameters():
            divided = ".experts." in name
            assert rank[0]["weights"][name] == parameter.numel() // (1 + divided) or not rank[0]["weights"][name], name


def test_experts_are_chosen_by_the_tokens_of_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    counts = ranks.run(2, chosen, str(saved(tmp_path, "mixtral")))
    assert counts[0] == counts[1] == alone_chosen(tmp_path / "mixtral")


def chosen(where: str) -> list[list[int]]:
    with join_world("cpu") as world, LLM(where, replace(TABLE, dp_attention=2, prefix_cache=False), world=world) as llm:
        leader: Any = llm.engine.loop.executor
        if world.rank:
            llm.follow()
        else:
            llm.generate(PROMPTS, replace(GREEDY, ignore_eos=True))
        return leader.executor.forward.expert_counts_LE.tolist()  # type: ignore[no-any-return]


def alone_chosen(folder: Path) -> list[list[int]]:
    """In the last layer, one rank drops what is not sampled from before the experts."""
    llm = LLM(folder, replace(TABLE, prefix_cache=False), device="cpu")
    executor: Any = llm.engine.loop.executor
    executor.forward.keep = lambda inputs, hidden: None
    llm.generate(PROMPTS, replace(GREEDY, ignore_eos=True))
    return executor.forward.expert_counts_LE.tolist()  # type: ignore[no-any-return]


class PaddedSteps(GraphSteps):
    """Eager steps in the shapes of CUDA graphs; `seen` has what the ranks exchange in each."""

    def __init__(self, executor: FastExecutor, max_tokens: int) -> None:
        Steps.__init__(self, executor._compute, executor.rows.send)
        self.rows, self.tokens = row_sizes(executor.max_rows), token_sizes(max_tokens)
        self.fit = self._fit
        self.seen: dict[Any, list[list[int]]] = {}
        self._executor = executor

    def run(self, shape: Shape, quick: bool, ints: Any) -> Any:
        gathered_tokens: Any = self._executor.forward.gathered_tokens
        exchanged: list[int] = []
        gather = type(gathered_tokens).gather

        def noted(*given: Any) -> Any:
            found = gather(gathered_tokens, *given)
            exchanged.append(len(found[0]))
            return found

        gathered_tokens.gather = noted
        result = self._compute(shape, quick, self._send(ints))
        del gathered_tokens.gather  # prompts with log-probabilities are computed outside
        self.seen.setdefault((shape, quick), []).append(exchanged)
        return result

    def warm(self, groups: int) -> int:
        return 0


def padded(where: str, layout: dict[str, int]) -> dict[str, Any]:
    """On each rank: what was generated in padded steps, and what was exchanged in them."""
    with join_world("cpu") as world, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            FastExecutor, "_steps", lambda executor, graphs, most, *, drafts: PaddedSteps(executor, most)
        )
        llm = LLM(where, replace(TABLE, prefix_cache=False, **layout), world=world)
        leader: Any = llm.engine.loop.executor
        executor = leader.executor
        with llm:
            if world.rank:
                llm.follow()
                found: dict[str, Any] = {}
            else:
                greedy = [made.tokens for made in llm.generate(PROMPTS, replace(GREEDY, ignore_eos=True))]
                found = {
                    "greedy": greedy,
                    "counts": executor.forward.expert_counts_LE.tolist(),
                    "every": generated(llm),
                }
        assert executor.pads_alike and not executor.steps.captures_later
        return found | {
            "seen": {(shape.tokens, shape.decodes, quick): seen for (shape, quick), seen in executor.steps.seen.items()}
        }


@pytest.mark.parametrize("layout", [{"dp_attention": 2}, {"dp_attention": 2, "ep": 2}], ids=str)
def test_steps_in_the_shapes_of_graphs_exchange_as_much_each_time(
    ranks: Ranks, tmp_path: Path, layout: dict[str, int]
) -> None:
    """A graph replays what it was captured with: on every rank the same number of tokens for a shape."""
    first, second = ranks.run(2, padded, str(saved(tmp_path, "mixtral")), layout)
    llm = LLM(tmp_path / "mixtral", replace(TABLE, prefix_cache=False), device="cpu")
    assert first["greedy"] == [made.tokens for made in llm.generate(PROMPTS, replace(GREEDY, ignore_eos=True))]
    assert first["counts"] == alone_chosen(tmp_path / "mixtral"), "padding is not counted"
    check_same(first["every"], generated(llm))
    for rank in (first, second):
        for (tokens, _, _), seen in rank["seen"].items():
            assert all(each == [2 * tokens] * len(each) and each for each in seen)
    assert {tokens for tokens, _, _ in first["seen"]} == {tokens for tokens, _, _ in second["seen"]} <= {1, 2, 4, 16}
    assert max(map(len, second["seen"].values())) > 5


def repeated(where: str) -> Any:
    with join_world("cpu") as world, LLM(where, replace(TABLE, dp_attention=2, speculate="ngram"), world=world) as llm:
        if world.rank:
            return llm.follow()
        found = [made.tokens for made in llm.generate(REPEATED, LONGER)]
        return found, generated(llm), llm.engine.state()["accepted_total"]


def test_each_copy_drafts_for_its_requests(ranks: Ranks, tmp_path: Path) -> None:
    (found, every, accepted), _ = ranks.run(2, repeated, str(saved(tmp_path, "mixtral")))
    llm = LLM(tmp_path / "mixtral", TABLE, device="cpu")
    assert found == [made.tokens for made in llm.generate(REPEATED, LONGER)] and accepted > 0
    check_same(every, generated(llm))


def preempted(where: str, kv_bytes: int) -> Any:
    table = replace(TABLE, dp_attention=2, kv_bytes=kv_bytes, max_model_len=28)
    with join_world("cpu") as world, LLM(where, table, world=world) as llm:
        if world.rank:
            return llm.follow()
        for rank in llm.engine.scheduler.ranks:  # type: ignore[attr-defined]
            rank.admission.reserve, rank.admission.learns = 0.0, False
        found = [made.tokens for made in llm.generate(PROMPTS, GREEDY)]
        return found, llm.engine.state()["preemptions_total"]


def test_preempted_requests_give_the_same_tokens(ranks: Ranks, tmp_path: Path) -> None:
    llm = LLM(saved(tmp_path, "mixtral"), TABLE, device="cpu")
    (found, count), _ = ranks.run(2, preempted, str(tmp_path / "mixtral"), 10 * llm.plan.block_bytes)
    assert found == [made.tokens for made in llm.generate(PROMPTS, GREEDY)] and count > 0


def unreported(where: str) -> str:
    """How each rank ends where the second cannot say what its steps gave."""

    def broken(launched: Launched) -> StepReport:
        raise RuntimeError("the device failed")

    table = replace(TABLE, dp_attention=2)
    with join_world("cpu") as world, pytest.MonkeyPatch.context() as monkeypatch:
        llm = LLM(where, table, world=world)
        monkeypatch.setattr(step_reports, "_report", broken)
        try:
            if world.rank:
                llm.follow()
            else:
                llm.generate(PROMPTS, GREEDY)
        except (RuntimeError, RankGone) as error:
            return str(error)
    return "it ended without an error"


def test_a_rank_that_cannot_report_ends_and_rank_0_learns_of_it(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(2, unreported, str(saved(tmp_path, "mixtral")))
    assert "rank 1 has ended" in first and second == "the device failed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"dp_attention": 2}),
        (4, {"dp_attention": 4, "ep": 4}),
        (4, {"dp_attention": 4, "ep": 2}),
        (4, {"dp_attention": 2, "ep": 4}),
        (4, {"dp_attention": 2, "ep": 2}),
        (4, {"dp_attention": 2}),
    ],
    ids=str,
)
def test_ranks_of_every_kind(ranks: Ranks, tmp_path: Path, size: int, layout: dict[str, int]) -> None:
    """tp is what is left: 2, or 1."""
    check(ranks, [saved(tmp_path, name) for name in SPARSE], size, **layout)


@pytest.mark.slow
def test_recurrent_and_chunked_layers(ranks: Ranks, tmp_path: Path) -> None:
    for name in ("qwen3_next", "llama4_text"):
        random_model(name, seed_for(name)).save_pretrained(tmp_path / name)
    check(ranks, [tmp_path / "qwen3_next", tmp_path / "llama4_text"], 2, dp_attention=2, ep=2)


def seed_for(name: str) -> int:
    """Of a model whose experts two ranks can divide."""
    for seed in range(100):
        with suppress(BadLayout):
            check_division(from_hf(random_config(name, seed).to_dict(), name=name), tp=1, dp=2, ep=2)
            return seed
    raise AssertionError(f"no {name} has experts for two ranks")


@pytest.mark.slow
def test_quantized_experts(ranks: Ranks, tmp_path: Path) -> None:
    plain = saved(tmp_path, "mixtral", tie_word_embeddings=False)
    quantize(resolve_model(str(plain), Home.at(tmp_path), need_weights=True), tmp_path / "packed", "fp8")
    assert isinstance(load_model(tmp_path / "packed", packed=True).blocks["0"].mlp.experts, PackedExperts)
    for layout in ({"ep": 2}, {"ep": 1}):
        check(ranks, [tmp_path / "packed"], 2, dp_attention=2, **layout)


def int8_units(where: str) -> list[Int8Units]:
    """What int8 GEMMs take on each rank, of which only the first found its units fast."""
    found: list[Int8Units] = []
    table = replace(TABLE, dp_attention=2, weights="int8")
    with join_world("cpu") as world, pytest.MonkeyPatch.context() as monkeypatch:
        here = Int8Units(native=False, fast=not world.rank)
        monkeypatch.setattr(Int8Units, "here", lambda: here)
        monkeypatch.setattr(build_linears, "run_int8", lambda forward, units, let_go: found.append(units))
        llm = LLM(where, table, world=world)
        if world.rank:
            llm.follow()
        llm.close()
    return found


def test_copies_round_inputs_alike(ranks: Ranks, tmp_path: Path) -> None:
    """Else the tokens of a request would depend on the copy that it comes to."""
    each = ranks.run(2, int8_units, str(saved(tmp_path, "mixtral")))
    assert each == [[Int8Units(native=False, fast=False)]] * 2


def gathered(sizes: tuple[int, ...], dtype: torch.dtype, by_sum: bool) -> list[Any]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    dp = Group(name=group.group_name, size=len(sizes), rank=rank)
    add = partial(all_reduce, group=dp)
    tokens = GatheredTokens(dp, add, add if by_sum else None)
    tokens.sizes, own = sizes, sizes[rank]
    x = torch.arange(own * 3, dtype=dtype).view(own, 3) + 100 * rank
    weights, experts = torch.full((own, 2), 0.5 + rank, dtype=torch.float32), torch.full((own, 2), 300 + rank)
    parts = tokens.gather(x, weights, experts)
    return [*(part.tolist() for part in parts), [part.dtype for part in parts], tokens.own(own)]


@pytest.mark.parametrize("by_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 1), (0, 3), (2, 2)], ids=str)
def test_tokens_of_every_rank_are_gathered_in_order(
    ranks: Ranks, sizes: tuple[int, int], dtype: torch.dtype, by_sum: bool
) -> None:
    first, second = ranks.run(2, gathered, sizes, dtype, by_sum)
    assert first[:4] == second[:4]
    x, weights, experts, dtypes, own = first
    assert dtypes == [dtype, dtype, torch.int64]
    assert x == [[100.0 * rank + 3 * i + j for j in range(3)] for rank, size in enumerate(sizes) for i in range(size)]
    assert weights == [[0.5 + rank] * 2 for rank, size in enumerate(sizes) for _ in range(size)]
    assert experts == [[300 + rank] * 2 for rank, size in enumerate(sizes) for _ in range(size)]
    assert (own, second[4]) == (slice(0, sizes[0]), slice(sizes[0], sum(sizes)))


def test_reports_travel_as_bytes() -> None:
    rng = np.random.default_rng(0)
    report = StepReport(
        tokens=rng.integers(0, 9, 3), pooled=rng.random(4, dtype=np.float32), prompts=[rng.random((2, 5))]
    )
    data = encode_report(report)
    header, _ = PREFIX.unpack(data[: PREFIX.size])
    found = decode_report(data[PREFIX.size : PREFIX.size + header], data[PREFIX.size + header :])
    assert found.logprobs is None and found.tokens is not None and found.pooled is not None
    for got, given in zip(
        (found.tokens, found.pooled, *found.prompts), (report.tokens, report.pooled, *report.prompts), strict=True
    ):
        np.testing.assert_array_equal(got, given)
        assert got.dtype == given.dtype  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"pp": 2}, "serve.pp=2"),
        ({"draft": "small"}, r"serve.speculate=draft \(take ngram\)"),
        ({"role": "prefill", "prefill": "here:1"}, "serve.role=prefill"),
        ({"kv_host_bytes": 100}, "serve.kv_host_bytes=100"),
        ({"batching": "static"}, "serve.batching=static"),
        ({"emulate": True}, "serve.emulate"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(BadRecipe, match=f"serve.dp_attention=2 does not go with {what} yet; leave one out"):
        Serve(dp_attention=2, **settings)


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(BadLayout, match=r"small has no experts to divide over serve\.dp_attention=2 ranks"):
        check_division(small(name="small"), tp=1, dp=2)


def test_experts_divide_all_ranks() -> None:
    check_division(small(name="small", moe=EXPERTS), tp=1, dp=4, ep=4)
    with pytest.raises(BadLayout, match=r"serve\.ep=3 does not divide 4 ranks, 4 experts"):
        check_division(small(name="small", moe=EXPERTS), tp=1, dp=4, ep=3)
    with pytest.raises(BadLayout, match=r"no serve\.ep does; take another number of ranks"):
        check_division(small(name="small", moe=EXPERTS), tp=1, dp=3)


def test_it_needs_ranks(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"serve\.dp_attention=2 needs as many ranks"):
        LLM(saved(tmp_path, "mixtral"), replace(TABLE, dp_attention=2), device="cpu")
