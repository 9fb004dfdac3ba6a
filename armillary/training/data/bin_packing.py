"""Packing of complete documents into rows: best fit, longest first, so that few rows have padding and none is split
that fits into one.

Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). Longer documents are split into full
rows, and the rest of them is packed like the others.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Rows made of pieces: those from rows[r] to rows[r + 1] - 1 stand in row r, in this order."""

    starts: np.ndarray
    """where each piece begins in the row of ids, int64"""
    lengths: np.ndarray
    """positions each piece takes: one less than its ids, as its last one is only predicted, int64"""
    rows: np.ndarray
    """number of the first piece of each row, and of all pieces, int64"""

    @property
    def num_rows(self) -> int:
        return len(self.rows) - 1


def pack_documents(offsets: np.ndarray, sequence: int) -> Packed:
    """The documents between consecutive `offsets`, as rows of `sequence` positions."""
    return pack_pieces(*_pieces(offsets.astype(np.int64), sequence), sequence)


def pack_answers(offsets: np.ndarray, answers: np.ndarray, sequence: int) -> Packed:
    """Conversations: only the beginning of a long one is kept, because an answer without its question teaches little,
    and none in which nothing is to be learnt."""
    starts: np.ndarray = offsets[:-1].astype(np.int64)
    lengths = np.minimum(np.diff(offsets.astype(np.int64)) - 1, sequence)
    learnt = np.flatnonzero(answers)
    # targets of the positions start … start + length - 1 are the ids after them
    kept = np.searchsorted(learnt, starts + 1) < np.searchsorted(learnt, starts + 1 + np.maximum(lengths, 0))
    return pack_pieces(starts[kept], lengths[kept], sequence)


def pack_pieces(starts: np.ndarray, lengths: np.ndarray, sequence: int) -> Packed:
    """Pieces of at most `sequence` positions as rows."""
    bins = best_fit(lengths, sequence)
    order = np.argsort(bins, kind="stable")
    counts = np.bincount(bins)
    return Packed(starts=starts[order], lengths=lengths[order], rows=np.concatenate([[0], np.cumsum(counts)]))


def _pieces(offsets: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and positions of each piece; pieces of a document share one id, the target of the one before. A document
    of one id has nothing to predict and is left out."""
    positions = np.maximum(np.diff(offsets) - 1, 0)
    counts = -(-positions // sequence)
    document: np.ndarray = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = offsets[:-1][document] + number * sequence
    return starts, np.minimum(positions[document] - number * sequence, sequence)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, longest items first, each into the fullest bin that takes it. Items of one length are
    placed together, so the work grows with the number of different lengths, not of items."""
    bins: np.ndarray = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts, counts = np.unique(-lengths[order], return_index=True, return_counts=True)
    space = _Space(capacity)
    used = 0
    for size, first, count in zip((-sizes).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        items = order[first : first + count]
        while len(items):
            room, bin_number = space.take(size, len(items))
            if not len(bin_number):
                room, bin_number = capacity, np.arange(used, used + -(-len(items) // (capacity // size)))
                used += len(bin_number)
            bins[items[: len(bin_number)]] = bin_number
            items = items[len(bin_number) :]
            space.put(room - size, bin_number)
    return bins


class _Space:
    """Bins by the space they have left."""

    def __init__(self, capacity: int) -> None:
        self._bins: list[list[np.ndarray]] = [[] for _ in range(capacity)]
        self._any: np.ndarray = np.zeros(capacity, bool)

    def put(self, room: int, bins: np.ndarray) -> None:
        self._bins[room].append(bins)
        self._any[room] = True

    def take(self, size: int, count: int) -> tuple[int, np.ndarray]:
        """At most `count` bins with the same room, the least that takes `size`; none where no bin does."""
        rooms = self._any[size:]
        room = size + int(rooms.argmax()) if rooms.any() else 0
        if not room:
            return 0, np.empty(0, np.int64)
        bin_number = self._bins[room].pop()
        if len(bin_number) > count:
            self._bins[room].append(bin_number[count:])
            bin_number = bin_number[:count]
        self._any[room] = bool(self._bins[room])
        return room, bin_number
