"""An attention mask as kernels take it: flags, ranges of documents, lists of the blocks that a sparse mask allows.

Everything is computed on the device, so nothing waits for the CPU. Where document numbers never decrease along a row, a
document is one contiguous run; otherwise it may continue anywhere in the row.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from armillary.kernels.attention.attention import BLOCK
from armillary.kernels.core.launch import ceil_div, on, power_of_two

_LONGEST_BLOCK = 8192
_CHUNK, _MOST_CHUNKS = 1024, 16  # tokens of a program, at least, and programs of a row


@dataclass(frozen=True)
class Runs:
    """Per token, [B, T] int32; a token may see keys from `begin` on and be seen by queries before `end`."""

    documents: Tensor | None = None  # its document number in 32 bits, which compare faster
    begin: Tensor | None = None
    run: Tensor | None = None  # first token of its run
    end: Tensor | None = None
    run_end: Tensor | None = None  # one past the last token of its run


def document_runs(documents_BT: Tensor, *, ends: bool = True) -> Runs:
    """`ends`: whether ends are asked for, as the backward pass does; without, they are not written."""
    documents = documents_BT.contiguous()
    batch, length = documents.shape
    short, begin, run, end, run_end = (torch.empty_like(documents, dtype=torch.int32) for _ in range(5))
    block = min(_LONGEST_BLOCK, max(32, power_of_two(length)))
    chunk = min(block, max(_CHUNK, power_of_two(length) // _MOST_CHUNKS))
    if documents.numel():
        with on(documents):
            runs_kernel[(batch, ceil_div(length, chunk))](
                documents,
                short,
                begin,
                run,
                end,
                run_end,
                length,
                BLOCK=block,
                CHUNK=chunk,
                ENDS=ends,
                num_warps=16,
            )
    return Runs(short, begin, run, end, run_end)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs_kernel(
    doc_ptr,
    short_ptr,
    begin_ptr,
    run_ptr,
    end_ptr,
    run_end_ptr,
    T,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    ENDS: tl.constexpr,
):
    """One program per CHUNK tokens of a row: over the whole row, does any number decrease, where does the run begin
    that reaches into the chunk, and where does the one end that leaves it; then starts and ends inside."""
    row, first = tl.program_id(0).to(tl.int64) * T, tl.program_id(1) * CHUNK
    falls, latest, soonest = 0, 0, T
    for i in range(tl.cdiv(T, BLOCK)):
        at = i * BLOCK + tl.arange(0, BLOCK)
        inside = (at > 0) & (at < T)
        doc = tl.load(doc_ptr + row + at, mask=inside, other=0)
        before = tl.load(doc_ptr + row + at - 1, mask=inside, other=0)
        falls = tl.maximum(falls, tl.max(tl.where(doc < before, 1, 0), 0))
        latest = tl.maximum(latest, tl.max(tl.where((doc != before) & (at <= first), at, 0), 0))
        if ENDS:
            soonest = tl.minimum(soonest, tl.min(tl.where((doc != before) & (at >= first + CHUNK), at, T), 0))
    broken = falls > 0
    at = first + tl.arange(0, CHUNK)
    own = tl.load(doc_ptr + row + at, mask=at < T, other=0)
    tl.store(short_ptr + row + at, own.to(tl.int32), mask=at < T)
    before = tl.load(doc_ptr + row + at - 1, mask=(at > 0) & (at < T), other=0)
    starts = tl.where((own != before) & (at > 0) & (at < T), at, 0)
    run = tl.maximum(tl.associative_scan(starts, 0, _larger), latest)
    tl.store(run_ptr + row + at, run, mask=at < T)
    tl.store(begin_ptr + row + at, tl.where(broken, 0, run), mask=at < T)
    if ENDS:
        after = tl.load(doc_ptr + row + at + 1, mask=at + 1 < T, other=0)
        ends = tl.where((own != after) & (at + 1 < T), at + 1, T)
        run_end = tl.minimum(tl.associative_scan(ends, 0, _smaller, reverse=True), soonest)
        tl.store(run_end_ptr + row + at, run_end, mask=at < T)
        tl.store(end_ptr + row + at, tl.where(broken, T, run_end), mask=at < T)


# T queries, S keys, X and Y blocks of queries and keys


@dataclass(frozen=True)
class Lists:
    """Blocks of keys to visit per block of queries, or the other way round: those without a masked pair first, then the
    others, and the numbers of both. Lists are made when they are asked for: a kernel takes one of the two."""

    blocks_XY: Tensor
    plain: bool  # whether causality and the ends of the sequences are all that hides pairs of an allowed block
    causal: bool
    T: int
    S: int

    @property
    def by_query(self) -> tuple[Tensor, Tensor]:
        """(lists [X, Y], numbers [X, 2])."""
        return self._listed(self.blocks_XY, by_key=False)

    @property
    def by_key(self) -> tuple[Tensor, Tensor]:
        """(lists [Y, X], numbers [Y, 2])."""
        return self._listed(self.blocks_XY.t(), by_key=True)

    def _listed(self, blocks: Tensor, *, by_key: bool) -> tuple[Tensor, Tensor]:
        rows, columns = blocks.shape
        lists = torch.empty(rows, columns, dtype=torch.int32, device=blocks.device)
        counts = torch.empty(rows, 2, dtype=torch.int32, device=blocks.device)
        with on(blocks):
            lists_kernel[(rows,)](
                blocks,
                lists,
                counts,
                *blocks.stride(),
                columns,
                self.T,
                self.S,
                PLAIN=self.plain,
                CAUSAL=self.causal,
                BY_KEY=by_key,
                SIZE=BLOCK,
                COLUMNS=power_of_two(columns),
                num_warps=4,
            )
        return lists, counts


def mask_arguments(
    documents: Tensor | None,
    blocks: Tensor | None,
    window: int,
    softcap: float,
    causal: bool,
    slopes: Tensor | None,
    T: int,
    S: int,
    step: int,
    *,
    ends: bool,
) -> tuple[dict[str, Any], Runs, Lists | None]:
    """The kernels' flags, ranges and lists; `step` is the number of tokens that a kernel advances along a list at a
    time."""
    flags = {
        "CAUSAL": causal,
        "WINDOW": 0 < window < S,
        "DOCS": documents is not None,
        "SLOPES": slopes is not None,
        "CAPPED": softcap != 0.0,
        "LISTED": 0 if blocks is None else BLOCK // step,
    }
    runs = Runs() if documents is None else document_runs(documents, ends=ends)
    if blocks is None:
        return flags, runs, None
    return flags, runs, Lists(blocks.bool(), not flags["WINDOW"] and documents is None, causal, T, S)


@triton.jit(do_not_specialize=["columns", "T", "S"])
def lists_kernel(
    blocks_ptr,
    list_ptr,
    count_ptr,
    row_stride,
    column_stride,
    columns,
    T,
    S,
    PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BY_KEY: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program per row of a list; blocks that lie entirely after the queries are left out."""
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = column < columns
    allowed = tl.load(blocks_ptr + row * row_stride + column * column_stride, mask=inside, other=0) != 0
    query = (column if BY_KEY else row) * SIZE
    key = (row if BY_KEY else column) * SIZE
    full = (query + SIZE <= T) & (key + SIZE <= S) & PLAIN
    if CAUSAL:
        allowed = allowed & (key <= query + SIZE - 1 + S - T)
        full = full & (key + SIZE - 1 <= query + S - T)
    full, partial = (allowed & full).to(tl.int32), (allowed & (full == 0)).to(tl.int32)
    num_full = tl.sum(full, 0)
    at = tl.where(full > 0, tl.cumsum(full, 0), num_full + tl.cumsum(partial, 0)) - 1
    tl.store(list_ptr + row * columns + at, column, mask=(full + partial) > 0)
    tl.store(count_ptr + 2 * row, num_full)
    tl.store(count_ptr + 2 * row + 1, num_full + tl.sum(partial, 0))
