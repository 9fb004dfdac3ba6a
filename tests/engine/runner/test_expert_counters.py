"""Counters of experts in the engine: every token of a request, no padding, whatever the steps are."""

from __future__ import annotations

from collections import Counter

import torch

from armillary.engine.build import make_engine
from armillary.engine.runner.executor import FastExecutor
from armillary.model.transformer import Transformer, build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.engine.runner.test_executor import padded
from tests.engine.runner.test_reference_executor import serve
from tests.model.layers.test_attention_forms import small

REQUESTS = [ask("a", [2, 3, 4, 5, 6], 4, temperature=0.0), ask("b", [7], 3, temperature=0.0)]
TOKENS = (5 + 1) + (4 - 1) + (3 - 1)  # of prompts, and of outputs but the last, which is never computed


def routed() -> Transformer:
    """Experts 2 and 0 for every token of the first layer, 1 and 3 for every token of the second."""
    moe = {"num_experts": 4, "top_k": 2, "ffn": 16, "score": "softmax_topk", "router_bias": True}
    model = build(small(moe=moe, num_layers=2), dtype=torch.float32, device="cpu", seed=3)
    for block, biases in zip(model.blocks.values(), ([2.0, 0.0, 3.0, 1.0], [0.0, 3.0, 1.0, 2.0]), strict=True):
        block.mlp.router.weight.data.zero_()
        block.mlp.router.bias.data.copy_(torch.tensor(biases))
    return model


def test_every_token_is_counted_once_and_no_padding() -> None:
    """The last layer computes the last token of a prompt only: the others are not needed after its attention."""
    model, found = routed(), []

    def executor(kind: type[FastExecutor]):  # type: ignore[no-untyped-def]
        def make(*args: object, **named: object) -> FastExecutor:
            found.append(kind(*args, **named))  # type: ignore[arg-type]
            return found[-1]

        return make

    for kind in (FastExecutor, padded):
        serve(model.config, model, REQUESTS, executor=executor(kind))  # type: ignore[arg-type]
        counts = found[-1].forward.expert_counts_LE.tolist()
        assert counts == [[TOKENS, 0, TOKENS, 0], [0, TOKENS - 4, 0, TOKENS - 4]]


def test_an_engine_shows_them_when_it_is_idle() -> None:
    records: list[dict[str, float]] = []
    engine, _ = make_engine(
        routed(),
        None,
        Serve(kv_bytes=200_000, max_running=4, dtype="fp32"),
        record=lambda gauges, **_: records.append(gauges),
    )
    assert "expert_tokens_total" not in engine.state()  # what ran to calibrate is forgotten
    engine.generate(REQUESTS)
    state = engine.state()
    assert state["expert_tokens_total"] == 2 * (TOKENS + TOKENS - 4)
    assert state["expert_load_max_over_mean"] == 2.0 and state["expert_tail_fraction"] == 0.5
    assert Counter(map(bool, *state["expert_tokens"].values())) == {True: 2, False: 2}
    assert any("expert_load_max_over_mean" in gauges for gauges in records)
