"""From a corpus to token shards: survey it, train a tokenizer where none is given, encode, and mix where asked.

Everything streams: memory holds a group of documents at a time, for a corpus of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.corpus import Corpus
from armillary.training.data.corpus_survey import Progress, Survey, survey
from armillary.training.data.readers import Document
from armillary.training.data.sample_order import permuted
from armillary.training.data.shard_index import SPLITS, Index, Split
from armillary.training.data.shards import ShardWriter, TokenShards

SAMPLE_BYTES = 8_000_000
"""text a tokenizer is trained on at most; more of it changes few merges and takes longer"""
_BATCH_BYTES = 1_000_000
_NAMED_SKIPPED = 20
_BLOCK = 1 << 20


def encode_corpus(
    corpus: Corpus, folder: Path, given: Tokenizer | None, vocab: int, settings: Mapping[str, Any], progress: Progress
) -> Index:
    """Fill `folder` with shards, tokenizer and index; the index records the `settings`."""
    sample_bytes = 0 if given else SAMPLE_BYTES
    held_out, seed = settings["held_out"], settings["seed"]
    surveyed = survey(corpus, held_out=held_out, seed=seed, sample_bytes=sample_bytes, progress=progress)
    if surveyed.num_tokenised and given is None:
        raise BadInput(f"{corpus.source} holds token ids already; say whose they are with --tokenizer")
    tokenizer = given or trained(surveyed.sample, vocab, progress)
    encoded = _Encoded(corpus=corpus, surveyed=surveyed, tokenizer=tokenizer, progress=progress)
    write = _write_shuffled if settings.get("shuffle") else write_shards
    index = write(folder, tokenizer, settings, encoded)
    return write_index(folder, index, surveyed.text_bytes, [f"{item.origin}: {item.why}" for item in surveyed.skipped])


def trained(texts: Sequence[str], vocab: int, progress: Progress) -> Tokenizer:
    progress(0, 1, "training the tokenizer")
    tokenizer = train_tokenizer(texts, vocab)
    progress(1, 1, "training the tokenizer")
    return tokenizer


EncodedDocument = tuple[Split, Sequence[int] | np.ndarray, Sequence[bool] | None]
"""split, token ids, and which of them are to be learnt (None: all)"""


def write_shards(
    folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any], documents: Iterable[EncodedDocument]
) -> Index:
    """The tokenizer, shards of the documents in this order, and what an index says of both."""
    dtype: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    tokenizer.save(folder / "tokenizer")
    with ExitStack() as stack:
        limit = settings["shard_tokens"]
        writers = {s: stack.enter_context(ShardWriter(folder, s, dtype, shard_tokens=limit)) for s in SPLITS}
        for split, ids, answers in documents:
            writers[split].add(ids, answers)
    return Index(
        dtype=dtype,
        vocab=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.fingerprint,
        splits={split: tuple(writers[split].shards) for split in SPLITS},
        text_bytes=0,
        num_skipped=0,
        made_from=settings,
    )


def write_index(folder: Path, index: Index, text_bytes: int, skipped: Sequence[str]) -> Index:
    """Complete the folder: `text_bytes` were read, and what was skipped has its reason."""
    first = tuple(skipped[:_NAMED_SKIPPED])
    index = replace(index, text_bytes=text_bytes, num_skipped=len(skipped), skipped=first)
    index.write(folder)
    return index


def _write_shuffled(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any], encoded: _Encoded) -> Index:
    """Shards in the order of the source first, then copied in a random one: memory holds one document at a time."""
    with TemporaryDirectory(dir=folder, prefix=".in-order-") as ordered:
        index = write_shards(Path(ordered), tokenizer, settings, encoded)
        opened = {split: TokenShards.open(ordered, split, index=index) for split in SPLITS}
        mixed = _mixed(opened, settings["seed"], encoded.surveyed.text_bytes, encoded.progress)
        return write_shards(folder, tokenizer, settings, mixed)


def _mixed(opened: Mapping[Split, TokenShards], seed: int, size: int, progress: Progress) -> Iterator[EncodedDocument]:
    done, total = 0, sum(shards.num_documents for shards in opened.values())
    for split, shards in opened.items():
        count = shards.num_documents
        for first in range(0, count, _BLOCK):
            places = np.arange(first, min(first + _BLOCK, count))
            for number in permuted(places, count, seed=seed, epoch=0).tolist():
                yield split, shards.document(number), None
            done += len(places)
            progress(size * done // total, size, "shuffling")


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """The documents of a corpus as ids, in its order."""

    corpus: Corpus
    surveyed: Survey
    tokenizer: Tokenizer
    progress: Progress

    def __iter__(self) -> Iterator[EncodedDocument]:
        done, total = 0, self.surveyed.text_bytes
        for batch in _batched(self.corpus):
            texts = iter(self.tokenizer.encode_documents([item.text for item in batch if not item.ids]))
            for document in batch:
                ids = self._given(document) if document.ids else next(texts)
                yield "validation" if self.surveyed.is_held_out(document) else "train", ids, None
            done += sum(len(document.text.encode()) for document in batch)
            self.progress(min(done, total), total, "encoding")

    def _given(self, document: Document) -> Sequence[int]:
        """Ids that came with the source, closed by an end of text where there is none."""
        vocab, end = self.tokenizer.vocab_size, self.tokenizer.eos_id
        if (largest := max(document.ids)) >= vocab:
            raise BadInput(f"{document.origin} holds id {largest}, the tokenizer ends at {vocab - 1}; give its own")
        assert end is not None
        return document.ids if document.ids[-1] == end else (*document.ids, end)


def _batched(corpus: Corpus) -> Iterator[list[Document]]:
    """Documents in groups large enough to keep all cores busy, small enough to hold."""
    batch: list[Document] = []
    size = 0
    for item in corpus.documents():
        if isinstance(item, Document):
            batch.append(item)
            size += len(item.text) + len(item.ids)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
