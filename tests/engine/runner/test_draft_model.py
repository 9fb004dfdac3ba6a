"""Speculative decoding on models: the tokens, log-probabilities and endings are those without drafts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.engine import Completion, Engine
from armillary.engine.request.request import Request
from armillary.engine.request.sequence import Sequence
from armillary.engine.runner.draft_model import passes
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.speculative.draft import Draft, DraftState
from armillary.errors import BadInput
from armillary.model.transformer import Transformer, build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_reference_executor import model
from tests.engine.speculative.test_speculation import AnyLength
from tests.model.layers.test_attention_forms import small

SERVE: dict[str, Any] = dict(
    max_running=6, kv_bytes=200_000, block_tokens=4, max_tokens_per_step=32, check_every=1, max_draft=6
)


def requests() -> list[Request]:
    """Greedy and sampled, seeded or not, with filters, penalties, log-probabilities, limits and several completions."""
    rng = Random(0)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 1},
        {"temperature": 0.0, "logprobs": 2, "min_tokens": 6, "stop_ids": (3, 4, 5, 6)},
        {"temperature": 0.8, "seed": 2, "n": 2, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "prompt_logprobs": 1, "logprobs": 0, "seed": 3},
    ]
    prompts = [([rng.randrange(2, 9) for _ in range(rng.randint(2, 5))] * 4)[: rng.randint(5, 14)] for _ in kinds]
    return [ask(f"r{i}", prompts[i], 14, **kind) for i, kind in enumerate(kinds)]


def forced(target: Transformer, draft: Transformer | None = None, **more: Any) -> Engine:
    """An engine with drafts of random lengths, whatever they cost."""
    given = {"speculate": "ngram"} if draft is None else {"draft": "given"}
    engine, _ = make_engine(target, None, Serve(**SERVE | given | more), seed=1, draft=draft)
    assert engine.scheduler.speculation is not None
    engine.scheduler.speculation.controller = AnyLength(Random(4))
    engine.scheduler.speculation._decide = lambda decision: None  # type: ignore[method-assign]
    return engine


def same(ones: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish, one.request.id
        assert [each.token for each in one.logprobs] == [each.token for each in other.logprobs]
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine.value == pytest.approx(theirs.value, abs=1e-4)


def propose_nearly(engine: Engine, right: list[Completion]) -> None:
    """Drafts are the right tokens, with some wrong ones among them."""
    speculation, rng = engine.scheduler.speculation, Random(5)
    tokens = {(made.request.id, made.index): made.tokens for made in right}

    def look_up(decision: Decision, sequences: list[Sequence]) -> None:
        for seq in dict.fromkeys(sequences):
            following = tokens[seq.request.id, seq.index][seq.num_output :][:6]
            proposal = [token if rng.random() < 0.8 else rng.randrange(50) for token in following]
            seq.draft = DraftState(proposal=proposal, proposed_at=len(seq.tokens))

    speculation._look_up = look_up  # type: ignore[method-assign, union-attr]


@pytest.mark.parametrize("name", ["hybrid", "latent"])
def test_drafts_change_no_token_of_windows_and_latents(name: str) -> None:
    plain, _ = make_engine(model(name), None, Serve(**SERVE), seed=1)
    right, engine = plain.generate(requests()), forced(model(name))
    propose_nearly(engine, right)
    same(right, engine.generate(requests()))
    check_idle(engine.scheduler)
    totals = engine.scheduler.totals
    assert totals.drafted > totals.accepted > 10


@pytest.mark.parametrize("kv_bytes", [200_000, 24_000])
def test_a_draft_model_changes_no_token(kv_bytes: int) -> None:
    """With few blocks as well, where sequences are preempted and the draft model begins anew."""
    target = build(small(num_layers=3), dtype=torch.float32, device="cpu", seed=3)
    draft = build(small(num_layers=1, kv_heads=1), dtype=torch.float32, device="cpu", seed=3)
    draft.load_state_dict({"embedding.weight": target.state_dict()["embedding.weight"]}, strict=False)
    plain, _ = make_engine(target, None, Serve(**SERVE), seed=1)
    engine = forced(target, draft, kv_bytes=kv_bytes)
    same(plain.generate(requests()), engine.generate(requests()))
    check_idle(engine.scheduler)
    assert engine.scheduler.totals.accepted > 5
    assert (engine.scheduler.totals.preempted > 0) == (kv_bytes < 100_000)


def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    """Greedy and sampled: both models draw with the same random number, and what was computed in chunks, one by one,
    after rejections and in shared blocks is what the target computes."""
    target = build(small(num_layers=2), dtype=torch.float32, device="cpu", seed=3)
    engine = forced(target, target)
    plain_kinds = [r for r in requests() if not r.params.is_penalised and not r.params.min_tokens]
    engine.generate([r for r in plain_kinds if not r.params.logit_bias])
    totals = engine.scheduler.totals
    assert totals.drafted > 20 and totals.accepted >= 0.95 * totals.drafted  # an end token cuts a draft


def test_passes_catch_up_in_steps_of_bounded_size() -> None:
    engine = forced(model("multi-query"))
    (one,) = engine.scheduler.request_table.prepare(ask("a", range(2, 20), 8), None)
    (two,) = engine.scheduler.request_table.prepare(ask("b", range(2, 9), 8), None)
    drafts = [Draft(one, 0, 18, 3, [], 2), Draft(two, 1, 7, 1, [], 6)]
    made = list(passes(drafts, 8))
    assert [decision.num_tokens for decision in made] == [8, 8, 1, 1, 1]
    covered = [c.start + i for d in made for c in d.chunks for i in range(c.size)]
    assert covered == list(range(2, 18)) and made[2].positions == [6]
    assert [d.positions for d in made[3:]] == [[18], [19]]


def test_what_cannot_draft_is_refused() -> None:
    target = build(small(), dtype=torch.float32, device="cpu", seed=3)
    other = build(small(vocab=64), dtype=torch.float32, device="cpu", seed=3)
    with pytest.raises(BadInput, match="same tokenizer"):
        make_engine(target, None, Serve(**SERVE, draft="given"), draft=other)
