"""Batches: windows of the token row with targets, positions and document numbers, as numpy arrays.

Names end in shapes: B rows of T tokens. A document never looks into another, nor predicts its first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from armillary.errors import BadData, BadInput
from armillary.training.data.order import sample_ids
from armillary.training.data.shards import TokenShards

IGNORED = -100
"""target of a position that has nothing to predict, as torch's cross entropy has it"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """What one step reads."""

    tokens_BT: np.ndarray
    """ids, int64"""
    targets_BT: np.ndarray
    """the id that follows, int64; IGNORED after a document's end and in padding"""
    positions_BT: np.ndarray
    """from 0 at each document start (and at the start of the window), int64"""
    documents_BT: np.ndarray
    """0, 1, 2 … along a row, int32: tokens attend within their own number"""

    @property
    def num_targets(self) -> int:
        """Positions that count in the loss."""
        return int((self.targets_BT != IGNORED).sum())

    def rows(self, start: int, stop: int) -> Batch:
        """Some of the rows, as a micro-batch."""
        return Batch(**{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Training batches: `at(step)` depends on the seed and the step only."""

    shards: TokenShards
    """the training split"""
    sequence: int
    """tokens in a row (T)"""
    batch: int
    """rows of a step over all ranks (B)"""
    seed: int = 0
    """of the order"""

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.batch < 1:
            raise BadInput(f"sequence {self.sequence} and batch {self.batch} must be at least 1; raise them")
        if self.num_samples < 1:
            raise BadData(
                f"{self.shards.folder} has {self.shards.num_tokens} training tokens, fewer than one sequence of "
                f"{self.sequence} and the token after it; use more text or --set train.sequence={self._fitting}"
            )

    @property
    def num_samples(self) -> int:
        """Windows of T + 1 tokens, each starting at the last token of the one before: every token is a target once."""
        return (self.shards.num_tokens - 1) // self.sequence

    @property
    def steps_per_epoch(self) -> float:
        return self.num_samples / self.batch

    @property
    def _fitting(self) -> int:
        return max(1, self.shards.num_tokens - 1)

    def at(self, step: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of one rank at a step; the ranks' rows in order are the batch of `world=1`."""
        if self.batch % world:
            raise _indivisible(self.batch, world)
        rows = self.batch // world
        ids = sample_ids(self.seed, step, self.batch, self.num_samples)[rank * rows : (rank + 1) * rows]
        return windows(self.shards, ids, self.sequence)


def validation_batches(
    shards: TokenShards, sequence: int, batch: int, *, limit: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """The row of tokens in order, at most `limit` batches. All have the same shape: the last is padded, with its
    padding IGNORED, so weigh losses by `num_targets`."""
    if batch % world:
        raise _indivisible(batch, world)
    num_windows = -(-max(0, shards.num_tokens - 1) // sequence)
    rows = batch // world
    for number in range(-(-num_windows // batch))[:limit]:
        first = number * batch + rank * rows
        yield windows(shards, np.arange(first, first + rows), sequence)


def _indivisible(batch: int, world: int) -> BadInput:
    return BadInput(f"a batch of {batch} rows does not divide among {world} ranks; use a multiple of {world}")


def windows(shards: TokenShards, numbers: np.ndarray, sequence: int) -> Batch:
    """The windows with these numbers, one a row."""
    rows = [_window(shards, int(number) * sequence, sequence) for number in numbers]
    tokens, targets, positions, documents = map(np.stack, zip(*rows, strict=True))
    return Batch(tokens_BT=tokens, targets_BT=targets, positions_BT=positions, documents_BT=documents)


def _window(shards: TokenShards, start: int, sequence: int) -> tuple[np.ndarray, ...]:
    """Tokens, targets, positions and documents from position `start`; a padding token is a document of its own."""
    ids = shards.read(start, sequence + 1)
    first: np.ndarray = np.zeros(sequence + 1, np.int64)
    begins: np.ndarray = shards.document_starts(start, len(ids)) - start
    first[begins] = begins
    padding = np.arange(len(ids), sequence + 1)
    first[padding] = padding
    first = np.maximum.accumulate(first)
    ids = np.pad(ids, (0, len(padding)))
    same = first[1:] == first[:-1]
    documents = np.concatenate([[0], np.cumsum(~same)])[:-1]
    positions = (np.arange(sequence + 1) - first)[:-1]
    return ids[:-1], np.where(same, ids[1:], IGNORED), positions, documents.astype(np.int32)
