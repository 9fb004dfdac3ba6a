"""A batch: rows of token ids with targets, positions and document numbers, as numpy arrays, and who gives batches.

Names end in shapes: B rows of T tokens.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORED = -100
"""target of a position that has nothing to predict, as torch's cross entropy has it"""
LAYOUT = {
    "tokens_BT": np.dtype(np.int64),
    "targets_BT": np.dtype(np.int64),
    "positions_BT": np.dtype(np.int64),
    "documents_BT": np.dtype(np.int32),
}
"""the arrays of a batch, in the order in which they lie in shared and in pinned memory"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one step reads: ids; the ids that follow as targets (IGNORED after a document's end, in padding and where
    nothing is to be learnt); positions from 0 at each document start and at the start of the row; and document
    numbers 0, 1, 2 … along a row, within which tokens attend (padding has the last one)."""

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    positions_BT: np.ndarray
    documents_BT: np.ndarray

    @property
    def num_targets(self) -> int:
        """Positions that count in the loss."""
        return int((self.targets_BT != IGNORED).sum())

    @property
    def checksum(self) -> int:
        """Sum of the rows' CRC-32 over their token ids: the same for the same rows in any order and on any number of
        ranks; blank rows count nothing."""
        return sum(zlib.crc32(row.tobytes()) for row in self.tokens_BT.astype(np.int32) if row.any())

    def padded(self, rows: int) -> Batch:
        """With blank rows at the end, so that there are `rows`."""
        missing = rows - len(self.tokens_BT)
        if not missing:
            return self
        blank = blank_rows(missing, self.tokens_BT.shape[1])
        return Batch(**{name: np.concatenate([getattr(self, name), blank[name]]) for name in LAYOUT})


def blank_rows(rows: int, sequence: int) -> dict[str, np.ndarray]:
    """Rows in which nothing counts: one document each, without targets."""
    arrays: dict[str, np.ndarray] = {name: np.zeros((rows, sequence), dtype) for name, dtype in LAYOUT.items()}
    arrays["targets_BT"].fill(IGNORED)
    arrays["positions_BT"][:] = np.arange(sequence)
    return arrays


class BatchSource(Protocol):
    """What a trainer and its loader read from: token shards, blends of them, or conversations. It must pickle, because
    worker processes read too, and be quick to unpickle: files are reopened, not pickled."""

    @property
    def sequence(self) -> int:
        """Tokens in a row (T)."""

    @property
    def batch(self) -> int:
        """Rows of a step over all ranks (B)."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps after which everything was seen once."""

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step: a pure function of its arguments and the seed. All ranks have the same
        number (`rows_per_rank`); where the batch does not divide among them, some end with a blank row."""


def rows_per_rank(batch: int, world: int) -> int:
    """Rows of each rank, blank ones included."""
    return -(-batch // world)
