"""Carries out a read plan: reads ahead in threads, forwards to the ranks of this machine, fills the local shards.

Beside its shards a rank holds a few blocks (`read_plan.BLOCK_BYTES`) and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.errors import ArmillaryError, BadModel
from armillary.model.transformer import Progress
from armillary.parallel.consensus import Consensus
from armillary.parallel.loading.byte_ranges import ByteRanges
from armillary.parallel.loading.read_plan import Need, Read, Span, StoredRows, Use
from armillary.store.remote import is_url

_AHEAD, _THREADS = 3, 2
"""blocks that are read ahead; threads that read them"""
_SENDING = 3
"""blocks on their way to other ranks at once"""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What loading cost a rank."""

    read_bytes: int  # from files
    received_bytes: int = 0  # from other ranks of the machine


def needs_of_machine(
    needs: Mapping[str, Need], ranks: Consensus, machines: Sequence[str]
) -> dict[int, Mapping[str, Need]]:
    """What each rank of this machine needs, from what this rank needs; all ranks call this. Without `machines`, each
    rank is as if alone on its own."""
    if not machines or ranks.size == 1:
        return {ranks.rank: needs}
    here = machines[ranks.rank]
    return {rank: each for rank, each in enumerate(ranks.gather(needs)) if machines[rank] == here}


@torch.no_grad()
def load_shards(
    reads: Sequence[Read], targets: Mapping[str, Tensor], *, rank: int, progress: Progress | None = None
) -> Loaded:
    """Fill `targets`, this rank's part of each tensor, with what the plan reads. All ranks of the plan call this.

    Where a rank cannot read, it forwards what it has and raises at the end: the others do not wait for it."""
    own = [(number, read) for number, read in enumerate(reads) if rank in _ranks_of(read)]
    matrices = {
        name: tensor.view(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        for name, tensor in targets.items()
        if tensor.numel()
    }
    device = next((each.device for each in targets.values() if each.device.type == "cuda"), torch.device("cpu"))
    sender, received = _Sender(), 0
    with ByteRanges() as ranges, ThreadPoolExecutor(_THREADS) as pool:
        blocks = _ReadAhead(ranges, pool, device, [read for _, read in own if read.reader == rank])
        for done, (number, read) in enumerate(own, start=1):
            block = next(blocks) if read.reader == rank else None
            for use in read.uses:
                if use.rank == rank:
                    part = _received(read, use, number, device) if block is None else columns_of(block, read, use)
                    place(matrices[read.name], part, use)
                    received += part.nbytes if block is None else 0
                elif block is not None:
                    sender.send(columns_of(block, read, use), use.rank, number)
            if progress:
                progress(done, len(own))
        sender.finish()
    if blocks.error is not None:
        raise blocks.error
    return Loaded(read_bytes=ranges.bytes_read, received_bytes=received)


def _ranks_of(read: Read) -> set[int]:
    return {read.reader, *(use.rank for use in read.uses)}


def _received(read: Read, use: Use, number: int, device: torch.device) -> Tensor:
    part = torch.empty(read.rows.size, use.columns.size, dtype=read.stored.dtype, device=device)
    dist.recv(part.view(torch.uint8), read.reader, tag=number)
    return part


def columns_of(block: Tensor, read: Read, use: Use) -> Tensor:
    """What is used of a block that was read."""
    return block[:, use.columns.begin - read.columns.begin : use.columns.end - read.columns.begin]


def place(matrix: Tensor, part: Tensor, use: Use) -> None:
    """Copy what a rank uses into its shard."""
    part = part.T if use.transposed else part
    last = use.row + use.step * (len(part) - 1)
    matrix[use.row : last + 1 : use.step, use.column : use.column + part.shape[1]].copy_(part)


class _Sender:
    """Sends to other ranks, a few blocks at once."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, Tensor]] = deque()

    def send(self, part: Tensor, rank: int, tag: int) -> None:
        content = part.contiguous().view(torch.uint8)
        while len(self._works) >= _SENDING:
            self._works.popleft()[0].wait()
        self._works.append((dist.isend(content, rank, tag=tag), content))

    def finish(self) -> None:
        while self._works:
            self._works.popleft()[0].wait()


class _ReadAhead(Iterator[Tensor]):
    """The blocks of this rank's reads on its device, while the next ones are read. After an error, blocks are whatever
    memory held."""

    def __init__(self, ranges: ByteRanges, pool: ThreadPoolExecutor, device: torch.device, reads: list[Read]) -> None:
        self.error: ArmillaryError | None = None
        self._ranges, self._pool, self._device, self._left = ranges, pool, device, iter(reads)
        self._queue: deque[tuple[Tensor, Future[None]]] = deque()

    def __next__(self) -> Tensor:
        while len(self._queue) < _AHEAD and (read := next(self._left, None)) is not None:
            pinned = self._device.type == "cuda"
            block = torch.empty(read.rows.size, read.columns.size, dtype=read.stored.dtype, pin_memory=pinned)
            self._queue.append((block, self._pool.submit(self._read, read, block)))
        block, future = self._queue.popleft()
        try:
            future.result()
        except ArmillaryError as error:
            self.error = self.error or error
        return block.to(self._device, non_blocking=True)

    def _read(self, read: Read, block: Tensor) -> None:
        if self.error is not None:
            return
        read_rows(self._ranges, read.stored, read.rows, read.columns, block)
        if read.twin is not None:
            other = torch.empty_like(block)
            read_rows(self._ranges, read.twin.stored, read.rows, read.columns, other)
            if not torch.equal(block, other):
                raise BadModel(read.twin.differs)


def read_rows(ranges: ByteRanges, stored: StoredRows, rows: Span, columns: Span, into: Tensor) -> None:
    """Full rows at once; a part of each row by itself, but from a store, where requests cost more than bytes."""
    size = stored.dtype.itemsize
    row_bytes, width = stored.columns.size * size, columns.size * size
    begin = stored.offset + (rows.begin - stored.rows.begin) * row_bytes
    if width == row_bytes:
        ranges.read(stored.path, begin, _memory(into))
        return
    skipped = (columns.begin - stored.columns.begin) * size
    if is_url(stored.path):
        full = torch.empty(rows.size, row_bytes, dtype=torch.uint8)
        ranges.read(stored.path, begin, _memory(full))
        into.view(torch.uint8).copy_(full[:, skipped : skipped + width])
        return
    memory = _memory(into)
    for number in range(rows.size):
        place = memory[number * width : (number + 1) * width]
        ranges.read(stored.path, begin + number * row_bytes + skipped, place)


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
