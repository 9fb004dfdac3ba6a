"""Prepares conversations: token shards with a mask of the responses, and the tokenizer with its template.

Two passes over the records: one to see how many there are and which are held out, one to render and encode them.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from armillary.errors import BadData, BadInput, NotFound, missing
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.chat_data.answer_mask import samples
from armillary.training.chat_data.conversation import TEMPLATES, Conversation, conversation
from armillary.training.data.corpus import Corpus
from armillary.training.data.index import SPLITS, Index
from armillary.training.data.readers import json_row, opened
from armillary.training.data.shards import ShardWriter
from armillary.training.data.survey import Progress, text_hash

_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row, as plain values."""

    values: dict[str, Any]
    """by key or column"""
    origin: str
    """file, with the line or row"""
    num_bytes: int
    """size of it as text"""


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
                values = json_row(line, origin, like='{"messages": […]}')
                yield Record(values=values, origin=origin, num_bytes=len(line))


def _parquet(path: Path, name: str) -> Iterator[Record]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing("pyarrow", "Parquet data", "data") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(values=values, origin=f"{name}:{number}", num_bytes=len(str(values)))
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise BadData(f"{path} is not readable Parquet ({' '.join(str(error).split())}); fetch it again") from None


_SAMPLE_BYTES = 8_000_000
_NAMED_SKIPPED = 20


def make_chat(
    corpus: Corpus,
    folder: Path,
    given: Tokenizer | None,
    vocab: int,
    template: str,
    settings: Mapping[str, Any],
    progress: Progress,
) -> Index:
    """Write shards, tokenizer and index of the corpus' conversations into `folder`, which is empty."""
    below = _held_out_below(corpus, settings["held_out"], settings["seed"], progress)
    tokenizer = with_template(given or _trained(corpus, vocab, progress), template)
    tokenizer.save(folder / "tokenizer")
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    skipped: list[str] = []
    size = 0
    with ExitStack() as stack:
        limit = settings["shard_tokens"]
        writers = {s: stack.enter_context(ShardWriter(folder, s, dtype, shard_tokens=limit)) for s in SPLITS}
        for record, talk in _conversations(corpus, progress, "encoding"):
            talk_samples = samples(tokenizer, talk)
            if not talk_samples:
                skipped.append(f"{talk.origin}: no answer to learn")
            held_out = text_hash(talk.identity, settings["seed"]) < below
            for sample in talk_samples:
                writers["validation" if held_out else "train"].add(sample.ids, sample.answers)
            size += record.num_bytes
    index = Index(
        dtype=dtype,
        vocab=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.fingerprint,
        splits={split: tuple(writers[split].shards) for split in SPLITS},
        text_bytes=size,
        num_skipped=len(skipped),
        skipped=tuple(skipped[:_NAMED_SKIPPED]),
        made_from=settings,
    )
    if not index.num_tokens("train"):
        raise BadData(f"{corpus.source} has no answer to learn; give records with messages of role assistant")
    index.write(folder)
    return index


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    """The tokenizer with the template asked for, which it is saved and exported with."""
    if not template:
        if not tokenizer.templates:
            raise BadInput("this tokenizer has no chat template; try --set data.template=plain, or a file of your own")
        return tokenizer
    return replace(tokenizer, templates={"default": template_text(template)})


def template_text(template: str) -> str:
    """One of ours by name, or a file's."""
    if template in TEMPLATES:
        return TEMPLATES[template]
    try:
        return Path(template).read_text(encoding="utf-8")
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
    hashes = sorted({text_hash(talk.identity, seed) for _, talk in _conversations(corpus, progress, "reading")})
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
        if size >= _SAMPLE_BYTES:
            break
        chosen.append(texts[i])
        size += len(texts[i].encode())
    progress(0, 1, "training the tokenizer")
    return train_tokenizer(chosen, vocab)


def _texts(talk: Conversation) -> list[str]:
    return [each["content"] for each in talk.messages if isinstance(each["content"], str) and each["content"].strip()]
