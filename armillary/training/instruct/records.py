"""Records out of files: one JSON object a line (`.jsonl`, also packed with gzip), or the rows of Parquet files."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.errors import BadData, missing
from armillary.training.data.corpus import Corpus

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
    """Every record of the corpus in order; files of other kinds beside them (a README) are left out."""
    if not any(name.lower().endswith(_SUFFIXES) for name in corpus.names):
        raise BadData(f"{corpus.source} holds no records of conversations; give .jsonl or .parquet files")
    for path, name in corpus.local_files():
        if name.lower().endswith(_SUFFIXES):
            yield from _parquet(path, name) if name.lower().endswith(".parquet") else _lines(path, name)


def _lines(path: Path, name: str) -> Iterator[Record]:
    try:
        with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    origin = f"{name}:{number}"
                    yield Record(values=_object(line, origin), origin=origin, num_bytes=len(line))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} is a broken gzip file ({error}); fetch or pack it again") from None


def _object(line: bytes, origin: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{origin} is not JSON ({error}); each line must be one JSON object") from None
    if not isinstance(values, dict):
        raise BadData(f'{origin} holds no JSON object; each line must look like {{"messages": […]}}')
    return values


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
