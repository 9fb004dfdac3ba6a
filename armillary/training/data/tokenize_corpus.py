"""From a corpus to token shards: survey it, train a tokenizer where none is given, encode, and mix where asked.

Everything streams: memory holds a group of documents at a time, for a corpus of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.training.data.corpus import Corpus
from armillary.training.data.corpus_survey import Progress, survey
from armillary.training.data.encode_parts import EncodedDocument, Mapped, encode_here, encode_parts, survey_parts
from armillary.training.data.sample_order import permuted
from armillary.training.data.shard_index import SPLITS, Index, Split
from armillary.training.data.shards import ShardWriter, TokenShards

SAMPLE_BYTES = 8_000_000
"""text a tokenizer is trained on at most; more of it changes few merges and takes longer"""
_NAMED_SKIPPED = 20
_BLOCK = 1 << 20


def encode_corpus(
    corpus: Corpus,
    folder: Path,
    given: Tokenizer | None,
    vocab: int,
    settings: Mapping[str, Any],
    progress: Progress,
    mapped: Mapped | None = None,
) -> Index:
    """Fill `folder` with shards, tokenizer and index; the index records the `settings`. `mapped` works on parts of the
    corpus, elsewhere (`encode_parts`); without it this process reads and encodes all of it."""
    sample_bytes = 0 if given else SAMPLE_BYTES
    find = partial(survey_parts, mapped=mapped) if mapped else survey
    held_out, seed = settings["held_out"], settings["seed"]
    surveyed = find(corpus, held_out=held_out, seed=seed, sample_bytes=sample_bytes, progress=progress)
    if surveyed.num_tokenised and given is None:
        raise BadInput(f"{corpus.source} holds token ids already; say whose they are with --tokenizer")
    tokenizer = given or trained(surveyed.sample, vocab, progress)
    encode = partial(encode_parts, mapped=mapped) if mapped else encode_here
    encoded = encode(corpus, tokenizer=tokenizer, surveyed=surveyed, progress=progress)
    if settings.get("shuffle"):
        encoded = _shuffled(folder, tokenizer, settings, encoded, surveyed.text_bytes, progress)
    index = write_shards(folder, tokenizer, settings, encoded)
    return write_index(folder, index, surveyed.text_bytes, [f"{item.origin}: {item.why}" for item in surveyed.skipped])


def trained(texts: Sequence[str], vocab: int, progress: Progress) -> Tokenizer:
    progress(0, 1, "training the tokenizer")
    tokenizer = train_tokenizer(texts, vocab)
    progress(1, 1, "training the tokenizer")
    return tokenizer


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


def _shuffled(
    folder: Path,
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    encoded: Iterable[EncodedDocument],
    size: int,
    progress: Progress,
) -> Iterator[EncodedDocument]:
    """Shards in the order of the source first, then read in a random one: memory holds one document at a time."""
    with TemporaryDirectory(dir=folder, prefix=".in-order-") as ordered:
        index = write_shards(Path(ordered), tokenizer, settings, encoded)
        opened = {split: TokenShards.open(ordered, split, index=index) for split in SPLITS}
        yield from _mixed(opened, settings["seed"], size, progress)


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
