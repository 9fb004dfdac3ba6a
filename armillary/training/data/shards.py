"""Token shards: ids of many documents in memory-mapped files, written once and read at any position.

A folder (or a folder of a store) holds `index.json`, `tokenizer/` and `train/` and `validation/` with `NNNNN.bin`
(ids), `NNNNN.idx` (document offsets) and, for conversations, `NNNNN.msk` (which tokens are to be learnt).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from armillary.errors import BadData
from armillary.store.remote import Remote, is_url
from armillary.training.data.object_store_cache import Cache
from armillary.training.data.shard_files import ANSWER, OFFSET, ShardFiles, check_sum, fetched_tokenizer
from armillary.training.data.shard_index import Index, Shard, Split

SHARD_TOKENS = 100_000_000


class ShardWriter:
    """Appends documents to numbered shards of about `shard_tokens` ids; use as a context, then take `shards`."""

    def __init__(self, folder: Path, split: Split, dtype: str, *, shard_tokens: int = SHARD_TOKENS) -> None:
        self.shards: list[Shard] = []
        self._folder, self._split, self._limit = folder, split, shard_tokens
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._files: dict[str, _Summed] = {}
        self._offsets = [0]

    def __enter__(self) -> ShardWriter:
        (self._folder / self._split).mkdir()
        return self

    def add(self, ids: Sequence[int] | np.ndarray, answers: Sequence[bool] | np.ndarray | None = None) -> None:
        """Append one document, with a mask of what is to be learnt for all or for none; a shard is closed when it is
        full, never inside a document."""
        if not self._files:
            suffixes = (".bin",) if answers is None else (".bin", ".msk")
            self._files = {suffix: _Summed(self._path.with_suffix(suffix)) for suffix in suffixes}
        assert (answers is not None) == (".msk" in self._files), "masks for all documents or for none"
        self._files[".bin"].write(np.asarray(ids, dtype=self._dtype).tobytes())
        if answers is not None:
            assert len(answers) == len(ids)
            self._files[".msk"].write(np.asarray(answers, dtype=bool).astype(ANSWER).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids))
        if self._offsets[-1] >= self._limit:
            self._close()

    def __exit__(self, *error: object) -> None:
        if self._files:
            self._close()

    def _close(self) -> None:
        sums = {suffix: file.close() for suffix, file in self._files.items()}
        offsets = np.asarray(self._offsets, dtype=OFFSET).tobytes()
        self._path.with_suffix(".idx").write_bytes(offsets)
        self.shards.append(
            Shard(
                file=self._path.relative_to(self._folder).as_posix(),
                tokens=self._offsets[-1],
                documents=len(self._offsets) - 1,
                sha256=sums[".bin"],
                offsets_sha256=hashlib.sha256(offsets).hexdigest(),
                answers_sha256=sums.get(".msk", ""),
            )
        )
        self._files, self._offsets = {}, [0]

    @property
    def _path(self) -> Path:
        return self._folder / self._split / f"{len(self.shards):05d}.bin"


class _Summed:
    """A new file and the checksum of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("xb")
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def close(self) -> str:
        self._file.close()
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenShards:
    """The documents of one split as one long row of ids. `starts` and `first_documents` have where each shard starts
    in the row and the number of its first document, and the end of all. `verified`: each shard is compared with its
    checksum when it is first read."""

    folder: Path | Remote
    index: Index
    split: Split
    files: ShardFiles
    starts: np.ndarray
    first_documents: np.ndarray
    cache: Cache | None
    verified: bool

    @classmethod
    def open(
        cls,
        folder: str | Path,
        split: Split = "train",
        *,
        cache: Cache | None = None,
        verify: bool = False,
        index: Index | None = None,
    ) -> TokenShards:
        """Map the files of a split, which a URL needs a cache for; sizes are checked now (not with a known `index`),
        contents by `verify` or, shard by shard, when they are first read."""
        place = Remote(url=str(folder).rstrip("/")) if is_url(str(folder)) else Path(folder)
        read = index or (Index.read(place) if isinstance(place, Path) else Index.fetch(place))
        shards = read.splits[split]
        files = ShardFiles(place, read, split, cache=cache, verify=verify)
        if index is None:
            files.check_sizes()
        return cls(
            folder=place,
            index=read,
            split=split,
            files=files,
            starts=np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64),
            first_documents=np.cumsum([0, *(shard.documents for shard in shards)], dtype=np.int64),
            cache=cache,
            verified=verify,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Reopened where it is unpickled: a memory map would be pickled as its bytes."""
        reopen = partial(TokenShards.open, cache=self.cache, verify=self.verified, index=self.index)
        return reopen, (str(self.folder), self.split)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @property
    def num_shards(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def has_answers(self) -> bool:
        """Whether a mask says which tokens are to be learnt."""
        return any(shard.answers_sha256 for shard in self.index.splits[self.split])

    @property
    def tokenizer_folder(self) -> Path:
        """On this machine: that of a store is fetched."""
        if isinstance(self.folder, Path):
            return self.folder / "tokenizer"
        assert self.cache is not None
        return fetched_tokenizer(self.folder, self.cache, self.index.tokenizer_sha256)

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, its end of text included."""
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        shard = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        local = number - int(self.first_documents[shard])
        first, last = (int(offset) for offset in self.files.offsets(shard)[local : local + 2])
        return self.files.ids(shard)[first:last]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from position `start` of the row, across shards, int64; fewer at its end."""
        parts = [self._checked(shard, first, last) for shard, first, last in self.within(start, count)]
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def _checked(self, shard: int, first: int = 0, last: int | None = None) -> np.ndarray:
        """Ids that the model has a row for: on a GPU, an id beyond would abort the process without naming it."""
        ids = self.files.ids(shard)[first:last]
        if int(ids.max()) >= self.index.vocab:
            beyond = f"{self.files.name(shard)} holds ids beyond its vocabulary of {self.index.vocab}"
            raise BadData(f"{beyond}, so it is corrupt; prepare the data again")
        return ids

    def read_answers(self, start: int, count: int) -> np.ndarray:
        """Whether the tokens that `read` gives are to be learnt, bool."""
        parts = [self.files.answers(shard)[first:last] for shard, first, last in self.within(start, count)]
        return np.concatenate(parts).astype(bool) if parts else np.empty(0, bool)

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Positions in `start … start + count` at which a document starts."""
        starts = []
        for shard, first, last in self.within(start, count):
            documents = self.files.offsets(shard)[:-1]
            low, high = (int(np.searchsorted(documents, np.uint64(edge))) for edge in (first, last))
            starts.append(documents[low:high].astype(np.int64) + self.starts[shard])
        return np.concatenate(starts) if starts else np.empty(0, np.int64)

    def within(self, start: int, count: int) -> list[tuple[int, int, int]]:
        """(shard, first, last) of the pieces a stretch of the row is made of."""
        end = min(start + count, self.num_tokens)
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        pieces = []
        while start < end:
            base, limit = int(self.starts[shard]), int(self.starts[shard + 1])
            pieces.append((shard, start - base, min(end, limit) - base))
            start, shard = limit, shard + 1
        return pieces

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Read everything and compare with the checksums of the index; the first bad file is named."""
        check_sum(self.tokenizer_folder / "tokenizer.json", self.index.tokenizer_sha256)
        for shard in range(self.num_shards):
            self.files.verify(shard)
            self._checked(shard)
            progress(int(self.starts[shard + 1]), self.num_tokens)
