"""From a corpus to token shards: survey it, train a tokenizer where none is given, encode, and mix where asked.

Everything streams: memory holds a group of documents at a time, for a corpus of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.corpus import Corpus
from armillary.training.data.document import Document
from armillary.training.data.index import SPLITS, Index, Split
from armillary.training.data.sample_order import permuted
from armillary.training.data.shards import ShardWriter, TokenShards
from armillary.training.data.survey import Progress, Survey, survey

SAMPLE_BYTES = 8_000_000
"""text a tokenizer is trained on at most; more of it changes few merges and takes longer"""
_BATCH_BYTES = 1_000_000
_NAMED_SKIPPED = 20
_BLOCK = 1 << 20


def encode_corpus(
    corpus: Corpus, folder: Path, given: Tokenizer | None, vocab: int, settings: Mapping[str, Any], progress: Progress
) -> Index:
    """Fill `folder` with shards, tokenizer and index; `settings` are kept in the index."""
    found = survey(
        corpus,
        held_out=settings["held_out"],
        seed=settings["seed"],
        sample_bytes=0 if given else SAMPLE_BYTES,
        progress=progress,
    )
    if found.num_tokenised and given is None:
        raise BadInput(f"{corpus.source} holds token ids already; say whose they are with --tokenizer")
    tokenizer = given or _trained(found, vocab, progress)
    tokenizer.save(folder / "tokenizer")
    about = Index(
        dtype="uint16" if tokenizer.vocab_size <= 2**16 else "uint32",
        vocab=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.fingerprint,
        splits={},
        text_bytes=found.text_bytes,
        num_skipped=len(found.skipped),
        skipped=tuple(f"{item.origin}: {item.why}" for item in found.skipped[:_NAMED_SKIPPED]),
        made_from=settings,
    )
    encoded = _Encoded(corpus=corpus, found=found, tokenizer=tokenizer, progress=progress)
    return _shuffled(encoded, folder, about) if settings.get("shuffle") else _written(folder, about, encoded)


def _trained(found: Survey, vocab: int, progress: Progress) -> Tokenizer:
    progress(0, 1, "training the tokenizer")
    tokenizer = train_tokenizer(found.sample, vocab)
    progress(1, 1, "training the tokenizer")
    return tokenizer


Documents = Iterable[tuple[Split, Sequence[int] | np.ndarray]]
"""the split and ids of each document"""


def _written(folder: Path, about: Index, documents: Documents) -> Index:
    """Shards of the documents in this order, then the index."""
    with ExitStack() as stack:
        limit = about.made_from["shard_tokens"]
        writers = {s: stack.enter_context(ShardWriter(folder, s, about.dtype, shard_tokens=limit)) for s in SPLITS}
        for split, ids in documents:
            writers[split].add(ids)
    index = replace(about, splits={split: tuple(writers[split].shards) for split in SPLITS})
    index.write(folder)
    return index


def _shuffled(encoded: _Encoded, folder: Path, about: Index) -> Index:
    """Shards in the order of the source first, then copied in a random one: memory holds one document at a time."""
    with TemporaryDirectory(dir=folder, prefix=".in-order-") as first:
        _written(Path(first), about, encoded)
        opened = {split: TokenShards.open(first, split) for split in SPLITS}
        return _written(folder, about, _mixed(opened, about, encoded.progress))


def _mixed(opened: Mapping[Split, TokenShards], about: Index, progress: Progress) -> Documents:
    done, total, size = 0, sum(shards.num_documents for shards in opened.values()), about.text_bytes
    for split, shards in opened.items():
        count = shards.num_documents
        for first in range(0, count, _BLOCK):
            places = np.arange(first, min(first + _BLOCK, count))
            for number in permuted(places, count, seed=about.made_from["seed"], epoch=0).tolist():
                yield split, shards.document(number)
            done += len(places)
            progress(size * done // total, size, "shuffling")


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """The documents of a corpus as ids, in its order."""

    corpus: Corpus
    found: Survey
    tokenizer: Tokenizer
    progress: Progress

    def __iter__(self) -> Iterator[tuple[Split, Sequence[int]]]:
        done, total = 0, self.found.text_bytes
        for batch in _batched(self.corpus):
            texts = iter(self.tokenizer.encode_documents([item.text for item in batch if not item.ids]))
            for document in batch:
                ids = self._given(document) if document.ids else next(texts)
                yield "validation" if self.found.is_held_out(document) else "train", ids
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
