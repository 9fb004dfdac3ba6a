"""Records out of files: one JSON object a line (`.jsonl`, also packed with gzip), or the rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadData, missing
from armillary.training.data.corpus import Corpus
from armillary.training.data.readers import json_row, opened

_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row, as plain values."""

    values: dict[str, Any]
    """by key or column"""
    origin: str
    """file, with the line or row"""
    num_bytes: int
    """size of it as text"""


def records(corpus: Corpus) -> Iterator[Record]:
    """Every record of the corpus in order; other files (a README) are left out."""
    if not any(name.lower().endswith(_SUFFIXES) for name in corpus.names):
        raise BadData(f"{corpus.source} holds no records of conversations; give .jsonl or .parquet files")
    for path, name in corpus.local_files():
        if name.lower().endswith(_SUFFIXES):
            yield from _parquet(path, name) if name.lower().endswith(".parquet") else _lines(path, name)


def _lines(path: Path, name: str) -> Iterator[Record]:
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                origin = f"{name}:{number}"
                values = json_row(line, origin, like='{"messages": […]}')
                yield Record(values=values, origin=origin, num_bytes=len(line))


def _parquet(path: Path, name: str) -> Iterator[Record]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing("pyarrow", "Parquet data", "data") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Record(values=values, origin=f"{name}:{number}", num_bytes=len(str(values)))
    except (arrow.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise BadData(f"{path} is not readable Parquet ({' '.join(str(error).split())}); fetch it again") from None
