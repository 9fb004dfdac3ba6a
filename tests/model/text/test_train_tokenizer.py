"""Trained byte-level BPE: complete, deterministic, and readable by transformers."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import SMALLEST, train_tokenizer

TEXTS = [f"def name_{i}(x):\n    return x + {i * 37}  # it's déjà vu\n" for i in range(200)]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(TEXTS, 380)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
@example("\r\n \t\n  x")
@example("<|endoftext|><|im_start|>")
@example("\u0000\uffff\U0010ffff")
def test_any_text_comes_back(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text, special=False), skip_special=False) == text
    assert trained.decode(trained.encode_documents([text])[0][1:-1], skip_special=False) == text


def test_a_text_starts_with_the_end_of_the_one_before(trained: Tokenizer) -> None:
    assert trained.encode("return") == [trained.eos_id, *trained.encode("return", special=False)]
    assert trained.bos_id == trained.eos_id == 0
    assert trained.encode("") == [0]


def test_the_same_texts_give_the_same_tokenizer(trained: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXTS), 380).fingerprint == trained.fingerprint
    assert train_tokenizer(TEXTS, 379).fingerprint != trained.fingerprint


def test_the_vocabulary_is_as_large_as_wanted_or_as_the_text_allows(trained: Tokenizer) -> None:
    assert trained.vocab_size == 380
    assert train_tokenizer(["ab"], 400).vocab_size == SMALLEST + 1
    assert train_tokenizer([], SMALLEST).decode(range(4, SMALLEST))


def test_words_are_cut_as_in_gpt_4_with_two_digits(trained: Tokenizer) -> None:
    cut = trained.backend.pre_tokenizer.pre_tokenize_str("it's  12345 x\n\n    if")
    assert [word for word, _ in cut] == ["it", "'s", "Ġ", "Ġ", "12", "34", "5", "Ġx", "ĊĊ", "ĠĠĠ", "Ġif"]


def test_transformers_loads_the_folder_with_equal_ids(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    for text in [*TEXTS[:3], "été 東京 🙂", "<|im_start|>user"]:
        assert theirs(text)["input_ids"] == trained.encode(text) == again.encode(text)
    assert len(theirs) == trained.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 0, 1)
    assert again.fingerprint == trained.fingerprint
    assert again.eos_ids == trained.eos_ids == (0, 3)


def test_the_chat_template_marks_turns_and_what_the_assistant_wrote(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert trained.chat(talk) == (
        "<|endoftext|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>assistant\n"
    )
    trained.save(tmp_path)
    rendered = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(talk, return_assistant_tokens_mask=True)
    written = [i for i, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
    assert trained.decode(written, skip_special=False) == "yo<|im_end|>"


def test_a_vocabulary_too_small_for_the_bytes() -> None:
    with pytest.raises(BadInput, match="a vocabulary of 100 cannot hold 256 bytes and 4 special tokens; try 512"):
        train_tokenizer(TEXTS, 100)
