"""The first pass: sizes, split and sample, independent of the order of documents."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadData
from armillary.training.data.corpus import find_corpus
from armillary.training.data.corpus_survey import Sample, Survey, content_hash, survey
from armillary.training.data.readers import Document


def look(folder: Path, *, held_out: float = 0.1, seed: int = 0, sample_bytes: int = 10_000) -> Survey:
    return survey(
        find_corpus(folder), held_out=held_out, seed=seed, sample_bytes=sample_bytes, progress=lambda *_: None
    )


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:04d}.txt").write_text(text)
    return folder


def held(found: Survey, texts: list[str]) -> set[str]:
    return {text for text in texts if found.is_held_out(Document(text=text, origin=""))}


TEXTS = [f"document {number} ü" for number in range(300)]


def test_counts(tmp_path: Path) -> None:
    found = look(write(tmp_path, TEXTS))
    assert found.num_documents == 300
    assert found.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_split_and_sample_do_not_depend_on_order_or_files(tmp_path: Path) -> None:
    one = look(write(tmp_path / "a", TEXTS), sample_bytes=500)
    two = look(write(tmp_path / "b", TEXTS[::-1]), sample_bytes=500)
    assert held(one, TEXTS) == held(two, TEXTS)
    assert one.sample == two.sample
    assert 500 <= sum(len(text.encode()) for text in one.sample) < 520
    assert held(look(tmp_path / "a", seed=1), TEXTS) != held(one, TEXTS)


def test_about_the_wanted_fraction_is_held_out(tmp_path: Path) -> None:
    write(tmp_path, TEXTS)
    assert 15 <= len(held(look(tmp_path, held_out=0.1), TEXTS)) <= 45
    assert held(look(tmp_path, held_out=0.0), TEXTS) == set()


@pytest.mark.parametrize("held_out", [1e-9, 0.01, 0.5])
@pytest.mark.parametrize("seed", range(6))
def test_of_two_documents_one_is_held_out(tmp_path: Path, held_out: float, seed: int) -> None:
    assert len(held(look(write(tmp_path, ["one", "two"]), held_out=held_out, seed=seed), ["one", "two"])) == 1


def test_one_document_or_copies_of_it_are_all_for_training(tmp_path: Path) -> None:
    assert held(look(write(tmp_path, ["one"])), ["one"]) == set()
    assert held(look(write(tmp_path, ["one", "one", "one"])), ["one"]) == set()


@given(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=30), st.integers(0, 40), st.randoms())
def test_the_sample_is_a_prefix_of_the_order_by_hash(texts: list[str], limit: int, random: Random) -> None:
    def sampled(order: list[str], limit: int) -> tuple[str, ...]:
        sample = Sample(limit)
        for text in order:
            sample.add(content_hash(text.encode(), 0), text, len(text))
        return sample.texts()

    shuffled = random.sample(texts, len(texts))
    assert sampled(shuffled, limit) == sampled(texts, limit)
    everything = sampled(texts, 10**9)
    assert everything[: len(sampled(texts, limit))] == sampled(texts, limit)
    assert sorted(everything) == sorted(texts)


def test_a_corpus_without_text_says_what_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(BadData, match=r"holds no text; give other files"):
        look(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(BadData, match=r"holds no text \(1 skipped: b.txt is not UTF-8 text\); give other files"):
        look(tmp_path)


def test_the_tokenizer_does_not_see_held_out_text_while_there_is_other(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i}.txt").write_text(f"document number {i} " * 5)
    found = survey(find_corpus(tmp_path), held_out=0.2, seed=0, sample_bytes=4_000, progress=lambda *_: None)
    assert found.sample and not any(content_hash(text.encode(), 0) < found.held_out_below for text in found.sample)
