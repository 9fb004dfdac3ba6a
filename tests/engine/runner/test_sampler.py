"""Each row is drawn its own way: what one request asks for changes nothing for the others, in tokens or in work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from armillary.engine.request.constraint import Structure
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.reference_executor import PlainExecutor
from armillary.engine.runner.sampler import DeviceSampler
from armillary.engine.scheduler.settings import settings_for
from armillary.kernels.sampling.sampling import sample_rows
from tests.engine.fake import ask
from tests.engine.runner import test_reference_executor
from tests.engine.runner.test_executor import padded
from tests.engine.runner.test_reference_executor import MODELS, Alternates, model, serve

STRUCTURE = Structure(kind="regex", source="alternating")
SPECIAL: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 2.0, 9: -3.0}},
    "structure": {"structure": STRUCTURE},
    "all": {"logprobs": 3, "presence_penalty": 0.4, "min_tokens": 3, "stop_ids": (7,)},
}


def mixed(names: list[str]) -> list[Any]:
    """Ordinary requests of every kind, and between them the special ones."""
    plain = [
        ask(
            f"r{i}",
            [2 + i, 3, 4],
            10,
            temperature=(0.0, 0.9, 1.3)[i % 3],
            seed=i,
            top_k=(0, 8)[i % 2],
            top_p=(1.0, 0.9)[i % 2],
        )
        for i in range(4)
    ]
    special = [ask(name, [5, 6, 2 + i], 10, temperature=0.9, seed=i, **SPECIAL[name]) for i, name in enumerate(names)]
    return [*plain[:2], *special, *plain[2:]]


class Counted:
    """Rows that each kernel was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def kernels(self) -> EngineKernels:
        def sample(logits: Any, draws: Any, penalties: Any = None, allowed: Any = None) -> Any:
            self.calls.append(("sample", len(logits), penalties is not None or allowed is not None))
            return sample_rows(logits, draws, penalties, allowed)

        def logprobs(logits: Any, tokens: Any, num_top: int) -> Any:
            self.calls.append(("logprobs", len(logits), False))
            return EngineKernels().logprobs(logits, tokens, num_top)

        return EngineKernels(sample=sample, logprobs=logprobs)


def made(config: Any, requests: list[Any], executor: Any, **fields: Any) -> list[Any]:
    constraints = {request.id: Alternates for request in requests if request.params.structure is not None}
    return serve(config, model("plain"), requests, executor=executor, constraints=constraints, max_running=12, **fields)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("names", [[name] for name in SPECIAL] + [list(SPECIAL)], ids=[*SPECIAL, "together"])
def test_a_mixed_batch_draws_what_the_plain_sampler_draws(names: list[str], overlap: bool) -> None:
    config, requests = MODELS["plain"], mixed(names)
    found = made(config, requests, padded, overlap=overlap)
    right = made(config, requests, PlainExecutor, overlap=False)
    assert [one.tokens for one in found] == [one.tokens for one in right]
    alone = made(config, [request for request in requests if request.id.startswith("r")], padded, overlap=overlap)
    ordinary = [one.tokens for one in found if one.request.id.startswith("r")]
    assert ordinary == [one.tokens for one in alone], "what one asks for changes nothing for the others"


def test_only_rows_that_ask_for_more_are_treated_so() -> None:
    counted = Counted()
    requests = [ask(f"r{i}", [2 + i, 3], 6, temperature=0.8, seed=i, ignore_eos=True) for i in range(7)]
    requests.append(ask("special", [2, 3], 6, seed=1, frequency_penalty=0.5, logprobs=1, ignore_eos=True))
    serve(
        MODELS["plain"],
        model("plain"),
        requests,
        max_running=12,
        max_tokens_per_step=64,
        executor=lambda *a, **k: FastExecutor(*a, kernels=counted.kernels(), **k),
    )
    steps = [call for call in counted.calls if call[0] == "sample"]
    assert {call for call in steps if call[2]} == {("sample", 1, True)}, "penalties of one row, not of the batch"
    assert {call for call in counted.calls if call[0] == "logprobs"} == {("logprobs", 1, False)}
    assert ("sample", 7, False) in steps


def test_penalties_take_memory_by_the_tokens_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the longest text that there may be."""
    seen, counted = [], DeviceSampler._counted

    def watched(self: Any, rows: Any, prompts: Any, ends: Any, longest: int, vocab: int) -> Any:
        seen.append((len(rows), longest))
        return counted(self, rows, prompts, ends, longest, vocab)

    monkeypatch.setattr(DeviceSampler, "_counted", watched)
    requests = [ask("a", [2, 3], 6, seed=1, frequency_penalty=0.5, ignore_eos=True), ask("b", [2] * 30, 6, seed=1)]
    serve(MODELS["plain"], model("plain"), requests, executor=FastExecutor, overlap=False)
    assert seen == [(1, 2 + i) for i in range(6)]


def test_log_probabilities_come_in_one_tensor() -> None:
    counted, told = Counted(), []

    class Watched(FastExecutor):
        def tokens(self, launched: Any) -> list[int]:
            told.append(None if launched.logprobs is None else tuple(launched.logprobs.shape))
            return super().tokens(launched)

    requests = [ask(f"r{i}", [2 + i, 3], 3, temperature=0.0, logprobs=i, ignore_eos=True) for i in range(3)]
    found = serve(
        MODELS["plain"], model("plain"), requests, executor=lambda *a, **k: Watched(*a, kernels=counted.kernels(), **k)
    )
    assert (3, 1 + 2 * 2) in told, "three rows, the chosen token and two of the likeliest with their ids"
    assert [[len(entry.top) for entry in one.logprobs] for one in found] == [[0] * 3, [1] * 3, [2] * 3]
    assert all(entry.token == token for one in found for entry, token in zip(one.logprobs, one.tokens, strict=True))


@pytest.mark.parametrize("late", [False, True])
def test_structured_answers_decode_in_every_step(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        test_reference_executor,
        "settings_for",
        lambda config, table: replace(settings_for(config, table), late_masks=late),
    )
    decided: list[int] = []

    class Watched(FastExecutor):
        def launch(self, decision: Any) -> Any:
            decided.append(sum(seq.request.id == "s" for seq in decision.sampling))
            return super().launch(decision)

    requests = [ask("free", [4, 5], 24, ignore_eos=True), ask("s", [2, 3], 20, structure=STRUCTURE, seed=2)]
    found = serve(
        MODELS["plain"], model("plain"), requests, overlap=True, constraints={"s": Alternates}, executor=Watched
    )
    assert found[1].finish == "stop" and [t % 2 for t in found[1].tokens] == [0, 1] * 3
    assert decided[:6] == ([1] * 6 if late else [1, 0, 1, 0, 1, 0])
    right = serve(MODELS["plain"], model("plain"), requests, overlap=False, constraints={"s": Alternates})
    assert [one.tokens for one in found] == [one.tokens for one in right]
