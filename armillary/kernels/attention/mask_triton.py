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
from armillary.kernels.core.launch import on, power_of_two

_LONGEST_BLOCK = 4096


@dataclass(frozen=True)
class Runs:
    """Per token, [B, T] int32; a token may see keys from `begin` on and be seen by queries before `end`."""

    documents: Tensor | None = None  # its document number in 32 bits, which compare faster
    begin: Tensor | None = None
    run: Tensor | None = None  # first token of its run
    end: Tensor | None = None
    run_end: Tensor | None = None  # one past the last token of its run


def document_runs(documents_BT: Tensor) -> Runs:
    documents = documents_BT.contiguous()
    batch, length = documents.shape
    short, begin, run, end, run_end = (torch.empty_like(documents, dtype=torch.int32) for _ in range(5))
    block = min(_LONGEST_BLOCK, max(32, power_of_two(length)))
    if documents.numel():
        with on(documents):
            runs_kernel[(batch,)](documents, short, begin, run, end, run_end, length, BLOCK=block, num_warps=8)
    return Runs(short, begin, run, end, run_end)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs_kernel(doc_ptr, short_ptr, begin_ptr, run_ptr, end_ptr, run_end_ptr, T, BLOCK: tl.constexpr):
    """One program per row: does any number decrease; then starts from the left, then ends from the right."""
    row = tl.program_id(0).to(tl.int64) * T
    index = tl.arange(0, BLOCK)
    blocks = tl.cdiv(T, BLOCK)
    falls = tl.zeros((BLOCK,), tl.int32)
    for i in range(blocks):
        at = i * BLOCK + index
        inside = (at > 0) & (at < T)
        doc = tl.load(doc_ptr + row + at, mask=at < T, other=0)
        tl.store(short_ptr + row + at, doc.to(tl.int32), mask=at < T)
        before = tl.load(doc_ptr + row + at - 1, mask=inside, other=0)
        doc = tl.where(inside, doc, 0)
        falls = tl.maximum(falls, tl.where(doc < before, 1, 0))
    broken = tl.max(falls, 0) > 0
    latest = tl.zeros((1,), tl.int32)
    for i in range(blocks):
        at = i * BLOCK + index
        inside = (at > 0) & (at < T)
        doc = tl.load(doc_ptr + row + at, mask=inside, other=0)
        before = tl.load(doc_ptr + row + at - 1, mask=inside, other=0)
        run = tl.maximum(tl.associative_scan(tl.where(doc != before, at, 0), 0, _larger), latest)
        tl.store(run_ptr + row + at, run, mask=at < T)
        tl.store(begin_ptr + row + at, tl.where(broken, 0, run), mask=at < T)
        latest = tl.maximum(latest, tl.max(run, 0))
    soonest = tl.zeros((1,), tl.int32) + T
    for i in range(blocks):
        at = (blocks - 1 - i) * BLOCK + index
        inside = at + 1 < T
        doc = tl.load(doc_ptr + row + at, mask=inside, other=0)
        after = tl.load(doc_ptr + row + at + 1, mask=inside, other=0)
        ends = tl.associative_scan(tl.where(doc != after, at + 1, T), 0, _smaller, reverse=True)
        run_end = tl.minimum(ends, soonest)
        tl.store(run_end_ptr + row + at, run_end, mask=at < T)
        tl.store(end_ptr + row + at, tl.where(broken, T, run_end), mask=at < T)
        soonest = tl.minimum(soonest, tl.min(run_end, 0))


# T queries, S keys, X and Y blocks of queries and keys


@dataclass(frozen=True)
class Lists:
    """Blocks to visit, the allowed ones first, and their number."""

    by_query: tuple[Tensor, Tensor]
    by_key: tuple[Tensor, Tensor]


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
    runs = Runs() if documents is None else document_runs(documents)
    return flags, runs, None if blocks is None else _lists(blocks, causal, T, S)


def _lists(blocks_XY: Tensor, causal: bool, T: int, S: int) -> Lists:
    blocks = blocks_XY.bool()
    if causal:  # blocks that lie entirely after the queries are left out
        last = (torch.arange(blocks.shape[0], device=blocks.device) + 1) * BLOCK - 1 + S - T
        blocks = blocks & (torch.arange(blocks.shape[1], device=blocks.device) * BLOCK <= last[:, None])
    return Lists(_list(blocks), _list(blocks.t()))


def _list(blocks: Tensor) -> tuple[Tensor, Tensor]:
    order = blocks.int().argsort(dim=1, descending=True, stable=True)
    return order.int().contiguous(), blocks.sum(1).int()
