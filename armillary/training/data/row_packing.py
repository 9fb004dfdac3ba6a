"""Rows of T tokens from token shards: windows of the stream of documents, or rows of complete documents.

Both number their rows shard by shard. A document never attends to another, nor predicts its first token.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from armillary.store.atomic import staged_folder
from armillary.store.lock import locked
from armillary.training.data.batch import IGNORED, Batch
from armillary.training.data.bin_packing import Packed, pack_answers, pack_documents
from armillary.training.data.shards import TokenShards

Packing = Literal["stream", "whole"]
_ARRAYS = ("edges", "starts", "lengths", "rows")


class Rows(Protocol):
    """Numbered rows."""

    @property
    def edges(self) -> np.ndarray:
        """Number of the first row of each shard, and of all rows."""

    def make(self, numbers: np.ndarray) -> Batch:
        """The rows with these numbers."""


def make_rows(shards: TokenShards, sequence: int, packing: Packing) -> Rows:
    return (StreamRows if packing == "stream" else WholeRows)(shards=shards, sequence=sequence)


@dataclass(frozen=True, kw_only=True)
class StreamRows:
    """Windows of T + 1 ids, each starting at the last one of the window before: every id is a target once. Documents
    are split where a window ends; what is left at the end of the last shard is dropped, or padded on request."""

    shards: TokenShards
    sequence: int

    @property
    def edges(self) -> np.ndarray:
        """A window belongs to the shard it starts in."""
        num_rows = max(0, self.shards.num_tokens - 1) // self.sequence
        edges: np.ndarray = np.minimum(-(-self.shards.starts // self.sequence), num_rows)
        return edges

    def make(self, numbers: np.ndarray) -> Batch:
        """Windows may reach beyond the end: padding is a document of its own, and not learnt."""
        ids, first, learnt = self._read(numbers)
        first = np.maximum.accumulate(first, axis=1)
        same = first[:, 1:] == first[:, :-1]
        documents = np.cumsum(~same, axis=1, dtype=np.int32)
        return Batch(
            tokens_BT=ids[:, :-1],
            targets_BT=np.where(same & learnt[:, 1:], ids[:, 1:], IGNORED),
            positions_BT=np.arange(self.sequence) - first[:, :-1],
            documents_BT=np.concatenate([np.zeros((len(ids), 1), np.int32), documents[:, :-1]], axis=1),
        )

    def _read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, the place at each document's start, and what may be learnt, each for T + 1 positions per row."""
        shape = (len(numbers), self.sequence + 1)
        ids: np.ndarray = np.zeros(shape, np.int64)
        first: np.ndarray = np.zeros(shape, np.int64)
        learnt: np.ndarray = np.zeros(shape, bool)
        for row, number in enumerate(numbers.tolist()):
            start = number * self.sequence
            tokens = self.shards.read(start, shape[1])
            count = len(tokens)
            begins = self.shards.document_starts(start, count) - start
            ids[row, :count], first[row, begins] = tokens, begins
            first[row, count : count + 1] = count
            learnt[row, :count] = self.shards.read_answers(start, count) if self.shards.has_answers else True
        return ids, first, learnt


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """Rows of complete documents by best fit, shard by shard; a row ends in padding where nothing fits."""

    shards: TokenShards
    sequence: int

    @property
    def edges(self) -> np.ndarray:
        return self._table[0]

    @cached_property
    def _table(self) -> tuple[np.ndarray, Packed]:
        return _packed_once(self.shards, self.sequence)

    def make(self, numbers: np.ndarray) -> Batch:
        rows = [self._row(int(number)) for number in numbers]
        tokens, targets, positions, documents = map(np.stack, zip(*rows, strict=True))
        return Batch(tokens_BT=tokens, targets_BT=targets, positions_BT=positions, documents_BT=documents)

    def pieces(self, number: int) -> list[tuple[int, int]]:
        """(start, length) of the documents of a row."""
        packed = self._table[1]
        span = slice(int(packed.rows[number]), int(packed.rows[number + 1]))
        return list(zip(packed.starts[span].tolist(), packed.lengths[span].tolist(), strict=True))

    def _row(self, number: int) -> tuple[np.ndarray, ...]:
        tokens: np.ndarray = np.zeros(self.sequence, np.int64)
        positions: np.ndarray = np.zeros(self.sequence, np.int64)
        targets: np.ndarray = np.full(self.sequence, IGNORED, np.int64)
        documents: np.ndarray = np.zeros(self.sequence, np.int32)
        at, count = 0, 0
        for start, length in self.pieces(number):
            here = slice(at, at + length)
            ids = self.shards.read(start, length + 1)
            tokens[here], targets[here] = ids[:-1], ids[1:]
            positions[here], documents[here] = np.arange(length), count
            if self.shards.has_answers:
                targets[here][~self.shards.read_answers(start + 1, length)] = IGNORED
            at, count = at + length, count + 1
        positions[at:], documents[at:] = np.arange(self.sequence - at), count
        return tokens, targets, positions, documents


def _packed_once(shards: TokenShards, sequence: int) -> tuple[np.ndarray, Packed]:
    """Row edges of the shards and the table of all pieces; kept in the cache, where there is one, because every rank
    and every worker needs it."""
    if shards.cache is None:
        return _pack(shards, sequence)
    facts = [(shard.offsets_sha256, shard.answers_sha256, shard.tokens) for shard in shards.index.splits[shards.split]]
    tag = hashlib.sha256(repr((facts, sequence)).encode()).hexdigest()[:16]
    folder = shards.cache.folder / "packed" / tag
    if not folder.is_dir():
        with locked(folder.parent / f".lock-{tag}"):
            if not folder.is_dir():
                edges, packed = _pack(shards, sequence)
                arrays = (edges, packed.starts, packed.lengths, packed.rows)
                with staged_folder(folder) as staged:
                    for name, array in zip(_ARRAYS, arrays, strict=True):
                        np.save(staged / f"{name}.npy", array)
    edges, starts, lengths, rows = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
    return np.asarray(edges), Packed(starts=starts, lengths=lengths, rows=rows)


def _pack(shards: TokenShards, sequence: int) -> tuple[np.ndarray, Packed]:
    edges, pieces = [0], 0
    starts: list[np.ndarray] = [np.zeros(0, np.int64)]
    lengths: list[np.ndarray] = [np.zeros(0, np.int64)]
    rows: list[np.ndarray] = [np.zeros(1, np.int64)]
    for shard in range(shards.num_shards):
        offsets = shards.files.offsets(shard)
        packed = (
            pack_answers(offsets, shards.files.answers(shard), sequence)
            if shards.has_answers
            else pack_documents(offsets, sequence)
        )
        starts.append(packed.starts + shards.starts[shard])
        lengths.append(packed.lengths)
        rows.append(packed.rows[1:] + pieces)
        edges.append(edges[-1] + packed.num_rows)
        pieces += len(packed.starts)
    joined = Packed(starts=np.concatenate(starts), lengths=np.concatenate(lengths), rows=np.concatenate(rows))
    return np.array(edges), joined
