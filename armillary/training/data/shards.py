"""Token shards: ids of many documents in memory-mapped files, written once and read at any position.

A folder holds `index.json`, `tokenizer/` and `train/` and `validation/` with `NNNNN.bin` (ids) and `NNNNN.idx`
(document offsets).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from armillary.errors import BadData
from armillary.training.data.index import Index, Shard, Split

SHARD_TOKENS = 100_000_000
_OFFSET = np.dtype("<u8")


class ShardWriter:
    """Appends documents to numbered shards of about `shard_tokens` ids; use as a context, then take `shards`."""

    def __init__(self, folder: Path, split: Split, dtype: str, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self.shards: list[Shard] = []
        self._folder, self._split, self._limit = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._offsets = [0]

    def __enter__(self) -> ShardWriter:
        (self._folder / self._split).mkdir()
        return self

    def add(self, ids: Sequence[int]) -> None:
        """Append one document; a shard is closed when it is full, never inside a document."""
        if self._file is None:
            self._file = (self._folder / self._name).open("xb")
        data = np.asarray(ids, dtype=self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._offsets.append(self._offsets[-1] + len(ids))
        if self._offsets[-1] >= self._limit:
            self._close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file is not None:
            self._close()

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()
        offsets = np.asarray(self._offsets, dtype=_OFFSET).tobytes()
        shard = Shard(
            file=self._name,
            tokens=self._offsets[-1],
            documents=len(self._offsets) - 1,
            sha256=self._hash.hexdigest(),
            offsets_sha256=hashlib.sha256(offsets).hexdigest(),
        )
        (self._folder / shard.offsets_file).write_bytes(offsets)
        self.shards.append(shard)
        self._file, self._hash, self._offsets = None, hashlib.sha256(), [0]

    @property
    def _name(self) -> str:
        return f"{self._split}/{len(self.shards):05d}.bin"


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShards:
    """The documents of one split as one long row of ids."""

    folder: Path
    """where index.json is"""
    index: Index
    """as it was read"""
    split: Split
    """train or validation"""
    ids: tuple[np.ndarray, ...]
    """a memory map of ids per shard"""
    offsets: tuple[np.ndarray, ...]
    """a memory map of document offsets per shard"""
    starts: np.ndarray
    """where each shard starts in the row, and where the row ends"""
    first_documents: np.ndarray
    """number of the first document of each shard, and of all documents"""

    @classmethod
    def open(cls, folder: str | Path, split: Split = "train") -> TokenShards:
        """Map the files of a split; sizes are checked, contents by `verify`."""
        folder = Path(folder)
        index = Index.read(folder)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        shards = index.splits[split]
        return cls(
            folder=folder,
            index=index,
            split=split,
            ids=tuple(_mapped(folder / shard.file, dtype, shard.tokens) for shard in shards),
            offsets=tuple(_mapped(folder / shard.offsets_file, _OFFSET, shard.documents + 1) for shard in shards),
            starts=np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64),
            first_documents=np.cumsum([0, *(shard.documents for shard in shards)], dtype=np.int64),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, its end of text included."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        shard = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        local = number - int(self.first_documents[shard])
        first, last = (int(offset) for offset in self.offsets[shard][local : local + 2])
        return self.ids[shard][first:last]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from position `start` of the row, across shards; fewer at its end."""
        parts = [self.ids[shard][first:last] for shard, first, last in self._within(start, count)]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Positions in `start … start + count` at which a document starts."""
        found = []
        for shard, first, last in self._within(start, count):
            documents = self.offsets[shard][:-1]
            low, high = (int(np.searchsorted(documents, np.uint64(edge))) for edge in (first, last))
            found.append(documents[low:high].astype(np.int64) + self.starts[shard])
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _within(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """(shard, first, last) of the pieces a stretch of the row is made of."""
        end = min(start + count, self.num_tokens)
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < end:
            base, limit = int(self.starts[shard]), int(self.starts[shard + 1])
            pieces.append((shard, start - base, min(end, limit) - base))
            start, shard = limit, shard + 1
        return pieces

    def verify(self) -> None:
        """Read everything and compare with the checksums of the index; the first bad file is named."""
        _check(self.tokenizer_folder / "tokenizer.json", self.index.tokenizer_sha256)
        for shard, ids in zip(self.index.splits[self.split], self.ids, strict=True):
            _check(self.folder / shard.file, shard.sha256)
            _check(self.folder / shard.offsets_file, shard.offsets_sha256)
            if int(ids.max()) >= self.index.vocab:
                raise BadData(f"{self.folder / shard.file} holds ids beyond {self.index.vocab}; prepare the data again")


def _mapped(path: Path, dtype: Any, count: int) -> np.ndarray:
    if not path.is_file():
        raise BadData(f"{path} is missing; prepare the data again")
    size = path.stat().st_size
    if size != count * dtype.itemsize:
        raise BadData(f"{path} has {size} bytes instead of {count * dtype.itemsize}; prepare the data again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _check(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise BadData(f"{path} is missing; prepare the data again")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise BadData(f"{path} is corrupt (its checksum differs from the index); prepare the data again")
