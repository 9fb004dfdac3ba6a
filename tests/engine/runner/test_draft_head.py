"""Drafts from a head on the model's hidden states: its passes are the plain layer's, and no token changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.cache.kv_offload import OffloadCosts
from armillary.engine.engine import Engine
from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.runner.draft_head import DraftHead
from armillary.engine.runner.draft_model import passes
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.step_input import Step
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.speculative.draft import Draft
from armillary.errors import BadInput, BadRecipe
from armillary.model.layers.attention_forms import plain
from armillary.model.multi_token import MtpLayer
from armillary.model.transformer import Transformer
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.model.weights.mtp_weights import load_draft_head, save_draft_head
from armillary.parallel.world import join_world
from armillary.spec.tables.serve import Serve
from armillary.training.draft_head import new_draft_head
from tests.engine.fake import ask
from tests.engine.runner.test_draft_model import SERVE, requests, same
from tests.engine.runner.test_reference_executor import model
from tests.engine.speculative.test_speculation import AnyLength
from tests.engine.test_llm import TEXTS, folder  # noqa: F401
from tests.model.families import random_model
from tests.model.test_multi_token import SHAPE, with_mtp_layers
from tests.ranks import Ranks

PARAMS = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=1.0, seed=3, max_tokens=12)]
SIZES = [("multi-query", 200_000), ("multi-query", 30_000), ("latent", 30_000), ("hybrid", 200_000)]


def head_of(target: Transformer, *, noise: float = 0.02) -> MtpLayer:
    head = new_draft_head(target)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn_like(parameter)
    return head


def forced(target: Transformer, head: MtpLayer, **more: Any) -> Engine:
    engine, _ = make_engine(target, None, Serve(**SERVE | {"speculate": "mtp"} | more), seed=1, draft=head)
    force(engine)
    return engine


def force(engine: Engine) -> None:
    """Drafts of random lengths, whatever they cost."""
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation.controller = AnyLength(Random(4))
    speculation._decide = lambda decision: None  # type: ignore[method-assign]


@torch.no_grad()
def one_by_one(target: Transformer, head: MtpLayer, tokens: list[int], count: int) -> list[int]:
    """Greedy draft tokens after `tokens` by the plain layer: the model's hidden states, then the head's own."""
    ids = torch.tensor([tokens])
    at = torch.arange(len(tokens))[None]
    hidden, drafts = target(ids, at, plain)[:, :-1], list(tokens)
    for _ in range(count):
        positions = torch.arange(len(drafts) - 1)[None]
        following = target.embed(torch.tensor([drafts[1:]]), positions)
        cos_sin = target.rotary(positions) if target.rotary is not None else None
        out = head(hidden, following, cos_sin, plain, 0)
        drafts.append(int(target.head(out[:, -1]).argmax()))
        hidden = torch.cat((hidden, out[:, -1:]), dim=1)
    return drafts[len(tokens) :]


def noted_drafts(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Gets the tokens before each draft, and the draft tokens."""
    seen: list[tuple[list[int], list[int]]] = []
    executor = engine.loop.executor
    assert isinstance(executor, FastExecutor) and isinstance(executor.draft_model, DraftHead)
    propose = executor.draft_model.propose

    def noted(step: Step) -> None:
        propose(step)
        assert step.drafts is not None
        rows, positions, _ = step.drafts
        for row in set(rows.tolist()):
            start, end = positions[rows == row].min(), positions[rows == row].max() + 1
            seen.append(
                (executor.rows.tokens_RT[row, :start].tolist(), executor.rows.tokens_RT[row, start:end].tolist())
            )

    executor.draft_model.propose = noted  # type: ignore[method-assign, assignment]
    return seen


@pytest.mark.parametrize(
    ("name", "more"),
    [("multi-query", {}), ("latent", {}), ("multi-query", {"kv_bytes": 24_000, "kv_host_bytes": 200_000})],
)
def test_draft_tokens_are_those_of_the_plain_layer(name: str, more: dict[str, Any]) -> None:
    """Over a prompt computed in chunks, after rejected and accepted drafts, from its own hidden states, and from a
    prefix cache, in host memory too."""
    target = model(name)
    head = head_of(target, noise=0.1)
    engine = forced(target, head, **more)
    seen = noted_drafts(engine)
    offload = engine.scheduler.cache.offload
    if offload is not None:
        offload.costs = OffloadCosts(block_s=0.0)
    for _ in range(2):
        for i in range(4):
            prompt = range(2 + i, 3 + 6 * i)
            engine.generate([ask(f"r{i}", prompt, 16, ignore_eos=True, temperature=0.0)])
    totals = engine.scheduler.totals
    assert len(seen) > 10 and totals.drafted > totals.accepted
    assert offload is None or offload.num_loaded > 0
    for tokens, made in seen:
        assert made == one_by_one(target, head, tokens, len(made))


@pytest.mark.parametrize(("name", "kv_bytes"), SIZES)
def test_a_head_changes_no_token(name: str, kv_bytes: int) -> None:
    """Sampled, seeded, penalised, with prefixes shared between requests, and preempted where there are few blocks."""
    target = model(name)
    plain_engine, _ = make_engine(target, None, Serve(**SERVE), seed=1)
    engine = forced(target, head_of(target), kv_bytes=kv_bytes)
    for _ in range(2):  # the second time prompts are found in the prefix cache, with their hidden states
        same(plain_engine.generate(requests()), engine.generate(requests()))
    check_idle(engine.scheduler)
    assert engine.scheduler.totals.drafted > 20


def test_passes_stay_one_position_behind() -> None:
    engine = forced(model("multi-query"), head_of(model("multi-query")))
    (one,) = engine.scheduler.request_table.prepare(ask("a", range(2, 20), 8), None)
    made = list(passes([Draft(one, 0, 18, 3, [], 2)], 32, 1))
    assert [(c.start, c.size, c.samples) for c in made[0].chunks] == [(2, 15, True)]
    assert [d.positions for d in made[1:]] == [[17], [18]]


def test_a_head_in_the_models_folder_is_found(tmp_path: Path) -> None:
    target = model("multi-query")
    head, where = head_of(target), tmp_path / "model"
    save_model(target, where)
    with pytest.raises(BadInput, match="no draft head beside it; train one with armillary train RECIPE --draft-for"):
        LLM(where, Serve(**SERVE, speculate="mtp"), dtype="fp32", device="cpu")
    save_draft_head(head, target.config, where, {"steps": 1})
    found = load_draft_head(where, dtype="fp32", device="cpu")
    assert found is not None
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name
    answers = [
        LLM(where, Serve(**SERVE, **more), dtype="fp32", device="cpu").generate(
            [[3, 4, 5, 3, 4, 5]], SamplingParams(max_tokens=12, temperature=0.0)
        )
        for more in ({}, {"speculate": "mtp"})
    ]
    assert answers[0][0].tokens == answers[1][0].tokens


def test_a_checkpoints_own_layer_drafts(tmp_path: Path) -> None:
    """DeepSeek-V3's, named after the last layer."""
    where = tmp_path / "deepseek"
    with_mtp_layers(where, random_model("deepseek_v3", 1, **SHAPE))
    plain_llm, llm = (
        LLM(where, Serve(**SERVE | more), dtype="fp32", device="cpu") for more in ({}, {"speculate": "mtp"})
    )
    force(llm.engine)
    prompts = [[3, 4, 5, 6], list(range(2, 30))]
    params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.0)
    assert [a.tokens for a in plain_llm.generate(prompts, params)] == [a.tokens for a in llm.generate(prompts, params)]
    assert llm.engine.scheduler.totals.drafted > 0


def test_what_a_head_cannot_do_is_refused() -> None:
    with pytest.raises(BadRecipe, match="mtp needs no other model"):
        Serve(speculate="mtp", draft="small")
    target = model("multi-query")
    with pytest.raises(BadInput, match="no layer for multi-token prediction"):
        make_engine(target, None, Serve(**SERVE, speculate="mtp"))


def drafting_together(where: str, draft: str) -> list[list[int]]:
    """On each rank: greedy and seeded answers with a draft model, or with a head."""
    table = Serve(**SERVE | ({"draft": draft} if draft else {"speculate": "mtp"}))
    with join_world("cpu") as world, LLM(where, table, world=world, dtype="fp32") as llm:
        force(llm.engine)
        if world.rank:
            return [[llm.follow()]]
        made = [llm.generate(TEXTS, params)[i].tokens for params in PARAMS for i in range(len(TEXTS))]
        return [*made, [llm.engine.scheduler.totals.accepted]]


@pytest.mark.parametrize("small_model", [False, True])
def test_two_ranks_draft_together(ranks: Ranks, folder: Path, tmp_path: Path, small_model: bool) -> None:  # noqa: F811
    where = Path(shutil.copytree(folder, tmp_path / "m"))
    save_draft_head(head_of(load_model(where)), load_model(where).config, where, {})
    first, second = ranks.run(2, drafting_together, str(where), str(folder) if small_model else "")
    alone = LLM(folder, Serve(**SERVE), device="cpu", dtype="fp32")
    assert first[:-1] == [alone.generate(TEXTS, params)[i].tokens for params in PARAMS for i in range(len(TEXTS))]
    assert first[-1][0] > 0 and second[0][0] > 5
