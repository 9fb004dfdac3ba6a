"""Packing of complete documents into rows: best fit, longest first, so that few rows have padding and none is split
that fits into one.

Ding et al., "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830). Longer documents are split into full
rows, and the rest of them is packed like the others.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """Rows made of pieces: those from rows[r] to rows[r + 1] - 1 stand in row r, in this order. `starts` are their
    places in the row of ids; `lengths` are positions, one less than ids, as the last one is only predicted. All
    int64."""

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.rows) - 1


def pack_documents(offsets: np.ndarray, sequence: int) -> Packed:
    """The documents between consecutive `offsets`, as rows of `sequence` positions."""
    return pack_pieces(*_pieces(offsets.astype(np.int64), sequence), sequence)


def pack_answers(offsets: np.ndarray, answers: np.ndarray, sequence: int) -> Packed:
    """Conversations: only the beginning of a long one is packed, because an answer without its question teaches little,
    and none in which nothing is to be learnt."""
    starts: np.ndarray = offsets[:-1].astype(np.int64)
    lengths = np.minimum(np.diff(offsets.astype(np.int64)) - 1, sequence)
    learnt = np.flatnonzero(answers)
    # targets of the positions start … start + length - 1 are the ids after them
    learns = np.searchsorted(learnt, starts + 1) < np.searchsorted(learnt, starts + 1 + np.maximum(lengths, 0))
    return pack_pieces(starts[learns], lengths[learns], sequence)


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
            free, bin_number = space.take(size, len(items))
            if not len(bin_number):
                free, bin_number = capacity, np.arange(used, used + -(-len(items) // (capacity // size)))
                used += len(bin_number)
            bins[items[: len(bin_number)]] = bin_number
            items = items[len(bin_number) :]
            space.put(free - size, bin_number)
    return bins


class _Space:
    """Bins by the space they have left."""

    def __init__(self, capacity: int) -> None:
        self._bins: list[list[np.ndarray]] = [[] for _ in range(capacity)]
        self._any: np.ndarray = np.zeros(capacity, bool)

    def put(self, free: int, bins: np.ndarray) -> None:
        self._bins[free].append(bins)
        self._any[free] = True

    def take(self, size: int, count: int) -> tuple[int, np.ndarray]:
        """At most `count` bins with the same free space, the least that takes `size`; none where no bin does."""
        if not self._any[size:].any():
            return 0, np.empty(0, np.int64)
        free = size + int(self._any[size:].argmax())
        bin_number = self._bins[free].pop()
        if len(bin_number) > count:
            self._bins[free].append(bin_number[count:])
        self._any[free] = bool(self._bins[free])
        return free, bin_number[:count]
