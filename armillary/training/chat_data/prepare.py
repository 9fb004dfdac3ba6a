"""Prepares conversations: token shards with a mask of the responses, and the tokenizer with its template.

Two passes over the records: one to see how many there are and which are held out, one to render and encode them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadData, BadInput, NotFound
from armillary.model.text.tokenizer import Tokenizer
from armillary.training.chat_data.answer_mask import samples
from armillary.training.chat_data.conversation import TEMPLATES, Conversation, conversation
from armillary.training.data.corpus import Corpus
from armillary.training.data.corpus_survey import Progress, content_hash
from armillary.training.data.encode_parts import EncodedDocument
from armillary.training.data.readers import json_row, opened, opened_parquet
from armillary.training.data.shard_index import Index
from armillary.training.data.tokenize_corpus import SAMPLE_BYTES, trained, write_index, write_shards

_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row: its values by key or column, the file with the line or row, and its size as text."""

    values: dict[str, Any]
    origin: str
    num_bytes: int


def records(corpus: Corpus) -> Iterator[Record]:
    """Every record of the corpus in order; other files (a README) are left out."""
    if not any(name.lower().endswith(_SUFFIXES) for name in corpus.names):
        raise BadData(f"{corpus.source} holds no records of conversations; give .jsonl or .parquet files")
    for path, name in corpus.local_files():
        if name.lower().endswith(_SUFFIXES):
            yield from _parquet(path, name) if name.lower().endswith(".parquet") else _lines(path, name)


def _lines(path: Path, name: str) -> Iterator[Record]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                origin = f"{name}:{number}"
                values = json_row(line, origin, example='{"messages": […]}')
                yield Record(values=values, origin=origin, num_bytes=len(line))


def _parquet(path: Path, name: str) -> Iterator[Record]:
    with opened_parquet(path) as file:
        rows = (row for batch in file.iter_batches(batch_size=256) for row in batch.to_pylist())
        for number, values in enumerate(rows, start=1):
            yield Record(values=values, origin=f"{name}:{number}", num_bytes=len(str(values)))


def make_chat(
    corpus: Corpus,
    folder: Path,
    given: Tokenizer | None,
    vocab: int,
    settings: Mapping[str, Any],
    progress: Progress,
    *,
    template: str,
) -> Index:
    """Write shards, tokenizer and index of the corpus' conversations into `folder`, which is empty."""
    below = _held_out_below(corpus, settings["held_out"], settings["seed"], progress)
    tokenizer = with_template(given or _trained(corpus, vocab, progress), template)
    skipped: list[str] = []
    text_bytes = 0

    def encoded() -> Iterator[EncodedDocument]:
        nonlocal text_bytes
        for record, talk in _conversations(corpus, progress, "encoding"):
            talk_samples = samples(tokenizer, talk)
            if not talk_samples:
                skipped.append(f"{talk.origin}: no answer to learn")
            held_out = content_hash(talk.identity.encode(), settings["seed"]) < below
            for sample in talk_samples:
                yield "validation" if held_out else "train", sample.ids, sample.answers
            text_bytes += record.num_bytes

    index = write_shards(folder, tokenizer, settings, encoded())
    if not index.num_tokens("train"):
        raise BadData(f"{corpus.source} has no answer to learn; give records with messages of role assistant")
    return write_index(folder, index, text_bytes, skipped)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with the template asked for, which it is saved and exported with."""
    if not template and not tokenizer.templates:
        raise BadInput("this tokenizer has no chat template; try --set data.template=plain, or a file of your own")
    return replace(tokenizer, templates={"default": template_text(template)}) if template else tokenizer


def template_text(template: str) -> str:
    """One of ours by name, or a file's."""
    try:
        return TEMPLATES.get(template) or Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        names = " or ".join(sorted(TEMPLATES))
        raise NotFound(f"no chat template '{template}'; name a readable file, or {names}") from None


def _conversations(corpus: Corpus, progress: Progress, stage: str) -> Iterator[tuple[Record, Conversation]]:
    key = "" if corpus.key == "text" else corpus.key
    total, done = corpus.num_bytes, 0
    for record in records(corpus):
        done += record.num_bytes
        progress(min(done, total), total, stage)
        yield record, conversation(record.values, record.origin, key=key)


def _held_out_below(corpus: Corpus, share: float, seed: int, progress: Progress) -> int:
    """Conversations with a hash below this are held out: `share` of them, at least one and not all where there are two
    that differ."""
    hashes = sorted(
        {content_hash(talk.identity.encode(), seed) for _, talk in _conversations(corpus, progress, "reading")}
    )
    if not hashes:
        raise BadData(f"{corpus.source} holds no conversation; give .jsonl or .parquet files with records")
    if share == 0 or len(hashes) < 2:
        return 0
    return hashes[min(max(1, round(share * len(hashes))), len(hashes) - 1)]


def _trained(corpus: Corpus, vocab: int, progress: Progress) -> Tokenizer:
    """A tokenizer trained on the messages of records sampled over the full corpus."""
    texts = [text for _, talk in _conversations(corpus, progress, "reading") for text in _texts(talk)]
    order = np.random.default_rng(0).permutation(len(texts))
    chosen, size = [], 0
    for i in order:
        if size >= SAMPLE_BYTES:
            break
        chosen.append(texts[i])
        size += len(texts[i].encode())
    return trained(chosen, vocab, progress)


def _texts(talk: Conversation) -> list[str]:
    return [each["content"] for each in talk.messages if isinstance(each["content"], str) and each["content"].strip()]
