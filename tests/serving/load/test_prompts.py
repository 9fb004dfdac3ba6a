"""Prompts: of the length asked for, equal where they should be and different where they should not."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.errors import NotFound
from armillary.serving.load.prompts import ByCharacters, ByTokenizer, PromptMaker
from armillary.serving.load.record import PlannedRequest

CUT = ByCharacters(per_token=4.0)


def row(tokens: int, *blocks: int) -> PlannedRequest:
    return PlannedRequest(at_s=0.0, tokens_in=tokens, tokens_out=1, blocks=blocks)


def test_lengths_and_seeds() -> None:
    texts = PromptMaker(cut=CUT, overhead=5)
    assert len(texts.prompt(0, row(105))) == 400
    assert texts.prompt(3, row(50)) == texts.prompt(3, row(50)) != texts.prompt(4, row(50))
    assert texts.prompt(3, row(50)) != PromptMaker(cut=CUT, overhead=5, seed=1).prompt(3, row(50))


def test_a_prompt_longer_than_the_corpus() -> None:
    assert len(PromptMaker(cut=CUT).prompt(0, row(1_500_000))) == 6_000_000


def test_beginnings_are_shared() -> None:
    texts = PromptMaker(cut=CUT, shared=100, prefixes=2)
    heads = [texts.prompt(i, row(150))[:400] for i in range(20)]
    tails = {texts.prompt(i, row(150))[400:] for i in range(20)}
    assert len(set(heads)) == 2 and len(tails) == 20


def test_the_second_stream_shares_nothing() -> None:
    texts = PromptMaker(cut=CUT, shared=100)
    long = [replace(row(150), is_long=True) for _ in range(2)]
    heads = {texts.prompt(i, each)[:400] for i, each in enumerate([row(150), row(150), *long])}
    assert len(heads) == 3


def test_mooncake_blocks_are_text_by_name() -> None:
    texts = PromptMaker(cut=CUT)
    one, other = texts.prompt(0, row(1300, 0, 1, 2)), texts.prompt(1, row(1300, 0, 1, 7))
    assert len(one) == len(other) == 5200
    assert one[:4096] == other[:4096] and one[4096:] != other[4096:]


def test_a_tokenizer_cuts_exactly(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["def f(self): return self"],
        tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(made.to_str())))
    cut = pickle.loads(pickle.dumps(ByTokenizer(folder=str(tmp_path))))
    text = PromptMaker(cut=cut).prompt(0, row(500))
    assert len(made.encode(text).ids) == pytest.approx(500, abs=5)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        PromptMaker(cut=ByTokenizer(folder=str(tmp_path))).prompt(0, row(5))
