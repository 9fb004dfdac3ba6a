"""Perplexity, KL divergence and their intervals against transformers and by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from armillary.errors import BadInput, NotFound
from armillary.model.evaluation.perplexity import compare, comparison_of, model_logits, perplexity, perplexity_of
from armillary.model.evaluation.text_windows import text_windows
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.weights.hf_weights import load_model
from tests.model.quantizing.tiny_source import TEXT, write_source, write_text


@torch.no_grad()
def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    folder = write_source(tmp_path, dtype="fp32").folder
    assert folder is not None
    windows = text_windows(Tokenizer.load(folder), write_text(tmp_path / "text"), length=40, most=5)
    theirs, losses = transformers.AutoModelForCausalLM.from_pretrained(folder), []
    for tokens in windows.tokens_WT:
        losses.append(float(theirs(tokens[None], labels=tokens[None]).loss))
    logits = model_logits(load_model(folder))
    found = perplexity(logits, windows)
    assert found.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert found.low < found.value < found.high
    same = compare(logits, logits, windows)
    assert (same.ratio.value, same.kl.value, same.is_worse) == (1.0, 0.0, False)
    assert same.reference == found == same.perplexity


def test_kl_is_positive_and_of_the_right_direction() -> None:
    """KL(reference ‖ model) of two coins, in nats."""
    own, reference = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()

    class Two:
        tokens_WT, first = torch.zeros(3, 4, dtype=torch.long), 1

        def __len__(self) -> int:
            return 3

    found = compare(lambda t: own.expand(4, 2), lambda t: reference.expand(4, 2), Two())  # type: ignore[arg-type]
    assert found.kl.value == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), rel=1e-5)
    assert found.ratio.value == pytest.approx(0.9 / 0.5, rel=1e-5) and found.is_worse


def test_pairs_find_what_single_intervals_do_not() -> None:
    """Windows differ by far more than the models do, but one model is worse on nearly every window."""
    pick = np.random.default_rng(1)
    hard = pick.normal(3.0, 0.8, 100)
    rows = [(loss + extra, loss, 0.01) for loss, extra in zip(hard, pick.normal(0.01, 0.01, 100), strict=True)]
    found = comparison_of(rows)
    assert found.perplexity.low < found.reference.value < found.perplexity.high
    assert found.is_worse and found.ratio.low > 1.0 and found.ratio.high < 1.02
    even = comparison_of(
        [(loss + extra, loss, 0.01) for loss, extra in zip(hard, pick.normal(0, 0.01, 100), strict=True)]
    )
    assert even.ratio.low < 1.0 < even.ratio.high and not even.is_worse


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    pick = np.random.default_rng(2)
    covered = 0
    for _ in range(100):
        found = perplexity_of(list(pick.normal(1.0, 0.5, 40)))
        covered += found.low <= math.e <= found.high
    assert 85 <= covered <= 100


def test_windows_are_of_one_length_and_begin_as_texts_do(tmp_path: Path) -> None:
    folder = write_source(tmp_path).folder
    tokenizer = Tokenizer.load(folder or "")
    path = write_text(tmp_path / "text")
    windows = text_windows(tokenizer, path, length=50, most=10_000)
    assert (windows.tokens_WT[:, 0] == tokenizer.bos_id).all() and windows.first == 1
    joined = windows.tokens_WT[:, 1:].flatten().tolist()
    assert TEXT.startswith(tokenizer.decode(joined)) and len(joined) > 0.9 * len(tokenizer.encode(TEXT))
    few, held = text_windows(tokenizer, path, length=50, most=8).split(4)
    assert (len(few), len(held)) == (6, 2) and not (few.tokens_WT[:, None] == held.tokens_WT).all(-1).any()
    embedded = text_windows(tokenizer, None, length=64, most=4)
    assert len(embedded) == 4 and "Python" in embedded.origin
    with pytest.raises(NotFound, match="no file"):
        text_windows(tokenizer, tmp_path / "none", length=50, most=8)
    with pytest.raises(BadInput, match="hold no text"):
        text_windows(tokenizer, path, length=2, most=8)
