"""The save plan: which rank writes which part of which tensor, made once per run.

A tensor, or a shard of one, that several ranks have is written in parts by all of them, so that saving scales with the
number of ranks. The result is torch's metadata, so the files can be read by torch.distributed.checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from armillary.training.checkpoint.container import container

LARGEST = 256 << 20
"""bytes of a chunk: larger tensors are written as several, so that a rank of another layout need not read all of it"""
SHARED = 64 << 10
"""bytes above which a replicated tensor is split over the ranks that have it"""
_ALIGNED = 64
_VERSION = "1.0.0"


class WriteChunk(NamedTuple):
    """A box of a tensor: a shard, or a part of one."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    full: tuple[int, ...]  # shape of the tensor on all ranks together
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize

    def rows(self, begin: int, end: int) -> "WriteChunk":
        """The part between two positions of dim 0."""
        offsets = (self.offsets[0] + begin, *self.offsets[1:])
        return self._replace(offsets=offsets, sizes=(end - begin, *self.sizes[1:]))


class Place(NamedTuple):
    """Where a chunk is in its rank's file: a container of torch.save, with the tensor's bytes at `data`."""

    chunk: WriteChunk
    offset: int
    length: int
    data: int


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """This rank's file, and the chunks in the files of all ranks."""

    places: tuple[Place, ...]
    size: int  # bytes of the file
    files: Sequence[Sequence[Place]]

    @property
    def total_bytes(self) -> int:
        """Of the files of all ranks."""
        return sum(place.length for places in self.files for place in places)


def local_chunks(tensors: Mapping[str, Tensor]) -> list[WriteChunk]:
    """What this rank has of each tensor."""
    items = create_default_local_save_plan(dict(tensors), True).items
    chunks = [
        WriteChunk(
            name=item.index.fqn,
            offsets=tuple(item.tensor_data.chunk.offsets),
            sizes=tuple(item.tensor_data.chunk.sizes),
            full=tuple(item.tensor_data.size),
            dtype=item.tensor_data.properties.dtype,
        )
        for item in items
    ]
    return [chunk for chunk in chunks if chunk.bytes]


def balance(local: Sequence[Iterable[WriteChunk]]) -> list[list[WriteChunk]]:
    """From what each rank has to what each rank writes: every chunk once, split over the ranks that have it. Small ones
    go to the rank with the least to write."""
    holders: dict[WriteChunk, list[int]] = {}
    for rank, chunks in enumerate(local):
        for chunk in chunks:
            holders.setdefault(chunk, []).append(rank)
    written: list[list[WriteChunk]] = [[] for _ in local]
    loads = [0] * len(written)
    for chunk, ranks in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0].bytes)):
        for part in split(chunk, len(ranks)):
            rank = min(ranks, key=lambda number: loads[number])
            written[rank].append(part)
            loads[rank] += part.bytes
    return [sorted(chunks, key=lambda chunk: (chunk.name, chunk.offsets)) for chunks in written]


def split(chunk: WriteChunk, num_ranks: int) -> list[WriteChunk]:
    """Parts of at most LARGEST bytes; at least one per rank where it is large enough, and so many that they balance."""
    length = chunk.sizes[0] if chunk.sizes else 1
    wanted = num_ranks if chunk.bytes > SHARED else 1
    count = min(length, max(wanted, -(-chunk.bytes // LARGEST)))
    count = min(length, -(-count // wanted) * wanted)
    if count <= 1:
        return [chunk]
    edges = [length * number // count for number in range(count + 1)]
    return [chunk.rows(begin, end) for begin, end in pairwise(edges)]


def file_layout(chunks: Iterable[WriteChunk]) -> tuple[tuple[Place, ...], int]:
    """The containers of a file one after the other, and its size."""
    places, at = [], 0
    for chunk in chunks:
        wrapper = container(chunk.sizes, chunk.dtype)
        length = len(wrapper.head) + chunk.bytes + len(wrapper.tail)
        places.append(Place(chunk=chunk, offset=at, length=length, data=at + len(wrapper.head)))
        at += -(-length // _ALIGNED) * _ALIGNED
    return tuple(places), at


def file_name(rank: int, *, delta: bool = False) -> str:
    return f"__{rank}_0.{'delta' if delta else 'distcp'}"


def metadata(files: Sequence[Sequence[Place]], deltas: Sequence[Sequence[tuple[int, int]]] | None = None) -> Metadata:
    """torch's metadata of the files of all ranks; of deltas, each chunk's offset and length are in `deltas`."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, places in enumerate(files):
        for number, place in enumerate(places):
            chunk = place.chunk
            properties = TensorProperties(dtype=chunk.dtype)
            about = tensors.setdefault(
                chunk.name, TensorStorageMetadata(properties=properties, size=torch.Size(chunk.full), chunks=[])
            )
            index = MetadataIndex(chunk.name, chunk.offsets, len(about.chunks))
            about.chunks.append(ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)))
            offset, length = (place.offset, place.length) if deltas is None else deltas[rank][number]
            storage[index] = _StorageInfo(file_name(rank, delta=deltas is not None), offset, length)
    return Metadata(
        state_dict_metadata=tensors,
        planner_data={name: (name,) for name in tensors},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=_VERSION,
    )
