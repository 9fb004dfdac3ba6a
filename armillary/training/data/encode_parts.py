"""The documents of a corpus as token ids: in one pass here, or in parts that are worked on anywhere, with one result.

Parts are runs of whole files. `mapped` is how they are worked on: the built-in map here, tasks of a cluster elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.training.data.corpus import Corpus
from armillary.training.data.corpus_survey import PartSurvey, Progress, Survey, merge_surveys, survey_part
from armillary.training.data.readers import Document
from armillary.training.data.shard_index import Split

PART_BYTES = 16_000_000
"""of files per part: seconds of work, and a result that fits into memory many times"""

_BATCH_BYTES = 1_000_000

EncodedDocument = tuple[Split, Sequence[int] | np.ndarray, Sequence[bool] | None]
"""split, token ids, and which of them are to be learnt (None: all)"""
Mapped = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""like the built-in map: results in the order of the parts"""


def encode_here(
    corpus: Corpus, *, tokenizer: Tokenizer, surveyed: Survey, progress: Progress
) -> Iterator[EncodedDocument]:
    """Every document of the corpus in its order, encoded on all cores of this machine."""
    done, total = 0, surveyed.text_bytes
    for batch in _batched(corpus):
        for document, ids in _encode(batch, tokenizer):
            yield _split(document, surveyed), ids, None
        done += _size(batch)
        progress(min(done, total), total, "encoding")


def _encode(batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, Sequence[int]]]:
    texts = iter(tokenizer.encode_documents([document.text for document in batch if not document.ids]))
    for document in batch:
        yield document, _given(document, tokenizer) if document.ids else next(texts)


def _split(document: Document, surveyed: Survey) -> Split:
    return "validation" if surveyed.is_held_out(document) else "train"


def _size(batch: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in batch)


def _given(document: Document, tokenizer: Tokenizer) -> Sequence[int]:
    """Ids that came with the source, closed by an end of text where there is none."""
    vocab, end = tokenizer.vocab_size, tokenizer.eos_id
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


# --- in parts


def parts_of(corpus: Corpus, part_bytes: int = PART_BYTES) -> list[Corpus]:
    """Runs of files of at least so many bytes each; workers have another working folder, so paths are absolute."""
    root = corpus.root.absolute() if isinstance(corpus.root, Path) else corpus.root
    parts: list[Corpus] = []
    names: list[str] = []
    size = 0
    for name, num_bytes in zip(corpus.names, corpus.sizes(), strict=True):
        names.append(name)
        size += num_bytes
        if size >= part_bytes:
            parts.append(replace(corpus, root=root, names=tuple(names), skipped=()))
            names, size = [], 0
    if names:
        parts.append(replace(corpus, root=root, names=tuple(names), skipped=()))
    return parts


def survey_parts(
    corpus: Corpus, mapped: Mapped, *, held_out: float, seed: int, sample_bytes: int, progress: Progress
) -> Survey:
    total, size = corpus.num_bytes, 0
    surveys: list[PartSurvey] = []
    for part in mapped(partial(survey_part, seed=seed, sample_bytes=sample_bytes), parts_of(corpus)):
        surveys.append(part)
        size += part.text_bytes
        progress(min(size, total), total, "reading")
    return merge_surveys(corpus, surveys, held_out=held_out, seed=seed, sample_bytes=sample_bytes)


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """The documents of a part, one after the other: ids, where each ends, and which are held out."""

    ids: np.ndarray
    ends: np.ndarray
    held_out: np.ndarray
    text_bytes: int


def encode_part(corpus: Corpus, *, tokenizer: Tokenizer, surveyed: Survey) -> EncodedPart:
    arrays, held_out, size = [], [], 0
    for batch in _batched(corpus):
        for document, ids in _encode(batch, tokenizer):
            arrays.append(np.asarray(ids, dtype=np.uint32))
            held_out.append(surveyed.is_held_out(document))
        size += _size(batch)
    ends = np.cumsum([len(ids) for ids in arrays], dtype=np.int64)
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.uint32)
    return EncodedPart(ids=flat, ends=ends, held_out=np.array(held_out, dtype=bool), text_bytes=size)


def encode_parts(
    corpus: Corpus, mapped: Mapped, *, tokenizer: Tokenizer, surveyed: Survey, progress: Progress
) -> Iterator[EncodedDocument]:
    """Every document of the corpus in its order."""
    done, total = 0, surveyed.text_bytes
    slim = replace(surveyed, sample=(), skipped=())  # what says which documents are held out
    for part in mapped(partial(encode_part, tokenizer=tokenizer, surveyed=slim), parts_of(corpus)):
        begin = 0
        for end, held_out in zip(part.ends.tolist(), part.held_out.tolist(), strict=True):
            yield "validation" if held_out else "train", part.ids[begin:end], None
            begin = end
        done += part.text_bytes
        progress(min(done, total), total, "encoding")
