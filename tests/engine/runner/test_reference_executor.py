"""Real models through the whole engine: greedy answers are those of plain generation, whatever the schedule; drawn ones
depend on the seed alone."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.engine.cache.kv_capacity import plan_kv
from armillary.engine.engine import Completion, Engine
from armillary.engine.output.output_text import OutputProcessor
from armillary.engine.request.constraint import Structure
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import Sampling
from armillary.engine.runner.reference_executor import PlainExecutor
from armillary.engine.scheduler.invariants import check_idle
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import settings_for
from armillary.engine.scheduler.step_loop import Loop
from armillary.model.transformer import Transformer, build
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.output.test_output_text import Letters
from tests.model.layers.test_attention_forms import SHAPES, small
from tests.model.plain_generation import generate_tokens

MODELS = SHAPES | {
    "hybrid": small(num_layers=5, attention_pattern=["sliding", "sliding", "full"], window=6),
    "multi-query": small(kv_heads=1),
    "2-simplicial": small(
        num_layers=3,
        attention_pattern=["2-simplicial", "full", "2-simplicial"],
        simplicial={"window_1": 3, "window_2": 7},
        kv_heads=1,
        qk_norm="head",
        nope_every=3,
    ),
    "gated delta-net": small(
        num_layers=3,
        attention_pattern=["gated_delta", "full", "gated_delta"],
        gated_delta={"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 6},
        attention_gate=True,
        kv_heads=1,
        norm_plus_one=True,
        qk_norm="head",
    ),
}
MADE: dict[str, Transformer] = {}


def model(name: str) -> Transformer:
    if name not in MADE:
        MADE[name] = build(MODELS[name], dtype=torch.float32, device="cpu", seed=3)
    return MADE[name]


def serve(
    config: ModelConfig,
    weights: Transformer,
    requests: Items[Request],
    *,
    blocks: int = 200,
    overlap: bool = True,
    constraints: Any = None,
    executor: Any = PlainExecutor,
    **fields: Any,
) -> list[Completion]:
    table = Serve(**{"block_tokens": 4, "max_tokens_per_step": 16, "max_running": 4, "check_every": 1} | fields)
    plan = plan_kv(config, table, 1_000_000, dtype="fp32")
    plan = replace(plan, budget_bytes=plan.block_bytes * (blocks * len(plan.groups) + 1))
    scheduler = Scheduler(settings_for(config, table), plan.make(prefix=table.prefix_cache))
    runs = executor(weights, scheduler.cache, max_running=table.max_running, max_model_len=config.context)
    engine = Engine(Loop(scheduler, runs, overlap=overlap), OutputProcessor(scheduler, Letters))
    made = engine.generate(requests, constraints)
    check_idle(scheduler)
    return made


prompts = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=18), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    wanted=prompts,
    blocks=st.sampled_from([7, 8, 12, 60]),
    batching=st.sampled_from(["none", "static", "continuous"]),
    block_tokens=st.sampled_from([4, 8]),
    max_tokens_per_step=st.sampled_from([4, 7, 32]),
    prefix_cache=st.booleans(),
    kv_host_bytes=st.sampled_from([0, 20_000, 500_000]),
    overlap=st.booleans(),
)
def test_greedy_answers_are_those_of_plain_generation(
    name: str, wanted: list[list[int]], **given_settings: Any
) -> None:
    config, weights = MODELS[name], model(name)
    requests = [ask(f"r{i}", prompt, 9, temperature=0.0) for i, prompt in enumerate(wanted)]
    if not given_settings["prefix_cache"]:
        given_settings["kv_host_bytes"] = 0
    found = serve(config, weights, requests, **given_settings)
    right = [generate_tokens(weights, [prompt], Sampling(max_tokens=9, temperature=0))[0] for prompt in wanted]
    assert [made.tokens for made in found] == right


def test_drawn_answers_depend_on_the_seed_alone() -> None:
    config, weights = MODELS["plain"], model("plain")
    wishes: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "seed": 7, "n": 3, "frequency_penalty": 0.5}
    alone = serve(config, weights, [ask("a", [2, 3, 4, 5, 6], 12, **wishes)], overlap=False, prefix_cache=False)
    others = [ask(f"r{i}", [3 + i, 4], 20) for i in range(5)]
    beside = serve(
        config,
        weights,
        [*others, ask("a", [2, 3, 4, 5, 6], 12, **wishes)],
        blocks=14,
        max_tokens_per_step=4,
        block_tokens=8,
    )
    assert [made.tokens for made in alone] == [made.tokens for made in beside if made.request.id == "a"]
    assert len({tuple(made.tokens) for made in alone}) == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_wishes_are_met(overlap: bool) -> None:
    config, weights = MODELS["plain"], model("plain")
    (free,) = serve(config, weights, [ask("a", [2, 3], 10, temperature=0.0)])
    stop, first = free.tokens[2], free.tokens[0]
    at = free.tokens.index(stop) + 1
    requests = [
        ask("stop", [2, 3], 10, temperature=0.0, stop_ids=(stop,)),
        ask("least", [2, 3], 10, temperature=0.0, stop_ids=(stop,), min_tokens=8),
        ask("bias", [2, 3], 10, temperature=0.0, logit_bias={first: -100.0}),
        ask("presence", [2, 3], 10, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0),
    ]
    found = {made.request.id: made.tokens for made in serve(config, weights, requests, overlap=overlap)}
    assert found["stop"] == free.tokens[:at]
    assert len(found["least"]) >= 8 and stop not in found["least"][:7]
    assert first not in found["bias"]
    assert len(set(found["presence"])) > len(set(free.tokens)) or len(set(free.tokens)) == 10


class Alternates:
    """Even and odd tokens by turns, six of them."""

    def __init__(self) -> None:
        self.came: list[int] = []

    def allowed(self) -> bytes:
        return (b"\x55" if len(self.came) % 2 == 0 else b"\xaa") * 7

    def advance(self, token: int) -> bool:
        self.came.append(token)
        return token % 2 == (len(self.came) - 1) % 2

    def finished(self) -> bool:
        return len(self.came) == 6


@pytest.mark.parametrize("overlap", [False, True])
def test_structures_hold(overlap: bool) -> None:
    config, weights = MODELS["plain"], model("plain")
    structure = Structure(kind="regex", source="alternating")
    requests = [ask(f"r{i}", [2 + i, 3], 20, structure=structure, n=2) for i in range(3)]
    found = serve(config, weights, requests, overlap=overlap, constraints={f"r{i}": Alternates for i in range(3)})
    assert all(made.finish == "stop" and [t % 2 for t in made.tokens] == [0, 1] * 3 for made in found)


def test_weights_that_give_no_numbers_are_told() -> None:
    config = MODELS["plain"]
    broken = build(config, dtype=torch.float32, device="cpu", seed=3)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    (made,) = serve(config, broken, [ask("a", [2, 3], 4)])
    assert made.finish == "error" and "check its weights" in made.error and made.tokens == []
