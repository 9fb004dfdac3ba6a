"""What is in a folder of token shards: sizes, lengths of documents, and what each way of packing would make of them."""

from dataclasses import dataclass

import numpy as np

from armillary.training.data.row_packing import StreamRows, WholeRows
from armillary.training.data.shards import TokenShards


@dataclass(frozen=True, kw_only=True)
class About:
    """One split of a folder: ids (ends of text included), texts or conversations, tokens to be learnt where a mask
    says which, and the lengths of documents in tokens."""

    split: str
    shards: int
    tokens: int
    documents: int
    answers: int | None
    num_bytes: int
    median_length: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What one way of packing makes of a split: rows of an epoch, the fraction of documents that are cut, and of
    positions without a token."""

    packing: str
    rows: int
    cut_fraction: float
    padding_fraction: float


def about(shards: TokenShards) -> About:
    lengths = document_lengths(shards)
    numbers = range(shards.num_shards)
    answers = sum(int(np.count_nonzero(shards.files.answers(n))) for n in numbers) if shards.has_answers else None
    return About(
        split=shards.split,
        shards=shards.num_shards,
        tokens=shards.num_tokens,
        documents=shards.num_documents,
        answers=answers,
        num_bytes=sum(shards.files.num_bytes(number) for number in numbers),
        median_length=int(np.median(lengths)) if len(lengths) else 0,
        longest=int(lengths.max(initial=0)),
    )


def document_lengths(shards: TokenShards) -> np.ndarray:
    """Tokens of each document."""
    parts = [np.diff(shards.files.offsets(number).astype(np.int64)) for number in range(shards.num_shards)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def fits(shards: TokenShards, sequence: int) -> tuple[Fit, Fit]:
    """Both ways of packing at a sequence length."""
    lengths = document_lengths(shards)
    ends = np.cumsum(lengths)
    crossing = (ends - lengths) // sequence != np.maximum(ends - 2, ends - lengths) // sequence
    stream = Fit(
        packing="stream",
        rows=int(StreamRows(shards=shards, sequence=sequence).edges[-1]),
        cut_fraction=float(crossing.mean()) if len(lengths) else 0.0,
        padding_fraction=0.0,
    )
    rows = int(WholeRows(shards=shards, sequence=sequence).edges[-1])
    used = int(np.maximum(lengths - 1, 0).sum())
    fit = Fit(
        packing="whole",
        rows=rows,
        cut_fraction=float((lengths > sequence + 1).mean()) if len(lengths) else 0.0,
        padding_fraction=1 - used / (rows * sequence) if rows else 0.0,
    )
    return stream, fit
