"""A survey of a corpus: how much there is, which documents are held out, and a sample to train a tokenizer on.

All of it depends on what the documents say, not on their order or the files they are in, and memory stays bounded.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from armillary.errors import BadData
from armillary.training.data.corpus import Corpus
from armillary.training.data.readers import Document, Skipped

Progress = Callable[[int, int, str], None]
"""called with (done, total, what): bytes of text, and the stage in a few words"""

_TOP = 2**64


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over a corpus gave: texts that are not blank, their size in UTF-8, documents that came as token
    ids, files left out, and a sample of the documents with the largest hashes (those held out come last). A document is
    held out when its hash with the `seed` is below `held_out_below`."""

    num_documents: int
    text_bytes: int
    num_tokenised: int
    skipped: tuple[Skipped, ...]
    sample: tuple[str, ...]
    held_out_below: int
    seed: int

    def is_held_out(self, document: Document) -> bool:
        return content_hash(document.content, self.seed) < self.held_out_below


def content_hash(content: bytes, seed: int) -> int:
    """64 bits that depend on the text and the seed only: copies of a document always land in the same split."""
    return int.from_bytes(blake2b(content, digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big")


@dataclass(frozen=True, kw_only=True)
class PartSurvey:
    """The same of some files of a corpus: the sample with hashes and sizes, and the lowest and highest hash."""

    num_documents: int
    text_bytes: int
    num_tokenised: int
    skipped: tuple[Skipped, ...]
    sample: tuple[tuple[int, int, str], ...]
    lowest: int
    highest: int


def survey(corpus: Corpus, *, held_out: float, seed: int, sample_bytes: int, progress: Progress) -> Survey:
    """Read the corpus once. A corpus without a single document is an error."""
    part = survey_part(corpus, seed=seed, sample_bytes=sample_bytes, progress=progress)
    return merge_surveys(
        corpus,
        [replace(part, skipped=part.skipped[len(corpus.skipped) :])],
        held_out=held_out,
        seed=seed,
        sample_bytes=sample_bytes,
    )


def survey_part(
    corpus: Corpus, *, seed: int, sample_bytes: int, progress: Progress = lambda done, total, what: None
) -> PartSurvey:
    """Read the files once; `merge_surveys` makes a survey of what was found in several parts."""
    skipped: list[Skipped] = []
    sample = Sample(sample_bytes)
    count, size, tokenised, total = 0, 0, 0, corpus.num_bytes
    lowest, highest = _TOP, -1
    for item in corpus.documents():
        if isinstance(item, Skipped):
            skipped.append(item)
            continue
        content = item.content
        number, length = content_hash(content, seed), len(content)
        lowest, highest = min(lowest, number), max(highest, number)
        if item.ids:
            tokenised += 1
        else:
            sample.add(_TOP - number, item.text, length)  # from the other end than what is held out
            size += length
        count += 1
        progress(min(size, total), total, "reading")
    return PartSurvey(
        num_documents=count,
        text_bytes=size,
        num_tokenised=tokenised,
        skipped=tuple(skipped),
        sample=sample.documents(),
        lowest=lowest,
        highest=highest,
    )


def merge_surveys(
    corpus: Corpus, parts: Sequence[PartSurvey], *, held_out: float, seed: int, sample_bytes: int
) -> Survey:
    """The survey of a corpus from those of its parts, which have the same sample as one pass: each keeps at least what
    the whole would keep of it."""
    skipped = [*corpus.skipped, *(item for part in parts for item in part.skipped)]
    if not any(part.num_documents for part in parts):
        raise BadData(f"{corpus.source} holds no text{_said(skipped)}; give other files")
    sample = Sample(sample_bytes)
    for part in parts:
        for number, length, text in part.sample:
            sample.add(number, text, length)
    lowest, highest = min(part.lowest for part in parts), max(part.highest for part in parts)
    return Survey(
        num_documents=sum(part.num_documents for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        num_tokenised=sum(part.num_tokenised for part in parts),
        skipped=tuple(skipped),
        sample=sample.texts(),
        held_out_below=_held_out_below(held_out, lowest, highest),
        seed=seed,
    )


def _held_out_below(held_out: float, lowest: int, highest: int) -> int:
    """The fraction as a hash; at least one document is held out, and at least one is not, where there are two."""
    if held_out == 0 or lowest == highest:
        return 0
    return min(max(int(held_out * _TOP), lowest + 1), highest)


def _said(skipped: list[Skipped]) -> str:
    if not skipped:
        return ""
    first = skipped[0]
    return f" ({len(skipped)} skipped: {first.origin} is {first.why}{', …' if len(skipped) > 1 else ''})"


class Sample:
    """The documents with the smallest hashes that fit into `limit` bytes: random, yet independent of their order."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._heap: list[tuple[int, int, str]] = []

    def add(self, number: int, text: str, length: int) -> None:
        if not self._limit or (self._heap and self._size >= self._limit and number >= -self._heap[0][0]):
            return
        heapq.heappush(self._heap, (-number, length, text))
        self._size += length
        while len(self._heap) > 1 and self._size - self._heap[0][1] >= self._limit:
            self._size -= heapq.heappop(self._heap)[1]

    def documents(self) -> tuple[tuple[int, int, str], ...]:
        """Hash, size and text of each."""
        return tuple((-number, length, text) for number, length, text in self._heap)

    def texts(self) -> tuple[str, ...]:
        return tuple(text for _, _, text in sorted(self._heap, reverse=True))
