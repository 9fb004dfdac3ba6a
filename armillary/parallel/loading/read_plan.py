"""Which rank reads which bytes: a pure function of what is stored and what each rank of a machine needs.

Every byte is read once per machine. What one rank needs it reads itself; what several need is divided among them, and
the reader forwards it. Rows that are sharded by columns are read in full rows, contiguous in the file, where the ranks
of a machine need all columns together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from armillary.model.weights.row_map import Run, matrix_shape

BLOCK_BYTES = 4 << 20
"""read and forwarded at a time"""
SHARED_BYTES = 256 << 10
"""from which on the ranks that need the same rows divide them among themselves"""


class Span(NamedTuple):
    """From `begin` up to and without `end`."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.begin)


class Need(NamedTuple):
    """What a rank holds of a tensor: some of its rows (in order, not adjacent) and, of those, adjacent columns."""

    rows: tuple[Span, ...]
    columns: Span


class StoredRows(NamedTuple):
    """Rows of a stored tensor that are one after the other in a file: all of them, or those of a checkpoint's chunk."""

    path: str
    offset: int  # byte of the first row
    rows: Span  # of the tensor
    columns: Span
    dtype: torch.dtype


class Use(NamedTuple):
    """Where a rank puts what was read: its columns of it, in every `step`-th of its own rows from `row` on."""

    rank: int
    columns: Span  # of the stored tensor
    row: int
    step: int
    column: int  # of its own
    transposed: bool = False  # columns of what was read become rows


class Twin(NamedTuple):
    """A second copy of a stored tensor, which is compared with the first."""

    stored: StoredRows
    differs: str  # the error where it is not equal


class Read(NamedTuple):
    """Rows of a tensor that `reader` reads and forwards to the other ranks that use them."""

    name: str  # of our tensor
    stored: StoredRows
    rows: Span
    columns: Span
    reader: int
    uses: tuple[Use, ...]
    twin: Twin | None = None

    @property
    def nbytes(self) -> int:
        return self.rows.size * self.columns.size * self.stored.dtype.itemsize


class Source(NamedTuple):
    """One of our tensors: how its rows map to those of its stored tensors, and where these are."""

    name: str
    runs: Sequence[Run]
    stored: Sequence[Sequence[StoredRows]]  # of each tensor that it is joined from
    twin: Twin | None = None  # of a tensor that is stored in one piece
    transposed: bool = False  # stored as one tensor per expert, whose columns the runs map to rows of ours


# --- what a rank needs


def box_need(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Need:
    """Of a rank that holds a box of a tensor."""
    if len(shape) < 2:
        (begin, count) = (offsets[0], sizes[0]) if shape else (0, 1)
        return Need((Span(begin, begin + count),), Span(0, 1))
    rows = [Span(0, 1)]
    for size, offset, count in zip(shape[:-1], offsets[:-1], sizes[:-1], strict=True):
        if count == size:
            rows = [Span(span.begin * size, span.end * size) for span in rows]
        else:
            rows = [
                Span(number * size + offset, number * size + offset + count)
                for span in rows
                for number in range(span.begin, span.end)
            ]
    return Need(tuple(span for span in rows if span.size), Span(offsets[-1], offsets[-1] + sizes[-1]))


def shard_box(shape: Sequence[int], shards: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, sizes) of the shard that is left after each (dim, number of ranks, rank), in this order; where sizes do
    not divide, the last ranks get less or nothing, as `torch.chunk` does it."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, count, rank in shards:
        each = -(-sizes[dim] // count)
        begin = min(rank * each, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(each, sizes[dim] - begin)
    return tuple(offsets), tuple(sizes)


def box_rows(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], path: str, offset: int, dtype: torch.dtype
) -> list[StoredRows]:
    """Where a box of a tensor is that is stored contiguously from byte `offset` on."""
    need, at, stored = box_need(shape, offsets, sizes), offset, []
    for span in need.rows:
        stored.append(StoredRows(path, at, span, need.columns, dtype))
        at += span.size * need.columns.size * dtype.itemsize
    assert at - offset == prod(sizes) * dtype.itemsize
    return stored


def expert_rows(path: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> list[list[StoredRows]]:
    """Of each expert of a tensor [E, inputs, outputs] that is stored in one piece."""
    experts, rows, columns = shape
    step = rows * columns * dtype.itemsize
    return [[StoredRows(path, offset + e * step, Span(0, rows), Span(0, columns), dtype)] for e in range(experts)]


def tensor_rows(path: str, offset: int, shape: Sequence[int], dtype: torch.dtype) -> StoredRows:
    """Of a tensor that is stored in one piece."""
    rows, columns = matrix_shape(shape)
    return StoredRows(path, offset, Span(0, rows), Span(0, columns), dtype)


# --- who reads what


def plan_reads(sources: Iterable[Source], needs: Mapping[int, Mapping[str, Need]]) -> list[Read]:
    """The reads of the ranks of one machine, by rank and tensor name what they need; the same on each of them, and in
    the order in which all of them go through it."""
    loads = dict.fromkeys(sorted(needs), 0)
    reads: list[Read] = []
    for source in sources:
        of_ranks = {rank: needs[rank][source.name] for rank in loads if source.name in needs[rank]}
        for stored, rows, uses in _segments(source, of_ranks):
            for read in _blocks(source.name, stored, rows, uses):
                reader = min((use.rank for use in uses), key=lambda rank: (loads[rank], rank))
                loads[reader] += read.nbytes
                reads.append(read._replace(reader=reader, twin=source.twin))
    return reads


class _Piece(NamedTuple):
    """Rows of a stored tensor that one rank needs."""

    rows: Span
    use: Use


def _segments(source: Source, needs: Mapping[int, Need]) -> Iterator[tuple[StoredRows, Span, list[Use]]]:
    """Rows that are stored together and needed by the same ranks."""
    pieces: dict[StoredRows, list[_Piece]] = {}
    tensors: dict[StoredRows, int] = {}
    for rank, need in needs.items():
        for number, piece in _pieces(source, need, rank):
            for stored in source.stored[number]:
                if part := _intersection(piece, stored):
                    pieces.setdefault(stored, []).append(part)
                    tensors[stored] = number
    for stored in sorted(pieces, key=lambda each: (tensors[each], each.rows, each.columns)):
        for rows, uses in _split(pieces[stored]):
            yield stored, rows, uses


def _pieces(source: Source, need: Need, rank: int) -> Iterator[tuple[int, _Piece]]:
    """(number of the stored tensor, rows of it) that make up a rank's rows."""
    if not need.columns.size:
        return
    begins = [span.begin for span in need.rows]
    before = [0]
    for span in need.rows:
        before.append(before[-1] + span.size)
    for run in source.runs:
        last = run.target + run.step * (run.num_rows - 1)
        for number in range(max(0, bisect_right(begins, run.target) - 1), bisect_right(begins, last)):
            span = need.rows[number]
            first = max(0, -(-(span.begin - run.target) // run.step))
            end = min(run.num_rows, -(-(span.end - run.target) // run.step))
            if first < end:
                own = before[number] + run.target + run.step * first - span.begin
                mapped = Span(run.row + first, run.row + end)
                rows, columns = (need.columns, mapped) if source.transposed else (mapped, need.columns)
                yield run.source, _Piece(rows, Use(rank, columns, own, run.step, 0, source.transposed))


def _intersection(piece: _Piece, stored: StoredRows) -> _Piece | None:
    """What of a piece is in these stored rows."""
    use = piece.use
    rows, columns = _common(piece.rows, stored.rows), _common(use.columns, stored.columns)
    if not rows.size or not columns.size:
        return None
    moved = _advanced(use, rows.begin - piece.rows.begin)
    if not use.transposed:  # then all columns are stored together
        moved = moved._replace(column=columns.begin - use.columns.begin)
    return _Piece(rows, moved._replace(columns=columns))


def _advanced(use: Use, rows: int) -> Use:
    """The use of what is stored so many rows further on."""
    if use.transposed:
        return use._replace(column=use.column + rows)
    return use._replace(row=use.row + rows * use.step)


def _common(first: Span, second: Span) -> Span:
    return Span(max(first.begin, second.begin), min(first.end, second.end))


def _split(pieces: list[_Piece]) -> Iterator[tuple[Span, list[Use]]]:
    """Rows from one boundary of any piece to the next, with the ranks that use them."""
    edges = sorted({edge for piece in pieces for edge in piece.rows})
    pieces = sorted(pieces, key=lambda piece: piece.rows)
    active: list[_Piece] = []
    at = 0
    for rows in (Span(*pair) for pair in pairwise(edges)):
        active = [piece for piece in active if piece.rows.end > rows.begin]
        while at < len(pieces) and pieces[at].rows.begin <= rows.begin:
            active.append(pieces[at])
            at += 1
        if active:
            yield rows, [_advanced(piece.use, rows.begin - piece.rows.begin) for piece in active]


def _blocks(name: str, stored: StoredRows, rows: Span, uses: list[Use]) -> Iterator[Read]:
    """At most BLOCK_BYTES each, and one for each rank that could read it, where that is worth a message."""
    columns = Span(min(use.columns.begin for use in uses), max(use.columns.end for use in uses))
    row_bytes = columns.size * stored.dtype.itemsize
    height = max(1, BLOCK_BYTES // row_bytes)
    if rows.size * row_bytes >= SHARED_BYTES:
        height = min(height, -(-rows.size // len({use.rank for use in uses})))
    for begin in range(rows.begin, rows.end, height):
        part = Span(begin, min(begin + height, rows.end))
        moved = tuple(_advanced(use, begin - rows.begin) for use in uses)
        yield Read(name, stored, part, columns, uses[0].rank, moved)
