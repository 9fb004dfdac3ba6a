"""Sampled output with drafts has the model's distribution: a chi-square test over pairs of tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.speculative.draft_length import Candidate, LengthController
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.model.layers.test_attention_forms import small

DRAWS = 100_000
PROMPT = [5, 9, 2, 7, 5, 9]


def pairs(model: Transformer, vocab: int) -> np.ndarray:  # type: ignore[type-arg]
    """[V, V]: probability of the second and third token after the prompt, which drafts are verified for."""
    ids = torch.tensor([[*PROMPT, first, second] for first in range(vocab) for second in range(vocab)])
    with torch.inference_mode():
        logits = model.head(model(ids, torch.arange(ids.shape[1]).expand(len(ids), -1), plain)).double()
    one, two, three = logits.softmax(-1)[:, -3:].unbind(1)
    first, second = one[0], two.view(vocab, vocab, vocab)[:, 0]
    return torch.einsum("a,ab,abc->bc", first, second, three.view(vocab, vocab, vocab)).numpy()


class Always(LengthController):
    """As many draft tokens as possible."""

    def lengths(self, decodes: int, candidates: list[Candidate], room: int) -> list[int]:
        return [min(each.most, room // len(candidates)) for each in candidates]


def drawn(target: Transformer, draft: Transformer, draws: int) -> tuple[Counter[tuple[int, int]], float]:
    """(how often each pair of second and third tokens came, acceptance)"""
    serve = Serve(max_running=200, kv_bytes=20_000_000, max_tokens_per_step=1024, draft="given")
    engine, _ = make_engine(target, None, serve, seed=11, draft=draft)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    speculation._max_rows = 800
    known = speculation.controller
    speculation.controller = Always(known.verify, known.propose, 2)
    speculation._decide = lambda decision: None  # type: ignore[method-assign]
    found: Counter[tuple[int, int]] = Counter()
    for number in range(draws // 1000):
        for made in engine.generate([ask(f"r{number}", PROMPT, 4, n=1000, temperature=1.0)]):
            found[(made.tokens[1], made.tokens[2])] += 1
    return found, engine.scheduler.totals.accepted / engine.scheduler.totals.drafted


@pytest.mark.slow
def test_100000_draws_have_the_models_distribution() -> None:
    config = small(num_layers=2, vocab=20)
    target = build(config, dtype=torch.float32, device="cpu", seed=3)
    draft = build(small(num_layers=1, vocab=20), dtype=torch.float32, device="cpu", seed=4)
    with torch.no_grad():
        for model in (target, draft):
            model.embedding.weight *= 20  # type: ignore[union-attr]
    found, acceptance = drawn(target, draft, DRAWS)
    assert 0.02 < acceptance < 0.98, "some drafts are accepted and some are not"
    expected = DRAWS * pairs(target, 20)
    likely = expected >= 5
    values = [(found[(i, j)], expected[i, j]) for i, j in zip(*np.nonzero(likely), strict=True)]
    values.append((DRAWS - sum(count for count, _ in values), DRAWS - sum(e for _, e in values)))
    statistic = sum((count - e) ** 2 / max(e, 1e-9) for count, e in values)
    freedom = len(values) - 1
    assert abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5, f"{statistic:.0f} of {freedom} degrees of freedom"
